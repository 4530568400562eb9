"""Every setting of a run: one frozen dataclass per TOML table, one docstring per key (`--help` shows it).

Defaults stand here; what a configuration means, and what it may not be, is decided in `trainer/job`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_SHIPPED_TOKENIZER = Path(__file__).resolve().parent.parent / "assets" / "python_4k.tiktoken"


@dataclass(frozen=True)
class Job:
    """The run as a whole."""

    config_file: str | None = None
    """TOML file to read; for the command line only (a file inherits from another with base = "other.toml")."""

    dump_folder: str = "./outputs"
    """Folder for everything the run writes; made when missing."""

    description: str = ""
    """A line about the run, for its reader; printed at the start."""

    print_config: bool = False
    """Print the effective configuration as TOML, then train; --print-config prints it and ends."""

    max_minutes: float | None = None
    """Minutes after which the run stops cleanly, at the end of the step during which they pass; None: no limit."""


@dataclass(frozen=True)
class Profiling:
    """Traces of time and memory."""

    enable_profiling: bool = False
    """Write a trace of the profiler for every rank, with the parts of a step as named regions (Chrome's format)."""

    save_traces_folder: str = "profile_trace"
    """Folder of the traces, inside job.dump_folder."""

    profile_freq: int = 100
    """Steps from one trace (and memory snapshot) to the next; at least profiler_warmup + profiler_active."""

    profiler_active: int = 1
    """Steps that a trace records, at least 1."""

    profiler_warmup: int = 3
    """Steps before them in which the profiler runs and nothing is kept, at least 0."""

    enable_memory_snapshot: bool = False
    """Record every allocation on the GPU, and write it every profile_freq steps and when memory runs out; CUDA only."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, inside job.dump_folder."""


@dataclass(frozen=True)
class Metrics:
    """What is reported, and how often."""

    log_freq: int = 10
    """Steps between two log lines; at least 1."""

    enable_tensorboard: bool = False
    """Write TensorBoard event files as well."""

    save_tb_folder: str = "tb"
    """Folder of the event files, inside job.dump_folder."""

    enable_color_printing: bool = True
    """Colours in the log, on a terminal only."""


@dataclass(frozen=True)
class Model:
    """Architecture and tokenizer."""

    name: str = "llama3"
    """Model family: llama3."""

    flavor: str = "debugmodel"
    """Size within the family; llama3 has debugmodel, 1B, 3B, 8B, 70B, 405B."""

    norm_type: Literal["rmsnorm", "layernorm", "np_layernorm"] = "rmsnorm"
    """Normalisation before each block; np_layernorm has no parameters."""

    tokenizer_path: str | None = None
    """BPE file in tiktoken's format (tokenizer.model), or its folder; None: the small one of the program."""

    rope_theta: float | None = None
    """Base of the rotary frequencies, above 0; None: the flavor's."""

    sliding_window: int | None = None
    """Tokens that a token sees, itself and those before it, at least 1; None: all before it."""

    sliding_window_every: int = 1
    """Every n-th layer, from the first on, has the window, the others see everything; at least 1."""

    attention_sinks: bool = False
    """A learnt logit per head that takes a share of the attention and gives nothing: a head may look nowhere."""

    rope_scaling: float | None = None
    """Factor of Llama 3.1's frequency scaling, at least 1; 1.0: no scaling; None: the flavor's."""

    @property
    def tokenizer_file(self) -> str:
        """The tokenizer that is used: `tokenizer_path`, or the shipped file."""
        return str(_SHIPPED_TOKENIZER) if self.tokenizer_path is None else self.tokenizer_path


@dataclass(frozen=True)
class Optimizer:
    """The update rule."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """AdamW decays the weights themselves, Adam adds the decay to the gradient."""

    lr: float = 8e-4
    """Peak learning rate, above 0; lr_scheduler scales it."""

    beta1: float = 0.9
    """Decay of the running mean of the gradient, in [0, 1)."""

    beta2: float = 0.95
    """Decay of the running mean of its square, in [0, 1)."""

    eps: float = 1e-8
    """Added to the root of the second moment, above 0."""

    weight_decay: float = 0.1
    """Weight decay of the matrices (not of norms and embeddings), at least 0."""

    implementation: Literal["for-loop", "foreach", "fused"] = "foreach"
    """One kernel per parameter, per list of parameters, or for the whole update."""


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate over the steps: linear warm-up, constant, decay."""

    warmup_steps: int = 200
    """Steps of the linear warm-up, at least 0; a run may be shorter than its warm-up."""

    total_steps: int | None = None
    """Steps after which the decay has ended; None: training.steps."""

    decay_ratio: float | None = None
    """Share of the total, at its end, during which the rate decays, in [0, 1]; None: from the end of warm-up on."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: float = 0.0
    """Share of optimizer.lr that is left at the end of the decay, in [0, 1]."""


@dataclass(frozen=True)
class Training:
    """Data, batch, precision and length of the run."""

    dataset: str = "python_stdlib"
    """Documents: python_stdlib (the interpreter's own sources), text (one per file) or jsonl (one per line)."""

    dataset_path: str | None = None
    """File, folder or glob of the data sets text and jsonl; python_stdlib takes none."""

    local_batch_size: int = 8
    """Rows per data-parallel rank and micro-batch, at least 1."""

    global_batch_size: int = -1
    """Rows per step: a multiple of local_batch_size x data-parallel degree (by accumulation); -1: that product."""

    seq_len: int = 2048
    """Tokens per row; a multiple of parallelism.tensor_parallel_degree."""

    attention_mask: Literal["causal", "document"] = "causal"
    """What a token sees: all before it in its row, or in its document, where positions count from its start."""

    max_norm: float = 1.0
    """Largest norm of the gradient, which is scaled down to it; above 0."""

    steps: int = 10000
    """Optimizer steps of the run, at least 1."""

    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Data type in which parameters and optimizer state are stored."""

    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which the model computes; auto: bfloat16 on CUDA (but for float64 runs), training.dtype on CPU."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are reduced; with training.dtype = "float64" it is float64 always."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""

    gc_freq: int = 50
    """Steps between two runs of Python's garbage collector, on all ranks at once; at least 1."""

    seed: int = 0
    """Seed of the initial weights and of the order of the data, at least 0."""

    deterministic: bool = False
    """Use only deterministic kernels: slower, and the same bits in every run of one layout."""

    data_streams: int = 64
    """Logical streams the data is dealt to, which fix its order; a multiple of the data-parallel degree."""

    def compute_dtype(self, device_type: str) -> str:
        """Return the name of the data type in which the model computes on a device of this type."""
        if self.mixed_precision_param != "auto":
            return self.mixed_precision_param
        # A float64 run asks for exactness; bfloat16 pays where there is hardware for it.
        return "bfloat16" if device_type == "cuda" and self.dtype != "float64" else self.dtype


@dataclass(frozen=True)
class Parallelism:
    """How the ranks share the work; the product of the degrees is the number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the sharded model (DDP, or with a shard degree HSDP)."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the parameters (FSDP); -1: all that the other degrees leave."""

    tensor_parallel_degree: int = 1
    """Ranks that share every matrix product (TP); divides the heads, the feed-forward width and the vocabulary."""

    context_parallel_degree: int = 1
    """Ranks that share each sequence (CP); any, as long as every rank gets a token."""

    context_parallel_method: Literal["ring", "all_gather", "all_to_all", "hybrid", "auto"] = "ring"
    """How attention reaches the other ranks' tokens; auto: by traffic, the choice is logged with its reason."""

    context_parallel_hybrid_degrees: tuple[int, ...] = ()
    """For hybrid, [all_to_all, ring]: ranks that divide the heads, and groups of them that make a ring."""

    context_parallel_load_balancer: Literal["head_tail", "contiguous", "balanced"] = "head_tail"
    """Tokens of a rank: two pieces, equal work under a causal mask; one piece; or blocks dealt by each batch's cost."""

    context_parallel_heads_per_pass: int = 0
    """Key/value heads that travel at a time (all_gather, all_to_all): less memory, more exchanges; 0: all."""

    context_parallel_kernel: Literal[
        "auto", "cpu_flash", "math", "cuda_flash", "cudnn", "efficient", "varlen", "flex"
    ] = "auto"
    """What computes planned attention (CP, documents, sliding windows); auto: the fastest for device and data type."""

    pipeline_parallel_degree: int = 1
    """Ranks that share the layers (PP), each with one stage of the model or several; 1: off."""

    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order of the micro-batches' forwards and backwards; all but the first two have several stages a rank."""

    pipeline_parallel_schedule_csv: str | None = None
    """File with an order of one's own: a line per rank, of cells such as 0F1 (stage, action, micro-batch)."""

    pipeline_parallel_microbatch_size: int = 1
    """Rows of a micro-batch, at least 1; divides training.local_batch_size."""

    pipeline_parallel_microbatches: int | None = None
    """Micro-batches of a pass, at least 1, in place of their size; None: as the size says."""

    pipeline_parallel_layers_per_stage: int | None = None
    """Layers of a stage, at least 1; None: one stage a rank, or two where the schedule can have several."""

    pipeline_parallel_module_fqns: tuple[str, ...] = ()
    """Modules of each stage, as "tok_embeddings,layers.0", "layers.1,norm,output"; none: dealt evenly."""

    pipeline_parallel_split_points: tuple[str, ...] = ()
    """Modules at which a new stage begins, such as "layers.2", "layers.4"; none: dealt evenly."""

    pipeline_parallel_first_stage_less_layers: int = 1
    """As how many layers the embedding counts when layers are dealt evenly, at least 0."""

    pipeline_parallel_last_stage_less_layers: int = 1
    """As how many layers the last norm and the output count when layers are dealt evenly, at least 0."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free parameters after the forward and gather them for the backward; default: all but the last, none with PP."""

    fsdp_forward_prefetch: int = 0
    """Layers whose parameters are gathered ahead of the one that runs forward; 0: as FSDP does by itself, one."""

    fsdp_backward_prefetch: int = 0
    """The same backward."""

    enable_async_tensor_parallel: bool = False
    """Overlap the exchanges of TP with its matrix products; needs compile.enable, and GPUs with symmetric memory."""

    disable_loss_parallel: bool = False
    """With TP, gather the logits before the loss instead of computing it on their shards."""

    @property
    def overlaps_tensor_parallel(self) -> bool:
        """Whether the exchanges of tensor parallelism overlap with its matrix products."""
        return self.enable_async_tensor_parallel and self.tensor_parallel_degree > 1


@dataclass(frozen=True)
class Checkpoint:
    """The state of the run on disk, from which the same command goes on."""

    enable: bool = False
    """Save checkpoints, and start from the latest one that is there."""

    folder: str = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""

    interval: int = 500
    """Steps from one checkpoint to the next, at least 1; the last step of a run is always saved."""

    keep_latest_k: int = 0
    """Checkpoints to keep, the oldest are deleted; 0: all."""

    load_step: int = -1
    """Step to start from, one of those saved; -1: the latest."""

    async_mode: Literal["disabled", "async"] = "disabled"
    """async: write a copy in the background while training goes on."""

    stop_timeout_seconds: int = 120
    """Seconds in which a stop by SIGTERM or SIGINT has finished its step and saved; after them it ends at once."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """What the backward computes again instead of keeping it from the forward."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """Keep all; only the input of each layer; as selective_ac_option says; or what the compiler can in a budget."""

    selective_ac_option: str = "op"
    """For selective: "op" keeps attention and every second matrix product; "2" recomputes every 2nd layer in full."""

    memory_budget: float = 0.5
    """For memory_budget: share of what would be kept without any recomputation, in (0, 1)."""

    @property
    def every(self) -> int | None:
        """For selective: every how many layers are checkpointed in full; None for "op"."""
        return None if self.selective_ac_option == "op" else int(self.selective_ac_option)


@dataclass(frozen=True)
class Compile:
    """torch.compile of each layer, as one graph, and of the loss."""

    enable: bool = False
    """Compile: less time and memory a step, some minutes at the start."""

    components: tuple[Literal["model", "loss"], ...] = ("model", "loss")
    """What is compiled: the layers, the loss."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """inductor makes kernels; aot_eager and eager only trace, to find out where an error comes from."""


@dataclass(frozen=True)
class Float8:
    """Matrix products in float8, through torchao (an optional extra)."""

    enable: bool = False
    """Multiply in float8 in the linear modules; on GPUs of compute capability 8.9 or more, or emulated."""

    recipe_name: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale for a tensor (fastest), or one for each row and column (closer to high precision)."""

    enable_fsdp_float8_all_gather: bool = False
    """FSDP casts its shards and gathers weights in float8: less traffic; tensorwise only."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """For this all-gather, find the scales of all weights by one reduction a step instead of one a weight."""

    filter_fqns: tuple[str, ...] = ("output",)
    """Modules whose name contains one of these stay in high precision, such as "output", "layers.0." or "wk"."""

    emulate: bool = False
    """Float8's rounding without its kernels: slow, on any machine."""


@dataclass(frozen=True)
class Comm:
    """Process groups."""

    init_timeout_seconds: int = 300
    """Seconds a collective may take until the first step is done, above 0."""

    train_timeout_seconds: int = 100
    """Seconds a collective may take from then on, above 0."""

    checkpoint_timeout_seconds: int = 1800
    """Seconds a collective of saving or loading a checkpoint may take: one rank's disk may be slow; above 0."""

    check_consistency: bool = False
    """Before each step compare plan and batch of all context-parallel ranks by a hash: slow, and names who differs."""

    trace_buf_size: int = 20000
    """Collectives that the flight recorder remembers for a report after a hang; 0: off."""

    save_traces_folder: str = "comm_traces"
    """Folder of these reports, inside job.dump_folder; one file per rank that lost its peers."""


@dataclass(frozen=True)
class JobConfig:
    """A whole configuration; the attributes are the tables of the TOML file."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    comm: Comm = field(default_factory=Comm)

"""Every setting of a run: one frozen dataclass per TOML table, one docstring per key (`--help` shows it).

A field has the type, default, bounds and unit of its key, and when it has an effect (`trainer/config/keys.py`).
`trainer/job` decides what a configuration means, and checks which settings work together.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.config.checkpoint import SAVING, Checkpoint
from trainer.config.data import CHAT, CONVERSATIONS, DPO, Chat, Mixture, reads
from trainer.config.keys import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_OR_OFF,
    STEPS,
    TOKENS,
    Bounds,
    Condition,
    key,
    needs,
    needs_value,
    unless,
)
from trainer.config.optimizer import LRScheduler, Muon, Optimizer
from trainer.config.parallelism import DATA_PARALLEL, EXPERTS, NO_PIPELINE, Comm, Parallelism
from trainer.config.registry import TASK_OF_DATASET
from trainer.config.transforms import ActivationCheckpoint, Compile, Float8, LoRA

TOKENIZER_FILES = ("tokenizer.json", "original/tokenizer.model", "tokenizer.model")
"""Files of a tokenizer in a folder; the first existing one is used."""
_SHIPPED_TOKENIZER = Path(__file__).resolve().parent.parent / "assets" / "python_4k.tiktoken"

_LINES = reads("jsonl")
_DOCUMENTS = Condition(
    lambda config, _: config.masks_documents,
    "with training.attention_mask = 'causal', under which documents see each other",
    "use training.attention_mask = 'document'",
    general="with training.attention_mask = 'causal'",
)
_CHUNKS = Condition(
    lambda config, _: config.training.sequence_chunks > 1,
    "without training.sequence_chunks above 1",
)
_ONE_LOSS = Condition(
    lambda config, _: config.lora.rank == 0 and config.training.dataset != "preferences",
    "with adapters (lora.rank) or preferences (training.dataset), which train no further tokens",
    "leave it out",
)
_FURTHER = Condition(lambda config, _: config.model.mtp_layers > 0, "with model.mtp_layers = 0")
_SUMMED = unless("training.dataset", "preferences", ", whose loss is no sum over tokens")
_TRACES = needs("profiling.enable_profiling")
_WINDOW = needs("model.sliding_window", remedy="leave it out, or set a window, such as 4096")
_SCALED = Condition(
    lambda config, _: config.model.rope_scaling not in (None, 1.0),
    "without model.rope_scaling above 1",
    "leave it out, or set the factor, such as model.rope_scaling = 4.0",
)
_BY_LENGTH = unless(
    "model.rope_scaling_type", "linear", ", which stretches all frequencies alike"
)
_SHORT_WINDOW = Condition(
    lambda config, _: (
        config.model.sliding_window is None
        or config.model.sliding_window < config.training.seq_len
    ),
    "with sequences of training.seq_len = {0.training.seq_len} tokens: the window covers the sequence",
)
_NOT_FLOAT64 = unless("training.dtype", "float64", ", whose gradients are reduced in float64")
_REDUCED = Condition(
    lambda _, degrees: degrees.dp * degrees.cp > 1,
    "where gradients are not reduced (data-parallel degree x context_parallel_degree = 1)",
)
_VALIDATING = needs("validation.enable")
WITHOUT_GATHERED_LOGITS = Condition(
    lambda config, degrees: degrees.tp == 1 or not config.parallelism.disable_loss_parallel,
    "with parallelism.disable_loss_parallel, which gathers all logits",
)
OUTPUT_IN_HIGH_PRECISION = Condition(
    lambda config, _: (
        not config.float8.enable or any(part in "output" for part in config.float8.filter_fqns)
    ),
    "with the output in float8 (no 'output' in float8.filter_fqns), which makes all logits at once",
    general="with the output in float8",
)


STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Job:
    """The run as a whole."""

    config_file: str | None = None
    """TOML file to read, or a preset by name, such as llama3_8b. A file has base = "other.toml" instead."""
    dump_folder: str = "./outputs"
    """Folder of everything that the run writes; created if it is missing."""
    description: str = ""
    """A line about the run, printed at the start."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Type of device of all ranks; auto: a GPU a rank where GPUs are visible, else the CPU."""
    imports: tuple[str, ...] = ()
    """Python modules of your own, imported first: they add models, data sets, tasks (docs/your_own_model.md)."""
    max_minutes: float | None = key(None, POSITIVE, "minutes", example=60.0)
    """Minutes after which the run stops cleanly, at the end of a step; None: no limit."""
    stop_signals: tuple[Literal[STOP_SIGNALS], ...] = STOP_SIGNALS
    """Signals after which the run finishes its step, saves and ends. SIGUSR1 to a rank always shows its stacks."""


@dataclass(frozen=True)
class Profiling:
    """Traces of time and memory."""

    enable_profiling: bool = False
    """Write traces of every rank in Chrome's format, with named regions for the parts of a step, to profile_trace."""
    profile_freq: int = key(
        100,
        AT_LEAST_ONE,
        "steps",
        when=needs("profiling.enable_profiling", "profiling.enable_memory_snapshot"),
    )
    """Steps from one trace (and memory snapshot) to the next; at least profiler_warmup + profiler_active."""
    profiler_active: int = key(1, AT_LEAST_ONE, "steps", when=_TRACES)
    """Steps in a trace."""
    profiler_warmup: int = key(3, NOT_NEGATIVE, "steps", when=_TRACES)
    """Steps before a trace in which the profiler runs and discards its records."""
    enable_memory_snapshot: bool = False
    """Write GPU allocations to memory_snapshot every profile_freq steps and when memory runs out; CUDA only."""


@dataclass(frozen=True)
class Metrics:
    """Log lines and metrics."""

    log_freq: int = key(10, AT_LEAST_ONE, "steps")
    """Steps between two log lines."""
    enable_tensorboard: bool = False
    """Also write TensorBoard event files, to tb inside job.dump_folder."""
    enable_wandb: bool = False
    """Also write to Weights & Biases (an extra); project and run name come from its variables, e.g. WANDB_PROJECT."""
    log_update_norms: bool = False
    """Also log root mean squares of weights and of their updates, by kind; a copy of a rank's weights for each step."""


@dataclass(frozen=True)
class Model:
    """Architecture and tokenizer."""

    path: str | None = None
    """Folder of a Hugging Face model that gives family, sizes, weights and tokenizer; other keys change them."""
    name: str = "llama3"
    """Model family: llama3, qwen3, gpt_oss, gemma3 and others of docs/hugging_face.md, or one of job.imports."""
    flavor: str = "debugmodel"
    """Size, such as debugmodel or 8B, base (unet, nat), or ./folder of a Hugging Face config.json: its sizes alone."""
    mtp_layers: int = key(0, NOT_NEGATIVE, "layers", when=(TOKENS, _ONE_LOSS))
    """Additional layers that predict one further token each (multi-token prediction), for training alone; 0: none."""
    norm_type: Literal["rmsnorm", "layernorm", "np_layernorm"] = key("rmsnorm", when=TOKENS)
    """Normalisation before each block; np_layernorm has no parameters."""
    tokenizer_path: str | None = key(None, when=TOKENS)
    """tokenizer.json, or tokenizer.model of tiktoken, or its folder; None: the small shipped one."""
    chat_template: str | None = key(None, when=CHAT)
    """Jinja file of the chat template, or a registered name; None: the tokenizer's template; "none": plain text."""
    rope_theta: float | None = key(None, POSITIVE, example=500000.0, when=TOKENS)
    """Base of the rotary frequencies; None: the flavor's."""
    sliding_window: int | None = key(
        None, AT_LEAST_ONE, "tokens", example=4096, when=(TOKENS, _SHORT_WINDOW)
    )
    """Number of tokens that a token sees, itself included; None: the flavor's, mostly all before it."""
    sliding_window_every: int = key(1, AT_LEAST_ONE, "layers", when=(_WINDOW, _SHORT_WINDOW))
    """Every n-th layer has the window, from the first on; the other layers see all tokens."""
    attention_sinks: bool = key(False, when=TOKENS)
    """A learnt logit per head that takes a share of the attention without a value."""
    short_conv_kernel: int = key(
        0,
        Bounds(lambda x: x == 0 or 2 <= x <= 64, "0 (none) or in [2, 64]"),
        "tokens",
        when=TOKENS,
    )
    """Tokens of a causal convolution of queries, keys and values, such as 4, within each packed document; 0: none."""
    rope_scaling: float | None = key(
        None,
        Bounds(AT_LEAST_ONE.test, "at least 1 (1.0: no scaling)"),
        example=8.0,
        when=TOKENS,
    )
    """Factor by which rotary frequencies are stretched; None: the flavor's."""
    rope_scaling_type: Literal["llama3", "linear", "yarn"] | None = key(
        None, when=(TOKENS, _SCALED)
    )
    """Which frequencies are stretched: as in Llama 3.1, all, or as in YaRN; None: as the flavor's, or llama3."""
    rope_original_seq_len: int | None = key(
        None, AT_LEAST_ONE, "tokens", example=32768, when=(TOKENS, _SCALED, _BY_LENGTH)
    )
    """Longest sequences before the extension; None: the flavor's, or 8192 with llama3 if it has no scaling."""
    router_aux_loss_coef: float | None = key(None, NOT_NEGATIVE, example=0.001, when=EXPERTS)
    """Weight of the loss that balances a layer's experts, for models with experts; None: the flavor's; 0: off."""
    router_aux_loss_load: Literal["step_before", "micro_batch"] = key(
        "step_before", when=EXPERTS
    )
    """Router loads of this loss: the previous step's, or (as in transformers) this micro-batch's."""
    router_bias_update_rate: float | None = key(None, NOT_NEGATIVE, example=0.001, when=EXPERTS)
    """Change after each step of the biases that balance experts without a loss; None: the flavor's; 0: off."""

    @property
    def folder(self) -> Path | None:
        """The Hugging Face folder that `flavor` names, a path with a slash; None if it names a flavor."""
        return Path(self.flavor) if "/" in self.flavor else None

    @property
    def tokenizer_file(self) -> str:
        """The path of the tokenizer in use: `tokenizer_path`, the folder `flavor` if it has one, or the shipped one."""
        if self.tokenizer_path is not None:
            return self.tokenizer_path
        folder = self.folder
        has_one = folder and any((folder / name).is_file() for name in TOKENIZER_FILES)
        return self.flavor if has_one else str(_SHIPPED_TOKENIZER)


@dataclass(frozen=True)
class Training:
    """Data, batch, precision and length of the run."""

    dataset: str = "python_stdlib"
    """python_stdlib (Python's own sources), text, jsonl, chat, preferences, hub, tokens, or one of job.imports."""
    dataset_path: str | None = None
    """File, folder or glob; tokens: files of `lct tokenize`; hub: NAME:CONFIG:SPLIT; chat: also hub://NAME."""
    dataset_text_field: str = key("text", when=_LINES)
    """Field of a line of jsonl that holds the text."""
    on_bad_record: Literal["stop", "skip"] = key("stop", when=TOKENS)
    """A document that cannot be read, or has a wrong token id: stop the run with a checkpoint, or leave it out."""
    local_batch_size: int = key(8, AT_LEAST_ONE, "sequences")
    """Sequences of a micro-batch on each data-parallel rank."""
    global_batch_size: int = key(-1, unit="sequences")
    """Sequences of a step: a multiple of local_batch_size x data-parallel degree (accumulation); -1: that product."""
    seq_len: int = key(2048, AT_LEAST_ONE, "tokens", when=TOKENS)
    """Tokens of a sequence; a multiple of parallelism.tensor_parallel_degree."""
    attention_mask: Literal["causal", "document"] = key("causal", when=TOKENS)
    """A token sees earlier tokens of its sequence, or of its document, with positions from 0; chat: document."""
    balance: Literal["off", "step"] = key(
        "off", when=(TOKENS, _DOCUMENTS, NO_PIPELINE, DATA_PARALLEL)
    )
    """step: assign each step's documents to data-parallel ranks and micro-batches for equal work; equal gradients."""
    packing: Literal["concatenate", "best_fit", "pad"] | None = key(None, when=TOKENS)
    """Documents are cut where a sequence ends, or whole, or one a sequence; None: concatenate, for chat best_fit."""
    max_norm: float = key(1.0, POSITIVE_OR_OFF)
    """Largest gradient norm; larger gradients are scaled down to it. inf: the norm is logged, nothing is scaled."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is not finite ends the run, or is left out."""
    max_skipped_steps: int = key(
        3, AT_LEAST_ONE, "steps", when=needs_value("training.on_nonfinite", "skip")
    )
    """Successive steps that may be skipped; one more that is not finite ends the run."""
    z_loss: float = key(0.0, NOT_NEGATIVE, when=(TOKENS, _SUMMED))
    """Weight of the squared log-sum-exp of logits, which keeps them small; in gradients, not in losses; 0: none."""
    mtp_loss_weight: float = key(0.1, NOT_NEGATIVE, when=_FURTHER)
    """Weight of the mean loss of the tokens that model.mtp_layers predict; in gradients, not in losses."""
    loss_chunk_tokens: int | None = key(
        None,
        Bounds(NOT_NEGATIVE.test, "at least 0 (0: all logits at once)"),
        "tokens",
        example=2048,
        when=(TOKENS, WITHOUT_GATHERED_LOGITS, OUTPUT_IN_HIGH_PRECISION),
    )
    """Tokens whose logits exist at once; 0: all; None: for vocabularies over 32,000, up to 1 GiB, 4,096 tokens."""
    sequence_chunks: int = key(1, AT_LEAST_ONE, "chunks", when=TOKENS)
    """Chunks of a sequence, one after another on each device, for sequences longer than memory; exact gradients."""
    sequence_chunks_offload: bool = key(False, when=_CHUNKS)
    """Keep keys and values of other chunks, and their gradients, in host memory."""
    steps: int = key(10000, STEPS, "steps")
    """Optimizer steps of the run."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Data type in which parameters are stored, and moments unless optimizer.state_dtype is set."""
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which the model computes; auto: bfloat16 on CUDA (except float64 runs), training.dtype on CPU."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = key(
        "float32", when=(_NOT_FLOAT64, _REDUCED)
    )
    """Data type in which gradients are reduced."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    early_update: bool = False
    """Update parameters on the host during the backward; a step that is not finite then ends the run half updated."""
    seed: int = key(0, Bounds(lambda x: 0 <= x < 2**63, "in [0, 2**63)"))
    """Seed of the initial weights and of the order of the data."""
    deterministic: bool = False
    """Use deterministic kernels only: slower, but the same bits in every run of one layout."""
    data_streams: int | None = key(None, AT_LEAST_ONE, "streams", example=64)
    """Streams of documents, which fix the order of the data; None: 64, or fewer for fewer than 512 documents."""

    def compute_dtype(self, device_type: str) -> str:
        """Return the name of the data type in which the model computes.

        Args:
            device_type: "cuda" or "cpu".
        """
        if self.mixed_precision_param != "auto":
            return self.mixed_precision_param
        # A float64 run is for exactness; bfloat16 is faster on GPUs only.
        return "bfloat16" if device_type == "cuda" and self.dtype != "float64" else self.dtype


@dataclass(frozen=True)
class Validation:
    """The loss on data outside training."""

    enable: bool = key(False, when=TOKENS)
    """Measure loss and perplexity on validation data every freq steps, and after the last one."""
    freq: int = key(100, AT_LEAST_ONE, "steps", when=_VALIDATING)
    """Steps from one validation to the next."""
    dataset: str | None = key(None, when=_VALIDATING)
    """Kind of the data, as training.dataset; None: training.dataset."""
    dataset_path: str | None = key(None, when=_VALIDATING)
    """File, folder or glob, as training.dataset_path."""
    sequences: int = key(
        64, Bounds(NOT_NEGATIVE.test, "at least 0 (0: all)"), "sequences", when=_VALIDATING
    )
    """Sequences of a validation, the same ones each time and on every layout; 0: one pass over the data."""
    seq_len: int | None = key(None, AT_LEAST_ONE, "tokens", when=_VALIDATING, example=1024)
    """Tokens of a sequence, at most training.seq_len; None: training.seq_len."""
    local_batch_size: int | None = key(
        None, AT_LEAST_ONE, "sequences", when=_VALIDATING, example=1
    )
    """Sequences of a forward on each data-parallel rank; None: training.local_batch_size."""
    keep_best: bool = key(False, when=(_VALIDATING, *SAVING))
    """Save a checkpoint after each validation with the lowest loss so far, and keep the best one."""

    def source(self, training: Training) -> tuple[str, str | None]:
        """Return the kind of the data and their path, None if validation.dataset_path is not set.

        Args:
            training: The table [training], which has the default kind.
        """
        return self.dataset or training.dataset, self.dataset_path


@dataclass(frozen=True)
class JobConfig:
    """A whole configuration; the attributes are the tables of the TOML file."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    muon: Muon = Muon()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    mixture: Mixture = Mixture()
    chat: Chat = Chat()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    lora: LoRA = LoRA()
    dpo: DPO = DPO()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    comm: Comm = Comm()

    @property
    def task(self) -> str:
        """Task of the data: "tokens", or a task that a package has added."""
        return TASK_OF_DATASET.get(self.training.dataset, "tokens")

    @property
    def state_dtype(self) -> str:
        """Data type in which the optimizer's moments are stored."""
        return self.optimizer.state_dtype or self.training.dtype

    @property
    def masks_documents(self) -> bool:
        """Whether a token sees its own document only."""
        return (
            self.training.attention_mask == "document" or self.training.dataset in CONVERSATIONS
        )

    @property
    def plans_attention(self) -> bool:
        """Whether a key asks for planned attention: ranks, chunks, documents, a window, sinks or QK-clip."""
        return (
            self.parallelism.context_parallel_degree > 1
            or self.training.sequence_chunks > 1
            or self.masks_documents
            or self.model.sliding_window is not None
            or self.model.attention_sinks
            or self.optimizer.qk_clip is not None
        )

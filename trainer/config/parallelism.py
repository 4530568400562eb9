"""The tables [parallelism] and [comm]: how ranks share the work, and how long they wait for each other."""

from dataclasses import dataclass
from typing import Literal

from trainer.config.keys import AT_LEAST_ONE, NOT_NEGATIVE, SECONDS, Bounds, Condition, key, needs, needs_value, unless

# ---- when keys are in effect

SHARDED = Condition(
    lambda _, degrees: degrees.dp_shard * degrees.cp > 1,
    "where parameters are not sharded (data_parallel_shard_degree x context_parallel_degree = 1)",
)
_WITH_CP, _WITH_PP, _WITH_TP = (
    unless(f"parallelism.{name}_parallel_degree", 1) for name in ("context", "pipeline", "tensor")
)
_HYBRID = needs_value("parallelism.context_parallel_method", "hybrid")
_NOT_RING = unless(
    "parallelism.context_parallel_method",
    "ring",
    ", where all heads travel together",
    remedy="leave it out, or use 'all_gather' or 'all_to_all'",
)
_PLANNED = Condition(
    lambda config, _: config.plans_attention,
    "on plain causal attention: it is for context parallelism, packed documents, sliding windows and sinks",
)
_DEALT = Condition(
    lambda config, _: (
        not (config.parallelism.pipeline_parallel_module_fqns or config.parallelism.pipeline_parallel_split_points)
    ),
    "beside pipeline_parallel_module_fqns or pipeline_parallel_split_points, which say where stages begin",
)
_FREED = Condition(
    lambda config, _: config.parallelism.fsdp_reshard_after_forward != "never",
    "where the backward finds all parameters gathered (fsdp_reshard_after_forward = 'never')",
    "leave it out, or use 'always'",
)
_FREED_WITH_PP = Condition(
    lambda config, degrees: degrees.pp == 1 or config.parallelism.fsdp_reshard_after_forward == "always",
    "where the backward finds all parameters gathered (fsdp_reshard_after_forward = 'default' with a pipeline)",
    "leave it out, or use 'always'",
)
_RANKS = Condition(lambda _, degrees: degrees.world_size > 1, "on one rank")


@dataclass(frozen=True)
class Parallelism:
    """How the ranks share the work; the product of the degrees is the number of ranks."""

    data_parallel_replicate_degree: int = key(1, unit="ranks")
    """Replicas of the sharded model (DDP, or with a shard degree HSDP)."""
    data_parallel_shard_degree: int = key(-1, unit="ranks")
    """Ranks that share one copy of the parameters (FSDP); -1: all that the other degrees leave."""
    tensor_parallel_degree: int = key(1, unit="ranks")
    """Ranks that share every matrix product (TP); divides the heads, the feed-forward width and the vocabulary."""
    context_parallel_degree: int = key(1, unit="ranks")
    """Ranks that share each sequence (CP); any, as long as every rank gets a token."""
    context_parallel_method: Literal["ring", "all_gather", "all_to_all", "hybrid", "auto"] = key("ring", when=_WITH_CP)
    """How attention reaches the other ranks' tokens; auto: by traffic, the choice is logged with its reason."""
    context_parallel_hybrid_degrees: tuple[int, ...] = key((), unit="ranks", when=(_WITH_CP, _HYBRID))
    """For hybrid, [all_to_all, ring]: ranks that divide the heads, and groups of them that make a ring."""
    context_parallel_load_balancer: Literal["head_tail", "contiguous", "balanced"] = key("head_tail", when=_WITH_CP)
    """Tokens of a rank: two pieces, equal work under a causal mask; one piece; or blocks dealt by each batch's cost."""
    context_parallel_heads_per_pass: int = key(
        0, Bounds(NOT_NEGATIVE.test, "at least 0 (0: all)"), "heads", when=(_WITH_CP, _NOT_RING)
    )
    """Key/value heads that travel at a time (all_gather, all_to_all): less memory, more exchanges."""
    context_parallel_kernel: Literal[
        "auto", "cpu_flash", "math", "cuda_flash", "cudnn", "efficient", "varlen", "flex"
    ] = key("auto", when=_PLANNED)
    """What computes planned attention (CP, documents, sliding windows); auto: the fastest for device and data type."""
    pipeline_parallel_degree: int = key(1, unit="ranks")
    """Ranks that share the layers (PP), each with one stage of the model or several; 1: off."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = key("1F1B", when=_WITH_PP)
    """Order of the micro-batches' forwards and backwards; all but the first two have several stages a rank."""
    pipeline_parallel_schedule_csv: str | None = key(None, when=_WITH_PP)
    """File with an order of one's own: a line per rank, of cells such as 0F1 (stage, action, micro-batch)."""
    pipeline_parallel_microbatch_size: int = key(1, AT_LEAST_ONE, "rows", when=_WITH_PP)
    """Rows of a micro-batch; divides training.local_batch_size."""
    pipeline_parallel_microbatches: int | None = key(None, AT_LEAST_ONE, "micro-batches", example=8, when=_WITH_PP)
    """Micro-batches of a pass, in place of their size; None: as the size says."""
    pipeline_parallel_layers_per_stage: int | None = key(None, AT_LEAST_ONE, "layers", example=2, when=_WITH_PP)
    """Layers of a stage; None: one stage a rank, or two where the schedule can have several."""
    pipeline_parallel_module_fqns: tuple[str, ...] = key((), when=_WITH_PP)
    """Modules of each stage, as "tok_embeddings,layers.0", "layers.1,norm,output"; none: dealt evenly."""
    pipeline_parallel_split_points: tuple[str, ...] = key((), when=_WITH_PP)
    """Modules at which a new stage begins, such as "layers.2", "layers.4"; none: dealt evenly."""
    pipeline_parallel_first_stage_less_layers: int = key(1, NOT_NEGATIVE, "layers", when=(_WITH_PP, _DEALT))
    """As how many layers the embedding counts when layers are dealt evenly."""
    pipeline_parallel_last_stage_less_layers: int = key(1, NOT_NEGATIVE, "layers", when=(_WITH_PP, _DEALT))
    """As how many layers the last norm and the output count when layers are dealt evenly."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key("default", when=SHARDED)
    """Free parameters after the forward and gather them for the backward; default: all but the last, none with PP."""
    fsdp_forward_prefetch: int = key(0, NOT_NEGATIVE, "layers", when=SHARDED)
    """Layers whose parameters are gathered ahead of the one that runs forward; 0: as FSDP does by itself, one."""
    fsdp_backward_prefetch: int = key(0, NOT_NEGATIVE, "layers", when=(SHARDED, _FREED, _FREED_WITH_PP))
    """The same backward."""
    enable_async_tensor_parallel: bool = key(False, when=_WITH_TP)
    """Overlap the exchanges of TP with its matrix products; needs compile.enable, and GPUs with symmetric memory."""
    disable_loss_parallel: bool = key(False, when=_WITH_TP)
    """With TP, gather the logits before the loss instead of computing it on their shards."""

    @property
    def overlaps_tensor_parallel(self) -> bool:
        """Whether the exchanges of tensor parallelism overlap with its matrix products."""
        return self.enable_async_tensor_parallel and self.tensor_parallel_degree > 1


@dataclass(frozen=True)
class Comm:
    """Process groups."""

    init_timeout_seconds: int = key(300, SECONDS, "seconds", when=_RANKS)
    """Seconds a collective may take until the first step is done."""
    train_timeout_seconds: int = key(100, SECONDS, "seconds", when=_RANKS)
    """Seconds a collective may take from then on."""
    checkpoint_timeout_seconds: int = key(1800, SECONDS, "seconds", when=(_RANKS, needs("checkpoint.enable")))
    """Seconds a collective of saving or loading a checkpoint may take: one rank's disk may be slow."""
    check_consistency: bool = key(False, when=_WITH_CP)
    """Before each step compare plan and batch of all context-parallel ranks by a hash: slow, and names who differs."""
    trace_buf_size: int = key(20000, NOT_NEGATIVE, "collectives", when=_RANKS)
    """Collectives that the flight recorder remembers for a report after a hang; 0: off."""
    save_traces_folder: str = key("comm_traces", when=(_RANKS, unless("comm.trace_buf_size", 0)))
    """Folder of these reports, inside job.dump_folder; one file per rank that lost its peers."""

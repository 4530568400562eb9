"""The tables [parallelism] and [comm]: how ranks divide the work, and how long they wait for each other."""

from dataclasses import dataclass
from typing import Literal

from trainer.config.keys import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    SECONDS,
    Bounds,
    Condition,
    key,
    needs,
    needs_value,
    unless,
)

_SHARDS = Bounds(
    lambda x: x == -1 or AT_LEAST_ONE.test(x),
    "at least 1, or -1 (what the other degrees leave)",
)
SHARDED = Condition(
    lambda _, degrees: degrees.dp_shard * degrees.cp > 1,
    "where parameters are not sharded (data_parallel_shard_degree x context_parallel_degree = 1)",
    general="without sharding (FSDP or CP)",
)
NO_PIPELINE = Condition(
    lambda _, degrees: degrees.pp == 1,
    "in a pipeline (parallelism.pipeline_parallel_degree = {0.parallelism.pipeline_parallel_degree}), whose "
    "micro-batches have one shape",
    "leave it out, or use parallelism.pipeline_parallel_degree = 1",
    general="in a pipeline",
)
DATA_PARALLEL = Condition(lambda _, degrees: degrees.dp > 1, "on one data-parallel rank")
_WITH_CP, _WITH_PP, _WITH_TP = (
    unless(f"parallelism.{name}_parallel_degree", 1)
    for name in ("context", "pipeline", "tensor")
)
_HYBRID = needs_value("parallelism.context_parallel_method", "hybrid")
_NOT_RING = unless(
    "parallelism.context_parallel_method",
    "ring",
    ", where all heads are sent together",
    remedy="leave it out, or use 'all_gather' or 'all_to_all'",
)
_PLANNED = Condition(
    lambda config, _: config.plans_attention,
    "on plain causal attention: it is for context parallelism, packed documents, sliding windows and sinks",
)
_SENDING_KV = unless(
    "parallelism.context_parallel_method",
    "all_to_all",
    ", which sends no keys and values to be added to",
    remedy="leave it out, or use 'ring', 'all_gather' or 'hybrid'",
)
_EXCHANGING = needs_value(
    "parallelism.context_parallel_method",
    "all_to_all",
    "hybrid",
    why=", which exchanges no heads",
    remedy="leave it out, or use 'all_to_all' or 'hybrid'",
)
_ALL_TO_ALL = needs_value(
    "parallelism.context_parallel_method",
    "all_to_all",
    remedy="leave it out, or use 'all_to_all'",
)
_AXES = Condition(
    lambda config, _: config.task != "tokens",
    "on tokens (training.dataset = {0.training.dataset!r})",
    "use parallelism.context_parallel_degree, which divides sequences",
    general="on tokens",
)
EXPERTS = Condition(
    lambda _, degrees: degrees.ep is not None,
    "with model.name = {0.model.name!r}, which has no experts",
    "leave it out, or use model.name = 'qwen3_moe', say",
    general="without experts",
)
_RANKS = Condition(lambda _, degrees: degrees.world_size > 1, "on one rank")


@dataclass(frozen=True)
class Parallelism:
    """How ranks divide the work; the product of the degrees is the number of ranks."""

    data_parallel_replicate_degree: int = key(1, AT_LEAST_ONE, "ranks")
    """Replicas of the sharded model (DDP, or with a shard degree HSDP)."""
    data_parallel_shard_degree: int = key(-1, _SHARDS, "ranks")
    """Ranks that shard one copy of the parameters (FSDP); -1: all ranks that the other degrees leave."""
    tensor_parallel_degree: int = key(1, AT_LEAST_ONE, "ranks")
    """Ranks that divide every matrix product (TP); it divides the heads, the feed-forward width and the vocabulary."""
    context_parallel_degree: int = key(1, AT_LEAST_ONE, "ranks")
    """Ranks that divide each sequence (CP); any number that leaves every rank a token."""
    context_parallel_method: Literal["ring", "all_gather", "all_to_all", "hybrid", "auto"] = (
        key("ring", when=_WITH_CP)
    )
    """How attention gets keys and values of other ranks; auto: by traffic, the choice is logged with its reason."""
    context_parallel_hybrid_degrees: tuple[int, ...] = key(
        (), unit="ranks", when=(_WITH_CP, _HYBRID)
    )
    """For hybrid, [all_to_all, ring]: ranks of a group that divides the heads, and number of groups in the ring."""
    context_parallel_load_balancer: Literal["auto", "head_tail", "contiguous", "balanced"] = (
        key("auto", when=_WITH_CP)
    )
    """head_tail: a chunk from each end; contiguous: one chunk; balanced: by cost of each batch; auto: by method."""
    context_parallel_heads_per_pass: int = key(
        0, Bounds(NOT_NEGATIVE.test, "at least 0 (0: all)"), "heads", when=(_WITH_CP, _NOT_RING)
    )
    """Key/value heads that are sent at a time (all_gather, all_to_all): less memory, more exchanges."""
    context_parallel_query_heads_per_pass: int = key(
        0,
        Bounds(NOT_NEGATIVE.test, "at least 0 (0: all)"),
        "heads",
        when=(_WITH_CP, _ALL_TO_ALL),
    )
    """Query heads of one key/value head that all_to_all sends at a time: fewer than heads_per_pass allows."""
    context_parallel_gradient_dtype: Literal["float32", "bfloat16"] = key(
        "float32", when=(_WITH_CP, _SENDING_KV)
    )
    """Data type in which gradients of keys and values are sent; bfloat16: half the bytes, rounded once a rank."""
    context_parallel_keep_exchanged: bool = key(False, when=(_WITH_CP, _EXCHANGING))
    """Keep the exchanged q, k, v and output for the backward (all_to_all, hybrid): less traffic, more memory."""
    context_parallel_kernel: Literal[
        "auto",
        "cpu_flash",
        "math",
        "cuda_flash",
        "cudnn",
        "efficient",
        "varlen",
        "cudnn_varlen",
    ] = key("auto", when=_PLANNED)
    """Kernel of planned attention (CP, documents, windows); auto: by tiles a stage, mask and GPU."""
    domain_parallel_degrees: tuple[int, ...] = key((), unit="ranks", when=_AXES)
    """Ranks along the axes of a field, instead of CP: [2] divides the height, [2, 4] height and width."""
    expert_parallel_degree: int = key(1, AT_LEAST_ONE, "ranks", when=EXPERTS)
    """Ranks of FSDP x CP x TP that divide a layer's experts (EP); divides their number and the number of experts."""
    pipeline_parallel_degree: int = key(1, AT_LEAST_ONE, "ranks")
    """Ranks that divide the layers (PP), each with one or more stages of the model; 1: off."""
    pipeline_parallel_schedule: Literal[
        "1F1B",
        "GPipe",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = key("1F1B", when=_WITH_PP)
    """Order of the micro-batches' forwards and backwards."""
    pipeline_parallel_microbatch_size: int = key(1, AT_LEAST_ONE, "sequences", when=_WITH_PP)
    """Sequences of a micro-batch of the pipeline; divides training.local_batch_size."""
    pipeline_parallel_layers_per_stage: int | None = key(
        None, AT_LEAST_ONE, "layers", example=2, when=_WITH_PP
    )
    """Layers of a stage; None: one stage a rank, or two if the schedule can have several."""
    pipeline_parallel_module_fqns: tuple[str, ...] = key((), when=_WITH_PP)
    """Modules of each stage, as "tok_embeddings,layers.0", "layers.1,norm,output"; none: divided evenly."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default", when=SHARDED
    )
    """Free parameters after the forward and gather them for the backward; default: all but the last, none with PP."""
    fsdp_forward_prefetch: int = key(0, NOT_NEGATIVE, "layers", when=SHARDED)
    """Layers whose parameters are gathered ahead in the forward; 0: FSDP's default, one."""
    fsdp_zero_copy: bool = key(False, when=SHARDED)
    """Buffers of FSDP in NCCL's own memory, which NVLink SHARP reads and writes without copies; elsewhere no effect."""
    enable_async_tensor_parallel: bool = key(False, when=_WITH_TP)
    """Overlap the collectives of TP with its matrix products; needs compile.enable, and GPUs with symmetric memory."""
    disable_loss_parallel: bool = key(False, when=_WITH_TP)
    """With TP, gather the logits before the loss instead of computing it on their shards."""

    @property
    def overlaps_tensor_parallel(self) -> bool:
        """Whether the collectives of tensor parallelism overlap with its matrix products."""
        return self.enable_async_tensor_parallel and self.tensor_parallel_degree > 1


@dataclass(frozen=True)
class Comm:
    """Process groups."""

    init_timeout_seconds: int = key(300, SECONDS, "seconds", when=_RANKS)
    """Time-out of collectives until the end of the first step; three predicted steps where that is longer."""
    train_timeout_seconds: int = key(100, SECONDS, "seconds", when=_RANKS)
    """Time-out of collectives after the first step; three steps where that is longer."""
    checkpoint_timeout_seconds: int = key(
        1800, SECONDS, "seconds", when=(_RANKS, needs("checkpoint.enable"))
    )
    """Time-out of collectives while a checkpoint is saved or loaded: one rank's disk may be slow."""
    check_consistency: bool = key(False, when=_WITH_CP)
    """Before each step compare a hash of plan and batch over context-parallel ranks, and name a difference: slow."""
    trace_buf_size: int = key(2000, NOT_NEGATIVE, "collectives", when=_RANKS)
    """Collectives that the flight recorder keeps for a record after a hang, in comm_traces; 0: off."""

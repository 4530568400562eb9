"""Resolve and check the options of planned attention: method, kernel, heads a pass. Torch-free."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from longshard.context.planning.auto import choose
from longshard.context.planning.capabilities import (
    FLASH_KERNELS,
    FLASH_PACKAGES,
    INDEX_LIMIT,
    LARGE_TILE,
    able_kernels,
    auto_kernel,
    call_elements,
)
from longshard.context.planning.cost import AttentionShape, LatentShape
from longshard.context.planning.heads import HeadShare, check_heads
from longshard.context.planning.mask import Mask, causal, sliding_window
from longshard.context.planning.methods import METHODS, make_plan
from longshard.context.planning.options import ContextParallelOptions
from longshard.sharding.errors import OptionError
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Parallelism
from trainer.families.args import ModelArgs, has_windows, latent_of, widest_head, windows_of
from trainer.job.degrees import divisors
from trainer.job.sparse_attention import is_sparse, resolve_sparse

# Assumed number of tiles in the largest stage, to choose a kernel before documents are known. With 131,072 tokens in
# exponentially distributed documents of 500 tokens on average, a stage has 252 tiles on one rank, 128 on two ranks and
# 41 on eight ranks. With documents of 2,000 tokens it has 58, 34 and 13. The choice only asks for more than four.
_TILES_OF_DOCUMENTS = 100


def resolve_attention(
    config: JobConfig, model: ModelArgs, device_type: str, *, node: int | None = None
) -> tuple[ContextParallelOptions | None, str]:
    """Return the options of planned attention and the reason of `auto`.

    With packed documents `auto` chooses the method of each batch (`batch_chooser`); other options hold for the run.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
        device_type: "cuda" or "cpu"; decides the data type, by which `auto` counts bytes.
        node: Number of ranks on a node; None if one node has all ranks. `auto` counts a byte to another node several
            times.

    Returns:
        The options, None for plain causal attention on one rank; and why `auto` chose its method, empty if the
        configuration names one.

    Raises:
        ConfigError: A kernel lacks a feature, a method cannot divide the heads, degrees do not fit, or another option
            of attention does not fit the model.
    """
    parallelism = config.parallelism
    if is_sparse(model):
        return resolve_sparse(config)
    if not _needs_plan(config, model, device_type):
        return None, ""
    degree = parallelism.context_parallel_degree
    tp = parallelism.tensor_parallel_degree
    if degree == 1:
        return ContextParallelOptions(
            kernel=parallelism.context_parallel_kernel, multiple_of=tp
        ), ""
    options = _options_before_auto(config, device_type)
    reason = ""
    if parallelism.context_parallel_method == "auto":
        local = _local_shape(config, model, device_type)
        masks = _layer_masks(model, config.training.seq_len)
        ways = {"hybrids": not config.masks_documents, "node": _sharing(node, tp)}
        options, reason = choose(options, masks, degree, local, **ways)
    with options_as_keys():
        check_heads(model.n_heads // tp, options.head_degree(degree), options.method)
    passes, queries = _checked_heads(parallelism, options, model)
    keep = parallelism.context_parallel_keep_exchanged
    if keep:
        _check_keeping(model, passes, queries)
    return replace(
        options, heads_per_pass=passes, keep_exchanged=keep, query_heads_per_pass=queries
    ), reason


def _needs_plan(config: JobConfig, model: ModelArgs, device_type: str) -> bool:
    """Return whether attention needs a context-parallel plan, as for bands, softcap, sinks or very long sequences.

    Raises:
        ConfigError: The configured kernel lacks a feature that the model needs.
    """
    needs = _needs(config, model)
    kernel = config.parallelism.context_parallel_kernel
    with options_as_keys():
        able_kernels(kernel, None, None, widest_head(model), **needs)
    return (
        config.plans_attention
        or needs["bands"]
        or needs["softcap"]
        or getattr(model, "attention_sinks", False)
        or (device_type == "cuda" and is_too_large_without_plan(config, model))
    )


def _options_before_auto(config: JobConfig, device_type: str) -> ContextParallelOptions:
    """Return the configured options, without heads a pass; the method `auto` becomes the default method.

    Raises:
        ConfigError: `context_parallel_hybrid_degrees` or the data type of gradients does not fit.
    """
    parallelism = config.parallelism
    method = parallelism.context_parallel_method
    hybrid = parallelism.context_parallel_hybrid_degrees
    named = ContextParallelOptions().method if method == "auto" else method
    two_level = METHODS[named].two_level
    degree = parallelism.context_parallel_degree
    if two_level and (len(hybrid) != 2 or min(hybrid) < 2 or hybrid[0] * hybrid[1] != degree):
        fitting = [[d, degree // d] for d in divisors(degree)[1:-1]]
        raise ConfigError(
            f"parallelism.context_parallel_hybrid_degrees = {list(hybrid)} must be degrees [all_to_all, ring], "
            f"each at least 2, whose product is parallelism.context_parallel_degree = {degree}; "
            + (
                f"that is one of {', '.join(map(str, fitting))}"
                if fitting
                else "use another method or degree"
            )
        )
    gradients = parallelism.context_parallel_gradient_dtype
    computed = config.training.compute_dtype(device_type)
    if gradients == "bfloat16" != computed:
        raise ConfigError(
            f"parallelism.context_parallel_gradient_dtype = 'bfloat16' would round the gradients of a model that "
            f"computes in {computed}; leave it out, or use training.mixed_precision_param = 'bfloat16'"
        )
    return ContextParallelOptions(
        method=named,
        load_balancer=parallelism.context_parallel_load_balancer,
        kernel=parallelism.context_parallel_kernel,
        hybrid_degrees=hybrid if two_level else None,
        multiple_of=parallelism.tensor_parallel_degree,
        gradient_dtype=gradients,
    )


def _check_keeping(model: ModelArgs, passes: int, queries: int) -> None:
    """Raise a ConfigError if the model has latents, or ranks exchange a few heads at a time: nothing can be kept then.

    passes, queries: Key/value heads, and query heads, that ranks exchange at a time; 0 means all.
    """
    if latent_of(model) is not None:
        raise ConfigError(
            "parallelism.context_parallel_keep_exchanged = true keeps keys and values, and latent attention sends "
            "latents, which are small; leave it out"
        )
    if passes or queries:
        which = f"heads_per_pass = {passes}" if passes else f"query_heads_per_pass = {queries}"
        raise ConfigError(
            f"parallelism.context_parallel_keep_exchanged = true keeps all heads; context_parallel_{which} takes less "
            "memory; use one of them"
        )


def is_too_large_without_plan(config: JobConfig, model: ModelArgs) -> bool:
    """Return whether one call on a rank has more elements than GPU kernels can address. A plan divides such a call.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
    """
    training = config.training
    heads = -(-model.n_heads // config.parallelism.tensor_parallel_degree)
    elements = call_elements(training.local_batch_size, training.seq_len, 1, widest_head(model))
    return heads * elements >= INDEX_LIMIT


def check_qk_clip(config: JobConfig, model: ModelArgs) -> None:
    """Check that `optimizer.qk_clip`, if set, has an effect: on this program's attention, without norms and soft-cap.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.

    Raises:
        ConfigError: `optimizer.qk_clip` would have no effect.
    """
    if (largest := config.optimizer.qk_clip) is None:
        return
    why = ""
    if not hasattr(model, "attention_softcap"):
        why = "knows the attention of this program's families alone"
    elif model.qk_norm:
        why = "scales queries and keys before the norm of each head, which undoes it and bounds logits by itself"
    elif model.attention_softcap is not None:
        why = f"is for logits without a soft-cap, and these are at most {model.attention_softcap:g}"
    if why:
        raise ConfigError(
            f"optimizer.qk_clip = {largest:g} {why}; leave it out with model.name = {config.model.name!r}"
        )


def _needs(config: JobConfig, model: ModelArgs) -> dict[str, bool]:
    return {
        "bands": has_windows(model),
        "deterministic": config.training.deterministic,
        "softcap": getattr(model, "attention_softcap", None) is not None,
    }


@contextmanager
def options_as_keys() -> Iterator[None]:
    """Yield; turn an OptionError that is raised inside into a ConfigError that names the key of the configuration."""
    try:
        yield
    except OptionError as error:
        raise ConfigError(f"parallelism.context_parallel_{error}") from None


def kernel_of(
    config: JobConfig, model: ModelArgs, device_type: str, options: ContextParallelOptions
) -> str:
    """Return the kernel of planned attention.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
        device_type: "cuda" or "cpu".
        options: The options of planned attention.

    Returns:
        The name of the kernel. If `auto` will choose by the GPU, the rule in words.

    Raises:
        ConfigError: The configured kernel cannot compute this attention there.
    """
    if is_sparse(model):
        return "plain PyTorch"
    training = config.training
    windows = has_windows(model)
    kind = device_type, training.compute_dtype(device_type), widest_head(model)
    with options_as_keys():
        able = able_kernels(options.kernel, *kind, **_needs(config, model))
    if options.kernel != "auto":
        return options.kernel
    documents = config.masks_documents
    tiles = _TILES_OF_DOCUMENTS
    if not documents:  # the largest number of tiles in a stage of the first rank
        degree = config.parallelism.context_parallel_degree
        heads = options.head_degree(degree)
        layout = options.layout(training.seq_len, degree)
        plans = [
            make_plan(layout, mask, options.method, 0, head_degree=heads)
            for mask in _layer_masks(model, training.seq_len)
        ]
        tiles = max(len(stage.tiles) for plan in plans for stage in plan.forward)
    other = auto_kernel(able, tiles)
    fixed = not (documents or windows)
    largest = 0 if windows else training.seq_len
    hopper = auto_kernel(able, tiles, capability=(9, 0), fixed=fixed, largest=largest)
    if hopper == other:
        return other
    tiles_words = (
        f" for tiles of {LARGE_TILE:,} tokens or more" if hopper == "cudnn_varlen" else ""
    )
    return f"{hopper}{tiles_words} on compute capability 9.0 or later without FlashAttention-3 or -4, else {other}"


def faster_packages(kernel: str, config: JobConfig) -> str:
    """Return which packages would compute a GPU kernel faster, in words; empty if none would.

    Args:
        kernel: The name of the kernel, or the rule of `kernel_of`.
        config: The configuration of the run.
    """
    if kernel not in FLASH_KERNELS or config.training.deterministic:
        return ""
    packages = (
        f"{each.name} on compute capability {' and '.join(f'{major}.x' for major in each.majors)} ({each.install})"
        for each in FLASH_PACKAGES
    )
    return f"computed by FlashAttention-2, or faster, if installed, by {' or '.join(packages)}"


def batch_chooser(
    config: JobConfig,
    model: ModelArgs,
    device_type: str,
    options: ContextParallelOptions,
    *,
    node: int | None = None,
) -> Callable[[Mask], tuple[ContextParallelOptions, str]] | None:
    """Return a function that chooses the method for the documents of a batch.

    Args:
        config: The configuration of the run, as the user wrote it.
        model: The arguments of the model.
        device_type: "cuda" or "cpu".
        options: The options of the run. Only their method changes, and never to `hybrid`: its mesh must exist before
            the first batch.
        node: Number of ranks on a node; None if one node has all ranks.

    Returns:
        A function from the mask of a batch to the options and the reason; None if there is no choice.
    """
    parallelism = config.parallelism
    degree = parallelism.context_parallel_degree
    chooses = parallelism.context_parallel_method == "auto" and degree > 1
    if not (chooses and config.masks_documents) or is_sparse(model):
        return None
    local = _local_shape(config, model, device_type)
    sharing = _sharing(node, parallelism.tensor_parallel_degree)

    def method_of(batch: Mask) -> tuple[ContextParallelOptions, str]:
        # sequences of a validation have their own length
        masks = _layer_masks(model, batch.q_len)
        return choose(options, masks, degree, local, batch=batch, hybrids=False, node=sharing)

    return method_of


def _sharing(node: int | None, tp: int) -> int | None:
    """Return how many ranks of a context-parallel group share a node. Tensor-parallel ranks are neighbours there."""
    return None if node is None else max(node // tp, 1)


def _layer_masks(model: ModelArgs, seq_len: int) -> tuple[Mask, ...]:
    return tuple(
        causal(seq_len) if w is None else sliding_window(seq_len, w)
        for w in sorted(set(windows_of(model)), key=str)
    )


def _local_shape(config: JobConfig, model: ModelArgs, device_type: str) -> AttentionShape:
    training = config.training
    tp = config.parallelism.tensor_parallel_degree
    itemsize = {"float64": 8, "float32": 4, "bfloat16": 2}[training.compute_dtype(device_type)]
    gradients = 2 if config.parallelism.context_parallel_gradient_dtype == "bfloat16" else 0
    latent = None
    if (args := latent_of(model)) is not None:
        latent = LatentShape(args.rank, args.rope_dim, args.value_dim)
    return AttentionShape(
        training.local_batch_size,
        model.n_heads // tp,
        _kv_heads(model, tp),
        model.head_dim,
        itemsize,
        gradients,
        latent,
    )


def _kv_heads(model: ModelArgs, tp: int) -> int:
    """Return the number of key/value heads that a tensor-parallel rank sends. A latent counts as one."""
    return model.n_kv_heads // tp if latent_of(model) is None else 1


def _checked_heads(
    parallelism: Parallelism, options: ContextParallelOptions, model: ModelArgs
) -> tuple[int, int]:
    """Return how many key/value heads, and query heads of one of them, are sent at a time; 0 means all.

    Raises:
        ConfigError: A configured number is not less than all heads, or depends on a method that `auto` leaves open.
    """
    passes = parallelism.context_parallel_heads_per_pass
    tp = parallelism.tensor_parallel_degree
    if passes and parallelism.context_parallel_method == "auto":
        raise ConfigError(
            f"parallelism.context_parallel_heads_per_pass = {passes} depends on the method, and "
            "context_parallel_method = 'auto' leaves it open; name the method ('all_gather', 'all_to_all', 'hybrid'), "
            "or leave the heads out"
        )
    degree = parallelism.context_parallel_degree
    heads = model.n_heads // tp, _kv_heads(model, tp)
    kv_heads = HeadShare.passes(*heads, options.head_degree(degree))[0].per_rank
    if passes >= kv_heads and passes:
        raise ConfigError(
            f"parallelism.context_parallel_heads_per_pass = {passes} must be less than the {kv_heads} key/value heads "
            f"that a rank works on with context_parallel_method = {options.method!r}; use fewer, or leave it out"
        )
    queries = parallelism.context_parallel_query_heads_per_pass
    if not queries or not options.spread.query_passes:
        return passes, 0
    key = f"parallelism.context_parallel_query_heads_per_pass = {queries}"
    if passes:
        raise ConfigError(
            f"{key} sends one key/value head at a time; leave context_parallel_heads_per_pass = {passes} out"
        )
    group = HeadShare.passes(*heads, degree)[0].group
    if queries >= group:
        raise ConfigError(
            f"{key} must be less than the {group} query heads of a key/value head; use fewer, or leave it out"
        )
    return passes, queries

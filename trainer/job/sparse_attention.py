"""Check the settings of sparse attention, whose keys an indexer chooses. Torch-free."""

from longshard.context.planning.options import ContextParallelOptions
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.job.lora import weight_shapes

_POSSIBLE = {
    "method": ("auto", "all_gather", "ring"),  # the last one is the default
    "kernel": ("auto",),
    "gradient_dtype": ("float32",),
    "heads_per_pass": (0,),
    "query_heads_per_pass": (0,),
    "keep_exchanged": (False,),
}
"""Keys of `[parallelism]` after `context_parallel_` -> the values that sparse attention takes."""


def is_sparse(model: ModelArgs) -> bool:
    """Return whether an indexer chooses the keys of attention.

    Args:
        model: The arguments of the model.
    """
    return getattr(model, "index", None) is not None


def resolve_sparse(config: JobConfig) -> tuple[ContextParallelOptions | None, str]:
    """Return the options of sparse attention, and why it has its method.

    Args:
        config: The configuration of the run.

    Returns:
        The options, None for one rank without documents and chunks; and the reason in words, "" without options.

    Raises:
        ConfigError: Sparse attention does not support a setting of context parallelism.
    """
    parallelism = config.parallelism
    for key, values in _POSSIBLE.items():
        if (value := getattr(parallelism, f"context_parallel_{key}")) not in values:
            raise ConfigError(
                f"parallelism.context_parallel_{key} = {value!r} is not for a model whose queries choose their keys: "
                f"it gathers the rows of all tokens, in plain PyTorch; use {' or '.join(map(repr, values[:2]))}"
            )
    if not config.plans_attention:
        return None, ""
    options = ContextParallelOptions(
        method="all_gather",
        load_balancer=parallelism.context_parallel_load_balancer,
        multiple_of=parallelism.tensor_parallel_degree,
    )
    return options, "sparse attention reads the rows of all tokens"


def trains_indexers_alone(config: JobConfig, model: ModelArgs) -> bool:
    """Return whether `optimizer.groups` trains indexers and nothing else: then attention sees all keys.

    It is the dense warm-up of sparse attention (DeepSeek-V3.2-Exp, 2025).

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
    """

    def is_fixed(module: str) -> bool:
        name = module if ".experts." in module else f"{module}.weight"
        group = config.optimizer.group_of(name)
        return group is not None and group.lr_factor == 0

    if not is_sparse(model):
        return False
    names = *weight_shapes(model), "tok_embeddings", "norm"
    return all(is_fixed(name) == (".indexer." not in name) for name in names)

"""Check the settings of sparse attention, whose keys an indexer chooses. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Parallelism
from trainer.families.args import ModelArgs
from trainer.job.lora import weight_shapes


def is_sparse(model: ModelArgs) -> bool:
    """Return whether an indexer chooses the keys of attention.

    Args:
        model: The arguments of the model.
    """
    return getattr(model, "index", None) is not None


def check_sparse(parallelism: Parallelism) -> None:
    """Check that no setting is for attention by a plan, where attention is sparse.

    Args:
        parallelism: Table `[parallelism]`.

    Raises:
        ConfigError: A setting is.
    """
    possible = {
        "method": ("auto", "all_gather", "ring"),  # the last one is the default
        "kernel": ("auto",),
        "gradient_dtype": ("float32",),
        "heads_per_pass": (0,),
        "query_heads_per_pass": (0,),
        "keep_exchanged": (False,),
    }
    for key, values in possible.items():
        if (value := getattr(parallelism, f"context_parallel_{key}")) not in values:
            raise ConfigError(
                f"parallelism.context_parallel_{key} = {value!r} is not for a model whose queries choose their keys: "
                f"it gathers the rows of all tokens, in plain PyTorch; use {' or '.join(map(repr, values[:2]))}"
            )


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

    names = {*weight_shapes(model), "tok_embeddings", "norm"} if is_sparse(model) else set()
    fixed = set(filter(is_fixed, names))
    return bool(fixed) and fixed == {name for name in names if ".indexer." not in name}

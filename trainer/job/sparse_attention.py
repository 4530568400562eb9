"""Check the settings of sparse attention, whose keys an indexer chooses. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Parallelism
from trainer.families.args import ModelArgs


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
    }
    for key, values in possible.items():
        if (value := getattr(parallelism, f"context_parallel_{key}")) not in values:
            raise ConfigError(
                f"parallelism.context_parallel_{key} = {value!r} is not for a model whose queries choose their keys: "
                f"it gathers the rows of all tokens, in plain PyTorch; use {' or '.join(map(repr, values))}"
            )


def trains_indexers_alone(config: JobConfig, model: ModelArgs) -> bool:
    """Return whether `optimizer.groups` trains indexers and nothing else of attention: then attention sees all keys.

    It is the dense warm-up of sparse attention (DeepSeek-V3.2-Exp, 2025).

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
    """

    def is_fixed(module: str) -> bool:
        group = config.optimizer.group_of(f"layers.0.attention.{module}.weight")
        return group is not None and group.lr_factor == 0

    return is_sparse(model) and is_fixed("wo") and not is_fixed("indexer.keys")

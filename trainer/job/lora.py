"""Check the table [lora], and count what it trains. Torch-free."""

import math
from itertools import chain

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs, expert_layers, experts_of
from trainer.job.pipeline_stages import PipelinePlan

_GATES = ("gate", "shared_gate")
"""Of mixtures of experts."""


def check_lora(config: JobConfig, model: ModelArgs, pipeline: PipelinePlan | None) -> None:
    """Check the table against the model and the rest of the configuration.

    Raises:
        ConfigError: a module that the model does not have, no weights to adapt, or a setting that does not go with it.
    """
    settings = config.lora
    if not settings.rank:
        return
    names = sorted({name.split(".")[-1] for name in model.linear_shapes() if name.startswith("layers.")})
    for module in settings.modules:
        if module not in names or module in _GATES:
            raise ConfigError(
                f"lora.modules = {list(settings.modules)}: {module!r} must be a linear module of a layer"
                f"{did_you_mean(module, [name for name in names if name not in _GATES])}"
            )
    if config.checkpoint.initial_load_path is None:
        raise ConfigError(
            f"lora.rank = {settings.rank} adapts given weights, which are never saved again; name them with "
            "checkpoint.initial_load_path, a Hugging Face folder or a folder step-N of another run"
        )
    if config.float8.enable:
        raise ConfigError(
            "float8.enable = true multiplies weights that are trained, and with lora.rank they are frozen; leave one "
            "of them out"
        )
    if pipeline is None:
        return
    if pipeline.splits_backward:
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule = {pipeline.schedule!r} computes the gradients of weights apart, "
            f"and lora.rank = {settings.rank} freezes most weights; use {pipeline.whole_backward}"
        )
    of_ranks = [[pipeline.stages[stage] for stage in pipeline.stages_of(rank)] for rank in set(pipeline.ranks)]
    for modules in (pipeline.stages[0], *map(chain.from_iterable, of_ranks)):
        if not any(name.startswith("layers.") for name in modules):
            raise ConfigError(
                f"lora.rank = {settings.rank} trains layers only, so the first stage of a pipeline, and each of its "
                "ranks, must have a layer; use fewer ranks in parallelism.pipeline_parallel_degree, or other stages"
            )


def adapter_sizes(config: JobConfig, model: ModelArgs, tp: int = 1) -> dict[str, int]:
    """Return the adapter parameters of every adapted module on one of `tp` tensor-parallel ranks, by its name."""
    settings = config.lora
    if not settings.rank:
        return {}
    return {
        name: settings.rank * sum(shape) for name, shape in model.linear_shapes(tp).items() if settings.adapts(name)
    }


def flops_beside(config: JobConfig, model: ModelArgs) -> float:
    """Return how many FLOPs per token a training step has more than without adapters, usually a negative number.

    A frozen weight has no gradient, which saves a third of its 6 FLOPs; a weight of an adapter has 6.
    """
    sizes = adapter_sizes(config, model)
    if not sizes:
        return 0.0
    frozen = sum(map(math.prod, model.linear_shapes().values()))
    if (experts := experts_of(model)) is not None:
        frozen += len(expert_layers(model)) * experts.per_token * experts.weights(model.dim)
    return 6.0 * sum(sizes.values()) - 2.0 * frozen

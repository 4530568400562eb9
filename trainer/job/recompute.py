"""Check the table [activation_checkpoint]."""

import math

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.distributed.pipeline_stages import PipelinePlan
from trainer.job.compilation import CompileOptions


def check_activation_checkpoint(
    config: JobConfig, n_layers: int, compilation: CompileOptions, pipeline: PipelinePlan | None
) -> None:
    """Check activation checkpointing against the model, the compiler and the pipeline.

    Raises:
        ConfigError: layers that the model lacks, recomputation in a backward that is split, or what the compiler cannot
            recompute.
    """
    settings = config.activation_checkpoint
    option = settings.selective_ac_option
    number = int(option) if option.isdecimal() else 0
    largest = n_layers if settings.mode == "selective" else math.inf
    if option != "op" and not 1 <= number <= largest:
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option = {option!r} must be 'op', or for every n-th layer a number "
            f"from 1 to {n_layers}, the layers of model.flavor = {config.model.flavor!r}, such as '2'"
        )
    if compilation.splits_backward and settings.mode != "none" and not compilation.chooses_recomputation:
        raise ConfigError(
            f"activation_checkpoint.mode = {settings.mode!r} would compute a layer again for each group of its "
            f"weights, about ten times, as {pipeline.schedule} splits the backward; use 'none', compile.enable, or "
            f"{pipeline.whole_backward}"
        )
    if compilation.cannot_checkpoint_layers and settings.mode == "selective" and option != "op":
        degree = config.parallelism.tensor_parallel_degree
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option = {option!r} recomputes some layers whole, which the compiler "
            f"cannot do with parallelism.tensor_parallel_degree = {degree}; use 'op', the mode 'full' or "
            "'memory_budget', or leave compile.enable out"
        )

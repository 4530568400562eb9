"""Check the table [activation_checkpoint]."""

import math

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.job.compilation import CompileOptions
from trainer.job.pipeline_stages import PipelinePlan, layers_of


def check_activation_checkpoint(
    config: JobConfig, n_layers: int, compilation: CompileOptions, pipeline: PipelinePlan | None
) -> tuple[str, ...]:
    """Check activation checkpointing against the model; return a note if the pipeline makes it expensive.

    Raises:
        ConfigError: layers that the model lacks, no layer whose input could be offloaded, or recomputation by operator
            in a backward that is split.
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
    for layers in map(layers_of, pipeline.stages) if pipeline else [range(n_layers)]:
        checkpointed = settings.checkpointed(layers)
        if settings.offload != "none" and checkpointed and not settings.offloaded(checkpointed):
            raise ConfigError(
                f"activation_checkpoint.offload_keep_last = {settings.offload_keep_last} leaves no input to offload: "
                f"{'a pipeline stage' if pipeline else 'the model'} checkpoints {checkpointed} layers; set it to "
                f"{checkpointed - 1} or less, or activation_checkpoint.offload = 'none'"
            )
    if not compilation.splits_backward or settings.mode == "none" or compilation.chooses_recomputation:
        return ()
    if not settings.whole_layers:
        raise ConfigError(
            f"activation_checkpoint.mode = {settings.mode!r} by operator allows one backward, and {pipeline.schedule} "
            f"splits it; use 'none', 'full', compile.enable, or {pipeline.whole_backward}"
        )
    return (
        f"activation_checkpoint.mode = {settings.mode!r} recomputes a layer for each group of its weights, about ten "
        f"times, as {pipeline.schedule} splits the backward; faster are 'none', compile.enable, or "
        f"{pipeline.whole_backward}",
    )

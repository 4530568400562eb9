"""Check the table [activation_checkpoint]."""

import math

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs, experts_of
from trainer.job.compilation import CompileOptions
from trainer.job.pipeline_stages import PipelinePlan, layers_of


def check_activation_checkpoint(
    config: JobConfig, model: ModelArgs, compilation: CompileOptions, pipeline: PipelinePlan | None
) -> tuple[str, ...]:
    """Check activation checkpointing against the model; return a note if the pipeline makes it expensive.

    Raises:
        ConfigError: layers that the model lacks, no layer whose input could be offloaded, or recomputation by operator
            in a backward that is split.
    """
    settings = config.activation_checkpoint
    option = settings.selective_ac_option
    number = int(option) if option.isdecimal() else 0
    largest = model.n_layers if settings.mode == "selective" else math.inf
    if option != "op" and not 1 <= number <= largest:
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option = {option!r} must be 'op', or for every n-th layer a number "
            f"from 1 to {model.n_layers}, the layers of model.flavor = {config.model.flavor!r}, such as '2'"
        )
    for layers in map(layers_of, pipeline.stages) if pipeline else [range(model.n_layers)]:
        checkpointed = settings.checkpointed(layers)
        offloads = settings.offload != "none" and config.task == "tokens"
        if offloads and checkpointed and not settings.offloaded(checkpointed):
            raise ConfigError(
                f"activation_checkpoint.offload_keep_last = {settings.offload_keep_last} leaves no input to offload: "
                f"{'a pipeline stage' if pipeline else 'the model'} checkpoints {checkpointed} layers; set it to "
                f"{checkpointed - 1} or less, or activation_checkpoint.offload = 'none'"
            )
    if (chunk := settings.mlp_chunk_tokens) and config.task == "tokens" and (why := why_no_parts(config, model)):
        raise ConfigError(f"activation_checkpoint.mlp_chunk_tokens = {chunk} {why}")
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


def why_no_parts(config: JobConfig, model: ModelArgs) -> str | None:
    """Return why feed-forward networks cannot be computed in parts, and what works; None if they can."""
    settings = config.activation_checkpoint
    if config.task != "tokens" or experts_of(model) is not None:
        return f"is for feed-forward networks, which model.name = {config.model.name!r} lacks; leave it out"
    if config.compile.enable and "model" in config.compile.components:
        return (
            "with compile.enable is not handled for the model; leave one of them out, or compile the loss alone with "
            "compile.components = ['loss']"
        )
    if config.float8.enable:
        return "with float8.enable would find a scale for each part; leave one of them out"
    if settings.mode == "selective" and settings.every is None:
        return (
            "recomputes all products of the network, and activation_checkpoint.mode = 'selective' by operator keeps "
            "some; use the mode 'full' or 'none', or activation_checkpoint.selective_ac_option = '2'"
        )
    return None

"""Check the table [activation_checkpoint]."""

import math
from collections.abc import Iterable

from trainer.config.errors import ConfigError
from trainer.config.schema import ActivationCheckpoint, JobConfig
from trainer.families.args import ModelArgs
from trainer.job.compilation import CompileOptions
from trainer.job.pipeline_stages import PipelinePlan, layers_of_stages


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
    if config.task == "tokens":
        stages = layers_of_stages(pipeline, model)
        if settings.group > 1 and (settings.group > model.n_layers or compilation.splits_backward):
            why = f"and model.flavor = {config.model.flavor!r} has {model.n_layers} layers; use as many or fewer"
            if compilation.splits_backward:
                why = (
                    f"computes the layers of a group for each part of a backward, and {pipeline.schedule} splits it; "
                    f"use 1, or {pipeline.whole_backward}"
                )
            raise ConfigError(f"activation_checkpoint.group = {settings.group} {why}")
        if settings.offload != "none" and (few := least_offloadable(settings, stages)) is not None:
            raise ConfigError(
                f"activation_checkpoint.offload_keep_last = {settings.offload_keep_last} leaves no input to offload: "
                f"{'a pipeline stage' if pipeline else 'the model'} keeps the inputs of only {few} layers; set it to "
                f"{few - 1} or less, or activation_checkpoint.offload = 'none'"
            )
        keeps_attention = (settings.mode, option) == ("selective", "op") and not compilation.model
        if settings.offload == "inputs+attention" and not keeps_attention:
            raise ConfigError(
                "activation_checkpoint.offload = 'inputs+attention' needs activation_checkpoint.mode = 'selective' by "
                "operator, which keeps attention's results, and a model that is not compiled; use 'inputs' instead"
            )
        if settings.mlp_chunk_tokens and (why := why_no_parts(config, compilation)):
            raise ConfigError(f"activation_checkpoint.mlp_chunk_tokens = {settings.mlp_chunk_tokens} {why}")
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


def least_offloadable(settings: ActivationCheckpoint, stages: Iterable[list[int]]) -> int | None:
    """Return how few inputs a stage keeps if all of them would stay on the device; None if some go."""
    numbers = [len(kept) for layers in stages if (kept := settings.kept(layers))]
    return min((number for number in numbers if number <= settings.offload_keep_last), default=None)


def why_no_parts(config: JobConfig, compilation: CompileOptions) -> str | None:
    """Return why feed-forward networks cannot be computed in parts, and what works; None if they can."""
    settings = config.activation_checkpoint
    if compilation.model:
        return (
            "with compile.enable is not handled for the model; leave one of them out, or compile the loss alone with "
            "compile.components = ['loss']"
        )
    if config.float8.enable:
        return "with float8.enable would find a scale for each part; leave one of them out"
    if settings.mode == "selective" and not settings.whole_layers:
        return (
            "recomputes all products of the network, and activation_checkpoint.mode = 'selective' by operator keeps "
            "some; use the mode 'full' or 'none', or activation_checkpoint.selective_ac_option = '2'"
        )
    return None

"""Runs with saved steps that no training has made."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from trainer.checkpoint.dcp_files import Writer
from trainer.checkpoint.weights import RunWeights, load_weights, model_tensors, names_of
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.families.registry import from_path
from trainer.job.resolution import resolve_model
from trainer.models.initialization import initialize, stored_as
from trainer.models.model_spec import model_spec
from trainer.runtime.dump_folder import configuration_text, save_configuration
from trainer.stores.folder import checkpoint_folder
from trainer.stores.state import RunState, model_description
from trainer.transforms.lora import apply_lora


def saved_run(
    folder: Path, *arguments: str, step: int = 3, change: Callable[[nn.Module], None] = lambda model: None
) -> JobConfig:
    """Save a step with the first weights of the run, changed by `change`, and the configuration of the run."""
    settings = [f"--job.dump_folder={folder}", "--checkpoint.enable", f"--training.steps={step}", *arguments]
    config = from_path(parse_command_line(settings).config)
    args = resolve_model(config)
    with torch.device("meta"):
        model = stored_as(model_spec(config.model.name).build(args), getattr(torch, config.training.dtype))
    apply_lora(model, config.lora)
    initialize(model, seed=0, device=torch.device("cpu"))
    if config.checkpoint.initial_load_path is not None:
        load_weights(RunWeights(config, args).initial(), [model], adapters=False)
    with torch.no_grad():
        change(model)
    trained = {x: name for x, name in names_of([model]).items() if x.requires_grad or not isinstance(x, nn.Parameter)}
    state = RunState(step, 0, model_description(config, args), {}, {}, model_only=True)
    place = checkpoint_folder(config)
    place.prepare()
    writer = Writer(place, state, keep_latest_k=0, configuration=configuration_text(config))
    dcp.save(model_tensors(trained), storage_writer=writer, no_dist=True)
    save_configuration(config)
    return config

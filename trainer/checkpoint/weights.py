"""The weights of a model as a part of checkpoints: their names, and loading them alone."""

import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint.files import Reader, TensorsOnly
from trainer.checkpoint.folder import RunState, check_fits, checkpoint_folder, read_state, step_folder, unreadable
from trainer.checkpoint.hf_reader import HFReader
from trainer.checkpoint.initial import saved_step
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.models.args import ModelArgs
from trainer.models.model_spec import model_spec
from trainer.transforms.float8 import without_float8_cast


def names_of(model_parts: Iterable[nn.Module]) -> dict[torch.Tensor, str]:
    """Return every tensor that is saved, with its name; a shared parameter has the first of its names."""
    named: dict[torch.Tensor, str] = {}
    for part in model_parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            named.setdefault(tensor, name)
    return named


def model_tensors(named: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
    """Return the tensors by their names in a checkpoint, not copied."""
    return {f"model.{name}": without_float8_cast(tensor.detach()) for tensor, name in named.items()}


def open_step(config: JobConfig, model: ModelArgs, step: int) -> tuple[RunState, Reader]:
    """Return the state of a saved step of this run, and a reader of its tensors.

    Raises:
        ConfigError: the checkpoint is damaged, or of another model or other data.
    """
    folder = checkpoint_folder(config)
    state = read_state(folder, step)
    check_fits(state, config, model)
    return state, reader_of(folder, state)


def reader_of(folder: Path, state: RunState) -> Reader:
    """Return a reader of the tensors of a saved step in `folder`, which has its metadata.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    reader = Reader(step_folder(folder, state.step), files=state.files)
    try:
        reader.read_metadata()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise unreadable(folder, state.step, error) from None
    return reader


def load_weights(config: JobConfig, args: ModelArgs, model: nn.Module, step: int) -> None:
    """Load the weights of a saved step into a model, in place.

    Raises:
        ConfigError: the checkpoint is damaged, or of another model.
    """
    _, reader = open_step(config, args, step)
    try:
        load_tensors(model_tensors(names_of([model])), reader)
    except CheckpointException as error:
        raise unreadable(checkpoint_folder(config), step, cause_of(error)) from None


def load_initial_weights(config: JobConfig, args: ModelArgs, model_parts: Sequence[nn.Module]) -> None:
    """Load the weights in `checkpoint.initial_load_path` into the model parts of this rank, in place; no collective.

    A rank reads what it holds. Weights take the data type of the run.

    Raises:
        ConfigError: files are damaged or missing, or of another model.
    """
    path = Path(config.checkpoint.initial_load_path)
    step = saved_step(path)
    if step is None:
        reader: StorageReader = HFReader(path, model_spec(config.model.name), args)
    else:
        reader = reader_of(path.absolute().parent, read_state(path.absolute().parent, step))
    try:
        load_tensors(model_tensors(names_of(model_parts)), reader)
    except CheckpointException as error:
        raise ConfigError(f"checkpoint.initial_load_path = {str(path)!r} cannot be read ({cause_of(error)})") from None


def load_tensors(tensors: dict[str, torch.Tensor], reader: StorageReader) -> None:
    """Load this rank's tensors in place; each rank reads by itself.

    Raises:
        CheckpointException: something is missing, damaged or of another shape.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said of `no_dist`
        dcp.load(tensors, storage_reader=reader, planner=TensorsOnly(), no_dist=True)


def cause_of(error: CheckpointException) -> BaseException:
    """Return the error of the lowest rank that failed."""
    return error.failures[min(error.failures)][0]

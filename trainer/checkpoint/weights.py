"""Open and load the weights of a model alone, from a saved step or from the folder that a run starts from.

State of the process: One filter of warnings, while weights alone are read or written.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint.dcp_files import Reader, TensorsOnly, cause_of
from trainer.checkpoint.metadata import METADATA, unpickled
from trainer.checkpoint.peft_table import peft_model
from trainer.config.errors import ConfigError, first_line
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.families.registry import ModelFolder, base_weights, opened_at
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.pairs import HFModel
from trainer.hugging_face.reader import HFReader
from trainer.models.model_spec import hf_model, model_spec
from trainer.runtime.console import logger
from trainer.stores.addresses import named_step, saved_step
from trainer.stores.folder import (
    check_fits,
    checkpoint_folder,
    read_state,
    step_to_load,
    unreadable,
)
from trainer.stores.initial_weights import check_initial_weights
from trainer.stores.state import RunState, check_same_model, parse_state, state_text
from trainer.stores.store import Store
from trainer.transforms.float8 import without_float8_cast
from trainer.transforms.lora import is_adapter
from trainer.transforms.quantized import empty_like_unpacked, pack_into, quantized_weights

WeightsReader = Reader | HFReader
Once = Callable[[Callable[[], bytes]], bytes]
"""Calls a function that reads, and returns its result: on this rank, or on one rank for all ranks."""


def on_this_rank(read: Callable[[], bytes]) -> bytes:
    """Call a function that reads, on this rank.

    Args:
        read: The function.

    Returns:
        Its result.
    """
    return read()


def names_of(model_parts: Iterable[nn.Module]) -> dict[Tensor, str]:
    """Return every saved tensor with its name in `state_dict`; a shared parameter has the first of its names.

    Args:
        model_parts: The model parts of this rank.
    """
    named: dict[Tensor, str] = {}
    for part in model_parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            named.setdefault(tensor, name)
    return named


def model_tensors(named: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Return the tensors by their names in a checkpoint, not copied.

    Args:
        named: Name of each tensor, of any shape.
    """
    return {
        f"model.{name}": without_float8_cast(tensor.detach()) for tensor, name in named.items()
    }


def reader_of(folder: Store, state: RunState, once: Once = on_this_rank) -> Reader:
    """Return a reader of the tensors of a saved step.

    Args:
        folder: The folder of checkpoints.
        state: The state of the step.
        once: Calls a function that reads a file: on this rank, or on one rank for all ranks.

    Raises:
        ConfigError: The metadata are damaged.
    """

    def read() -> bytes:
        try:
            return folder.read(folder.step(state.step) / METADATA)
        except OSError as error:
            raise unreadable(folder, state.step, error) from None

    content = once(read)
    try:
        return Reader(folder, state, unpickled(content, state))
    except Exception as error:  # a damaged pickle may raise anything
        raise unreadable(folder, state.step, error) from None


@dataclass(frozen=True)
class RunWeights:
    """Opens the weights of a run: a saved step, or the weights that the run starts from.

    Each method raises a ConfigError if the weights are damaged, or of another model.

    Attributes:
        config: The configuration.
        model: The arguments of the model.
        once: Calls a function that reads a file: on this rank, or on one rank for all ranks.
    """

    config: JobConfig
    model: ModelArgs
    once: Once = on_this_rank

    def latest(self) -> list[WeightsReader]:
        """Return readers of the run's checkpoint, or of its initial weights if it saved none.

        With adapters, the readers of `initial` follow, for the weights that the adapters change.
        """
        step = json.loads(
            self.once(
                lambda: json.dumps(
                    step_to_load(self.config) if self.config.checkpoint.enable else None
                ).encode()
            )
        )
        readers = [] if step is None else [self.saved(step)]
        if step is None or self.config.lora.rank:
            readers += self.initial()
        return readers

    def saved(self, step: int) -> Reader:
        """Return a reader of a saved step of this run for its weights alone.

        Args:
            step: Number of the step.
        """
        folder = checkpoint_folder(self.config)
        state = self._state(folder, step)
        remedy = "read it with the configuration of its run"
        check_same_model(
            state, self.config, self.model, folder.step(step), remedy=remedy, dtype=False
        )
        return reader_of(folder, state, self.once)

    def to_resume(self, step: int, folder: Store) -> tuple[RunState, Reader]:
        """Open a saved step to resume from. It must also have the data and the optimizer of this run.

        Args:
            step: Number of the step.
            folder: The checkpoints of this or of another run.

        Returns:
            The state of the step, and a reader of its tensors.
        """
        state = self._state(folder, step)
        check_fits(state, self.config, self.model)
        return state, reader_of(folder, state, self.once)

    def initial(self, opened: ModelFolder | None = None) -> list[WeightsReader]:
        """Return readers of the weights in `checkpoint.initial_load_path`.

        If adapters of peft are there, the first one reads these, and a second one the weights of the model.

        Args:
            opened: See `opened_at`.
        """
        key = "checkpoint.initial_load_path"
        initial_path = base_weights(self.config)
        folder, step = named_step(key, initial_path)
        start = opened_at(Path(initial_path), opened)

        def look() -> bytes:
            check_initial_weights(self.config, self.model, start)
            return (
                b""
                if saved_step(key, initial_path) is None
                else state_text(read_state(folder, step))
            )

        if text := self.once(look):
            base = reader_of(folder, parse_state(text, step), self.once)
        else:
            spec = model_spec(self.config.model.name)
            base = self._hf_reader(start, hf_model(spec, self.model))
        adapters = self.config.checkpoint.initial_load_path
        if adapters == initial_path:
            return [base]
        adapted = peft_model(self.config, self.model)
        return [self._hf_reader(HFFolder(Path(adapters)), adapted), base]

    def _state(self, folder: Store, step: int) -> RunState:
        return parse_state(self.once(lambda: state_text(read_state(folder, step))), step)

    def _hf_reader(self, folder: HFFolder, model: HFModel) -> HFReader:
        reader = HFReader(folder, model, self.once(lambda: HFReader(folder, model).headers))
        if reader.left_aside:
            logger.info(
                f"{reader.left_aside} tensors of {folder.path} read images, and are left aside: the run reads the "
                "model of text alone"
            )
        return reader


def load_weights(
    readers: Sequence[WeightsReader], model_parts: Sequence[nn.Module], *, adapters: bool = True
) -> None:
    """Load the weights of the model parts of this rank, in place; no collective.

    A rank reads the tensors that it holds.

    If the weights are in a Hugging Face folder, tensors that the folder lacks stay as they are.

    Args:
        readers: The readers of the weights, see `RunWeights`.
        model_parts: The model parts of this rank.
        adapters: Whether to load adapters too.

    Raises:
        ConfigError: Files are damaged, or a checkpoint lacks a tensor.
    """
    tensors = model_tensors(
        {
            x: name
            for x, name in names_of(model_parts).items()
            if adapters or not is_adapter(name)
        }
    )
    if isinstance(readers[-1], HFReader):
        held = {
            name for reader in readers for name in reader.read_metadata().state_dict_metadata
        }
        tensors = {name: x for name, x in tensors.items() if name in held}
    packed = {f"model.{name}": x for name, x in quantized_weights(model_parts)}
    load_tensors({name: x for name, x in tensors.items() if name not in packed}, *readers)
    for name, weight in packed.items():  # one at a time: the whole model may not fit
        unpacked = empty_like_unpacked(weight)
        load_tensors({name: unpacked}, *readers)
        pack_into(weight, unpacked)


def load_tensors(tensors: Mapping[str, Tensor], *readers: WeightsReader) -> None:
    """Load tensors in place, in their own dtypes. The first reader that has a tensor reads it.

    Args:
        tensors: Tensors of any shape, by their names in a checkpoint.
        *readers: The readers.

    Raises:
        ConfigError: A tensor is missing, damaged or of another shape.
    """
    for reader in readers:
        held = reader.read_metadata().state_dict_metadata
        is_last = reader is readers[-1]
        here = {name: x for name, x in tensors.items() if is_last or name in held}
        tensors = {name: x for name, x in tensors.items() if name not in here}
        try:
            with warnings.catch_warnings():
                # no_dist is on purpose
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(here, storage_reader=reader, planner=TensorsOnly(), no_dist=True)
        except CheckpointException as error:
            raise ConfigError(
                f"the weights in {reader.path} cannot be read "
                f"({first_line(cause_of(error)).removesuffix('.')}); take another copy"
            ) from None

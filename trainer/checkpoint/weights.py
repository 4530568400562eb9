"""Saved steps, and the weights of a model in them: their names, and loading them alone.

DCP's files are made safe: reading runs no code, check sums find wrong bits, a checkpoint appears whole or not at all.
Stock DCP unpickles its metadata and every entry that is no tensor, and does not compare check sums.
"""

import io
import json
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.config.errors import ConfigError
from trainer.config.loader import RUN_FILE
from trainer.config.schema import JobConfig
from trainer.config.writable import os_error_of
from trainer.families.args import ModelArgs
from trainer.hugging_face.reader import HFReader
from trainer.models.model_spec import hf_model, model_spec
from trainer.stores.folder import (
    RunState,
    check_fits,
    check_initial_weights,
    check_same_model,
    checkpoint_folder,
    keep_latest,
    mark_best,
    parse_state,
    read_state,
    state_text,
    step_to_load,
    unreadable,
)
from trainer.stores.store import Place, Store, named_step, saved_step
from trainer.transforms.float8 import without_float8_cast
from trainer.transforms.lora import is_adapter

METADATA = ".metadata"
# All classes and values in the metadata of tensors.
_ALLOWED = {
    "torch": {
        "Size",
        "float64",
        "float32",
        "bfloat16",
        "float16",
        "int64",
        "int32",
        "uint8",
        "bool",
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes of DCP's metadata only, so that no file can name a function to be called."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"{METADATA} names {module}.{name}, which is no part of a checkpoint"
            )
        return super().find_class(module, name)


def unpickled(content: bytes, state: RunState) -> Metadata:
    """Return which part of which tensor is where; content: of the file of metadata.

    Raises:
        Exception: unreadable, or no metadata; a damaged pickle may raise anything.
    """
    if state.sums.get(METADATA) not in (None, zlib.crc32(content)):
        raise ValueError(f"the check sum of {METADATA} is wrong")
    metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{METADATA} holds something else")
    for place in metadata.storage_data.values():
        if place.relative_path not in state.files or place.transform_descriptors:
            raise ValueError(
                f"{METADATA} refers to {place.relative_path!r}, which is no part of it"
            )
    return metadata


class _Summed:
    """A file that is written from its beginning to its end, with the check sum of its bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.sum = stream, 0

    def write(self, content: Any) -> int:
        self.sum = zlib.crc32(content, self.sum)
        return self._stream.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True)
class _Written(WriteResult):
    """A result with the check sum of its whole file, for the rank that publishes."""

    sum: int = 0


class _Files(FileSystem):
    """A store as PyTorch's reader and writer see a file system.

    PyTorch's own for addresses (`_fsspec_filesystem`) shows half an object after an error, until it has removed it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.sums: dict[str, int] = {}
        """Check sum (zlib.crc32) of each file that was written, by its name."""

    @contextmanager
    def create_stream(self, path: Place, mode: str) -> Iterator[IO[bytes]]:
        with self._store.open(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = _Summed(stream)
            yield summed
            self.sums[path.name] = summed.sum

    def concat_path(self, path: Place, suffix: str) -> Place:
        return path / suffix


class Reader(FileSystemReader):
    """Reads the tensors of one checkpoint, which `metadata` describes."""

    def __init__(self, folder: Store, state: RunState, metadata: Metadata) -> None:
        super().__init__("")
        self._folder, self._metadata = folder, metadata
        self.fs = _Files(folder)
        self.path = folder.step(state.step)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which part of which tensor is where; no file is read."""
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Return the archive of one tensor, whose check sum is compared: `torch.load` does not do it."""
        content = self._folder.part(file, sinfo.offset, sinfo.length)
        with zipfile.ZipFile(content) as archive:
            if archive.testzip() is not None:
                raise ValueError(f"{sinfo.relative_path} is damaged: a check sum is wrong")
        content.seek(0)
        return content


class TensorsOnly(DefaultLoadPlanner):
    """Loads tensors, and refuses everything else, which stock DCP would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.storage_index.fqn} is no tensor")


class WholeState(TensorsOnly):
    """Loads what all ranks ask for together, and refuses a checkpoint that holds more: DCP alone finds what is missing.

    without: first parts of names, such as "optimizer", that are left out on purpose.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        super().__init__()
        self._without = without

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        asked = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        surplus = sorted(
            name
            for name, saved in self.metadata.state_dict_metadata.items()
            if name not in asked
            and name.partition(".")[0] not in self._without
            and saved.size.numel()
        )
        if surplus:
            raise ValueError(
                f"it holds {surplus[0]} and this model has none; such entries: {len(surplus)}"
            )
        return super().create_global_plan(global_plan)


class Writer(FileSystemWriter):
    """Writes a step, and publishes it when the files of all ranks are on the disk.

    best: the validation loss, if this is the best checkpoint so far; None: it is not. configuration: TOML of the run.

    Publishing is the last step of DCP's protocol, on one rank, so an error there reaches every rank.
    """

    def __init__(
        self,
        folder: Store,
        state: RunState,
        *,
        keep_latest_k: int,
        keep_every: int = 0,
        best: float | None = None,
        configuration: bytes | None = None,
    ) -> None:
        super().__init__("", sync_files=False)  # the store syncs them
        self.fs = _Files(folder)
        self.path = folder.unfinished(state.step)
        self._folder = folder
        self._state = state
        self._best = best
        self._claim = ""
        self._keep_latest_k = keep_latest_k
        self._keep_every = keep_every
        self._configuration = configuration

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Claim the place of the checkpoint, on one rank, before any rank writes."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._claim = self._folder.begin(self._state.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # PyTorch would look for a checkpoint there that another rank removes now

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of all ranks, on one of them."""
        plans = super().prepare_global_plan(plans)
        names = [
            replace(plan.storage_data, prefix=f"{self._claim}{i}_")
            for i, plan in enumerate(plans)
        ]
        return [
            replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors.

        Raises:
            OSError: a file cannot be written. PyTorch's own error says less, and loses the cause on the way to others.
        """
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:
            if (cause := os_error_of(error)) is not None:
                raise OSError(cause.errno, cause.strerror) from error
            raise
        sums = self.fs.sums
        done = Future()
        done.set_result(
            [_Written(**vars(x), sum=sums[x.storage_data.relative_path]) for x in results]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, publish the checkpoint, and remove old ones."""
        written = [result for of_rank in results for result in of_rank]
        metadata.storage_data = {result.index: result.storage_data for result in written}
        # it would hold a path object: one more class that the reader must know
        metadata.storage_meta = None
        whole = {METADATA: pickle.dumps(metadata)}
        if self._configuration is not None:
            whole[RUN_FILE] = self._configuration
        for name, content in whole.items():
            self._folder.write(self.path / name, content)
        files = {name: len(content) for name, content in whole.items()}
        for place in (result.storage_data for result in written):
            files[place.relative_path] = max(
                files.get(place.relative_path, 0), place.offset + place.length
            )
        sums = {name: zlib.crc32(content) for name, content in whole.items()}
        sums |= {result.storage_data.relative_path: result.sum for result in written}
        state = replace(self._state, files=files, sums=sums)
        self._folder.publish(state.step, state_text(state), self._claim)
        mark_best(self._folder, state.step, self._best)
        keep_latest(self._folder, self._keep_latest_k, state.step, every=self._keep_every)


WeightsReader = Reader | HFReader
Once = Callable[[Callable[[], bytes]], bytes]
"""Calls a function that reads, and returns what it returns: on this rank, or on one rank for all of them."""


def on_this_rank(read: Callable[[], bytes]) -> bytes:
    return read()


def names_of(model_parts: Iterable[nn.Module]) -> dict[torch.Tensor, str]:
    """Return every tensor that is saved, with its name; a shared parameter has the first of its names."""
    named: dict[torch.Tensor, str] = {}
    for part in model_parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            named.setdefault(tensor, name)
    return named


def model_tensors(named: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
    """Return the tensors by their names in a checkpoint, not copied."""
    return {
        f"model.{name}": without_float8_cast(tensor.detach()) for tensor, name in named.items()
    }


def open_step(
    config: JobConfig,
    model: ModelArgs,
    step: int,
    folder: Store | None = None,
    once: Once = on_this_rank,
) -> tuple[RunState, Reader]:
    """Return the state of a saved step to resume from, and a reader of its tensors. folder: of another run.

    Raises:
        ConfigError: the checkpoint is damaged, or of another model or other data.
    """
    folder = folder or checkpoint_folder(config)
    state = parse_state(once(lambda: state_text(read_state(folder, step))), step)
    check_fits(state, config, model)
    return state, reader_of(folder, state, once)


def open_saved(
    config: JobConfig, model: ModelArgs, step: int, once: Once = on_this_rank
) -> Reader:
    """Return a reader of a saved step for its weights alone; ConfigError if it is damaged, or of another model."""
    folder = checkpoint_folder(config)
    state = parse_state(once(lambda: state_text(read_state(folder, step))), step)
    remedy = "read it with the configuration of its run"
    check_same_model(state, config, model, folder.step(step), remedy=remedy, dtype=False)
    return reader_of(folder, state, once)


def reader_of(folder: Store, state: RunState, once: Once = on_this_rank) -> Reader:
    """Return a reader of the tensors of a saved step in `folder`; ConfigError if its metadata are damaged."""

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


def open_initial(
    config: JobConfig, args: ModelArgs, once: Once = on_this_rank
) -> Reader | HFReader:
    """Return a reader of the weights in `checkpoint.initial_load_path`; ConfigError if damaged or of another model."""
    key = "checkpoint.initial_load_path"
    given = config.checkpoint.initial_load_path
    folder, step = named_step(key, given)

    def look() -> bytes:
        check_initial_weights(config, args)
        return b"" if saved_step(key, given) is None else state_text(read_state(folder, step))

    if text := once(look):
        return reader_of(folder, parse_state(text, step), once)
    tensors = hf_model(model_spec(config.model.name), args)
    return HFReader(Path(given), tensors, once(lambda: HFReader(Path(given), tensors).headers))


def open_weights(
    config: JobConfig, args: ModelArgs, once: Once = on_this_rank
) -> list[WeightsReader]:
    """Return readers of the weights of a run: of its checkpoint, or of what it starts from if it has saved none.

    Of adapters, the second one reads the weights that they adapt.

    Raises:
        ConfigError: they are damaged, or of another model.
    """
    step = json.loads(
        once(
            lambda: json.dumps(
                step_to_load(config) if config.checkpoint.enable else None
            ).encode()
        )
    )
    if step is None:
        return [open_initial(config, args, once)]
    saved = open_saved(config, args, step, once)
    return [saved, open_initial(config, args, once)] if config.lora.rank else [saved]


def load_weights(
    readers: Sequence[WeightsReader], model_parts: Sequence[nn.Module], *, adapters: bool = True
) -> None:
    """Load the weights of the model parts of this rank, in place; no collective. A rank reads what it holds.

    Buffers that have no counterpart in a Hugging Face folder stay as they are. adapters: whether to load adapters too.

    Raises:
        ConfigError: files are damaged.
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
    load_tensors(tensors, *readers)


def load_tensors(tensors: Mapping[str, torch.Tensor], *readers: WeightsReader) -> None:
    """Load tensors in place, in their own data types, each by the first reader that has it.

    Raises:
        ConfigError: something is missing, damaged or of another shape.
    """
    for reader in readers:
        here = {
            name: x
            for name, x in tensors.items()
            if name in reader.read_metadata().state_dict_metadata
        }
        here = here if reader is not readers[-1] else dict(tensors)
        tensors = {name: x for name, x in tensors.items() if name not in here}
        try:
            with warnings.catch_warnings():
                # no_dist is meant
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(here, storage_reader=reader, planner=TensorsOnly(), no_dist=True)
        except CheckpointException as error:
            reason = str(cause_of(error)).strip().split("\n")[0].removesuffix(".")
            raise ConfigError(
                f"the weights in {reader.path} cannot be read ({reason}); take another copy"
            ) from None


def cause_of(error: CheckpointException) -> BaseException:
    """Return the error of the lowest rank that failed."""
    return error.failures[min(error.failures)][0]

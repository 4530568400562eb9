"""DCP's files, made safe: reading runs no code, check sums find wrong bits, a checkpoint appears whole or not at all.

Stock DCP unpickles its metadata and every entry that is no tensor, and does not compare check sums.
"""

import io
import pickle
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.checkpoint.folder import RunState
from trainer.checkpoint.publishing import begin, keep_latest, mark_best, publish
from trainer.checkpoint.remote import Place, is_remote, objects, store_errors
from trainer.runtime.full_disk import os_error_of

if TYPE_CHECKING:
    from upath import UPath

_METADATA = ".metadata"
# All classes and values in the metadata of tensors.
_ALLOWED = {
    "torch": {"Size", "float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"},
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
            raise pickle.UnpicklingError(f"{_METADATA} names {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


class _Seekable(io.RawIOBase):
    """PyTorch's view of a part of a file, whose places may also be given from its end."""

    def __init__(self, view: IO[bytes], length: int) -> None:
        self._view, self._length = view, length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._view.seek(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._length}[whence])
        return self.tell()

    def tell(self) -> int:
        return self._view.tell()

    def readinto(self, into: memoryview) -> int:
        return self._view.readinto(into) if self.tell() < self._length else 0


class _Objects(FileSystemBase):
    """A remote store as PyTorch's reader and writer see a file system."""

    @contextmanager
    def create_stream(self, path: "UPath", mode: str) -> Iterator[IO[bytes]]:
        """Enter a context with an object. One that is written appears at the end; after an error it never does."""
        with store_errors(path):
            stream = path.fs.open(path.path, mode)
        try:
            yield stream
            with store_errors(path):
                stream.close()
        except BaseException:
            if mode == "wb" and not stream.closed:
                stream.discard()
                stream.closed = True  # or the garbage collector would write what there is
            raise

    def concat_path(self, path: "UPath", suffix: str) -> "UPath":
        return path / suffix

    def init_path(self, path: "UPath") -> "UPath":
        return path

    def mkdir(self, path: "UPath") -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False  # PyTorch is never asked to find out what an address is for

    def exists(self, path: "UPath") -> bool:
        return path.name in objects(path.parent)

    def rm_file(self, path: "UPath") -> None:
        with store_errors(path):
            path.fs.rm_file(path.path)

    def rename(self, path: "UPath", new_path: "UPath") -> None:
        with store_errors(path):
            path.fs.mv(path.path, new_path.path)


class Reader(FileSystemReader):
    """Reads the tensors of one checkpoint folder.

    files: the names that its metadata may refer to; sums: the check sum of the metadata, if it is known.
    """

    def __init__(self, path: Place, *, files: Collection[str], sums: Mapping[str, int] | None = None) -> None:
        super().__init__("" if is_remote(path) else path)
        if is_remote(path):
            self.fs, self.path = _Objects(), path
        self._files, self._sums = files, sums or {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which part of which tensor is where.

        Raises:
            Exception: unreadable, or no metadata; a damaged pickle may raise anything.
        """
        with self.fs.create_stream(self.path / _METADATA, "rb") as file, store_errors(self.path):
            content = file.read()
        if self._sums.get(_METADATA) not in (None, zlib.crc32(content)):
            raise ValueError(f"the check sum of {_METADATA} is wrong")
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{_METADATA} holds something else")
        for place in metadata.storage_data.values():
            if place.relative_path not in self._files or place.transform_descriptors:
                raise ValueError(f"{_METADATA} refers to {place.relative_path!r}, which is no part of it")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Return the archive of one tensor, whose check sum is compared: `torch.load` does not do it.

        The archive is not kept in memory, where it would be a third copy of the tensor; but of a remote store it is,
        because each piece that is read there is a request.
        """
        if is_remote(self.path):
            file.seek(sinfo.offset)
            with store_errors(self.path):
                content = io.BytesIO(file.read(sinfo.length))
        else:
            content = _Seekable(super()._slice_file(file, sinfo), sinfo.length)
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
            if name not in asked and name.partition(".")[0] not in self._without and saved.size.numel()
        )
        if surplus:
            raise ValueError(f"it holds {surplus[0]} and this model has none; such entries: {len(surplus)}")
        return super().create_global_plan(global_plan)


class Writer(FileSystemWriter):
    """Writes to an unfinished folder, and publishes it when the files of all ranks are on the disk.

    best: the validation loss, if this is the best checkpoint so far; None: it is not.

    Publishing is the last step of DCP's protocol, on one rank, so an error there reaches every rank.
    """

    def __init__(
        self,
        unfinished: Place,
        state: RunState,
        *,
        keep_latest_k: int,
        keep_every: int = 0,
        best: float | None = None,
        file_per_tensor: bool = False,
    ) -> None:
        """file_per_tensor: PyTorch keeps the tensors of a file in memory until the file is complete."""
        remote = is_remote(unfinished)
        super().__init__("" if remote else unfinished, single_file_per_rank=not file_per_tensor, sync_files=not remote)
        if remote:
            self.fs, self.path = _Objects(), unfinished
        self._state, self._best, self._claim = state, best, ""
        self._keep_latest_k, self._keep_every = keep_latest_k, keep_every

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Claim the place of the checkpoint, on one rank, before any rank writes."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._claim = begin(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # PyTorch would make a folder, and look for a checkpoint there that another rank removes now.
        return plan if is_remote(self.path) else super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of all ranks, on one of them."""
        plans = super().prepare_global_plan(plans)
        if not self._claim:
            return plans
        names = [replace(plan.storage_data, prefix=f"__{self._claim}_{i}_") for i, plan in enumerate(plans)]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors.

        Raises:
            OSError: a file cannot be written. PyTorch's own error says less, and loses the cause on the way to others.
        """
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            if (cause := os_error_of(error)) is not None:
                raise OSError(cause.errno, cause.strerror) from error
            raise

    def storage_meta(self) -> StorageMeta | None:
        return None  # it would hold a path object: one more class that the reader must know

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, publish the checkpoint, and remove old ones."""
        super().finish(metadata, results)
        unfinished = self.path
        with store_errors(unfinished):
            content = (unfinished / _METADATA).read_bytes()
        files, sums = {_METADATA: len(content)}, {_METADATA: zlib.crc32(content)}
        for result in (result for of_rank in results for result in of_rank):
            place = result.storage_data
            files[place.relative_path] = max(files.get(place.relative_path, 0), place.offset + place.length)
        publish(unfinished, replace(self._state, files=files, sums=sums), self._claim)
        mark_best(unfinished.parent, self._state.step, self._best)
        keep_latest(unfinished.parent, self._keep_latest_k, self._state.step, every=self._keep_every)

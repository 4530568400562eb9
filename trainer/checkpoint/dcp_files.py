"""How DCP reads and writes the files of one step: from and to any store, with check sums, and tensors alone.

A checkpoint appears whole or not at all, and wrong bits are found. Stock DCP unpickles every entry that is no tensor,
and does not compare check sums.
"""

import io
import pickle
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.checkpoint.metadata import METADATA
from trainer.config.loader import RUN_FILE
from trainer.config.writable import os_error_of
from trainer.stores.kept import keep_latest, mark_best
from trainer.stores.state import RunState, state_text
from trainer.stores.store import Place, Store


class _Summed:
    """A file that is written from its beginning to its end, with the check sum of its bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.sum = 0

    def write(self, content: Any) -> int:
        self.sum = zlib.crc32(content, self.sum)
        return self._stream.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True)
class _Written(WriteResult):
    """A result with the check sum of its whole file, for the rank that publishes."""

    sum: int


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
    """Reads the tensors of one checkpoint.

    Args:
        folder: The folder of checkpoints.
        state: The state of the step.
        metadata: Describes the tensors.
    """

    def __init__(self, folder: Store, state: RunState, metadata: Metadata) -> None:
        super().__init__("")
        self._folder = folder
        self._metadata = metadata
        self.fs = _Files(folder)
        self.path = folder.step(state.step)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the place of each part of each tensor, without reading a file.

        Args:
            *args: Not used.
            **kwargs: Not used.
        """
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Return the archive of one tensor. Raise ValueError if a check sum is wrong, which `torch.load` ignores."""
        content = self._folder.part(file, sinfo.offset, sinfo.length)
        with zipfile.ZipFile(content) as archive:
            if archive.testzip() is not None:
                raise ValueError(f"{sinfo.relative_path} is damaged: a check sum is wrong")
        content.seek(0)
        return content


class TensorsOnly(DefaultLoadPlanner):
    """Loads tensors, and refuses everything else; stock DCP would unpickle it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse an entry that is no tensor.

        Args:
            read_item: Names the entry.
            value: Not used.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{read_item.storage_index.fqn} is no tensor")


class WholeState(TensorsOnly):
    """Loads the tensors that all ranks ask for together, and refuses a checkpoint with more tensors.

    DCP alone finds missing tensors only.

    Args:
        without: First parts of names, for example "optimizer", that are left out on purpose.
    """

    def __init__(self, without: Collection[str]) -> None:
        super().__init__()
        self._without = without

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of the ranks, after a check that they ask for every tensor of the checkpoint.

        Empty tensors and the parts in `without` need no rank.

        Args:
            global_plan: The plans of the ranks.

        Raises:
            ValueError: The checkpoint has a tensor that no rank asks for.
        """
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
                f"it holds {surplus[0]}, which this model lacks; surplus entries: {len(surplus)}"
            )
        return super().create_global_plan(global_plan)


class Writer(FileSystemWriter):
    """Writes a step, and publishes it when the files of all ranks are on the disk.

    Publishing is the last step of DCP's protocol, on one rank, so an error there reaches every rank.

    Args:
        folder: The folder of checkpoints.
        state: The state of the step.
        keep_latest_k: Number of the latest checkpoints that are kept; 0: all.
        keep_every: Steps that are multiples of this number are also kept; 0: none.
        best: The validation loss, if this is the best checkpoint so far, otherwise None.
        configuration: The configuration of the run, in TOML.
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
        """Claim the place of the checkpoint, on one rank, before any rank writes.

        Args:
            is_coordinator: Whether this rank is the one.
            *args: Arguments of DCP.
            **kwargs: Arguments of DCP.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._claim = self._folder.begin(self._state.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged. PyTorch would look for an old checkpoint, which another rank removes now.

        Args:
            plan: The plan of this rank.
        """
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the files of all ranks their names. One rank calls it, with the plans of all ranks.

        Args:
            plans: The plans of the ranks.

        Returns:
            The plans with names.
        """
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"{self._claim}{i}_"))
            for i, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors.

        Args:
            plan: The plan of this rank.
            planner: The planner of DCP.

        Returns:
            A finished future with the results.

        Raises:
            OSError: A file cannot be written. PyTorch's own error says less, and loses the cause on the way to other
                ranks.
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
        """Write the metadata, publish the checkpoint, and remove old ones. One rank calls it, after all have written.

        Args:
            metadata: Describes the tensors.
            results: The results of the ranks.
        """
        written = [result for rank_results in results for result in rank_results]
        metadata.storage_data = {result.index: result.storage_data for result in written}
        # storage_meta would hold a path object: one more class that the reader must know
        metadata.storage_meta = None
        whole = {METADATA: pickle.dumps(metadata)}
        if self._configuration is not None:
            whole[RUN_FILE] = self._configuration
        files = {}
        sums = {}
        for name, content in whole.items():
            self._folder.write(self.path / name, content)
            files[name] = len(content)
            sums[name] = zlib.crc32(content)
        for result in written:
            place = result.storage_data
            name = place.relative_path
            files[name] = max(files.get(name, 0), place.offset + place.length)
            sums[name] = result.sum
        state = replace(self._state, files=files, sums=sums)
        self._folder.publish(state.step, state_text(state), self._claim)
        mark_best(self._folder, state.step, self._best)
        keep_latest(self._folder, self._keep_latest_k, state.step, every=self._keep_every)


def cause_of(error: CheckpointException) -> BaseException:
    """Return the error of the lowest rank that failed.

    Args:
        error: The error of DCP.
    """
    return error.failures[min(error.failures)][0]

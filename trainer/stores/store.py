"""Where checkpoints are kept: a folder of a file system, or names in a remote store (`remote.py`). Torch-free.

Both have the same names. A file appears whole or not at all, and so does a step.
"""

import errno
import io
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, Union

from trainer.config.errors import ConfigError
from trainer.config.writable import sync
from trainer.runtime.console import logger

if TYPE_CHECKING:
    from upath import UPath

Place = Union[Path, "UPath"]
"""A file or folder of a file system, or a name in a remote store, with the methods of `pathlib.Path`."""

STATE_FILE = "state.json"
_SAVED = re.compile(r"step-([1-9]\d*)")
_UNFINISHED = re.compile(r"step-[1-9]\d*\.tmp")


class Store(ABC):
    """A folder of checkpoints. Its methods raise an OSError for whatever the file system or the store refuses."""

    remedy: ClassVar[str]
    """What a user can do about one that cannot be read or written."""
    unreachable: ClassVar[type[ConfigError]]
    """The error for one that cannot be read."""

    def __init__(self, path: Place) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def step(self, step: int) -> Place:
        """Return where a step is, or would be."""
        return self.path / f"step-{step}"

    def read(self, file: Place) -> bytes:
        with self.open(file, "rb") as stream:
            return stream.read()

    def write(self, file: Place, content: bytes) -> None:
        with self.open(file, "wb") as stream:
            stream.write(content)

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order; none where there is no such folder."""

    @abstractmethod
    def sizes(self, step: int) -> dict[str, int]:
        """Return name and bytes of every file of a step; none where there is no such step."""

    @abstractmethod
    def open(self, file: Place, mode: str) -> AbstractContextManager[IO[bytes]]:
        """Enter a context with a file, to be read ("rb") or written ("wb"): it then appears at the end, synced."""

    @abstractmethod
    def part(self, stream: IO[bytes], start: int, length: int) -> IO[bytes]:
        """Return a part of an open file as a file."""

    @abstractmethod
    def remove_file(self, file: Place) -> None: ...

    @abstractmethod
    def prepare(self) -> None:
        """Make the folder and see that it can be written to; remove what interrupted saves have left.

        Raises:
            ConfigError: something in a store has the name of a checkpoint, and this program did not write it.
        """

    @abstractmethod
    def unfinished(self, step: int) -> Place:
        """Return where the files of a step are written before it is published."""

    @abstractmethod
    def begin(self, step: int) -> str:
        """Claim the place of a step before any rank writes; return what the names of its files begin with."""

    @abstractmethod
    def publish(self, step: int, state: bytes, claim: str) -> None:
        """Make the files in `unfinished`, with this `state.json`, the checkpoint of a step. claim: see `begin`.

        Raises:
            OSError: it cannot be written, or another job has claimed it.
        """

    @abstractmethod
    def remove(self, step: int) -> None:
        """Remove a checkpoint; one that is half removed does not look like one."""

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Remove what interrupted saves and removals have left."""


class LocalStore(Store):
    """A folder of a file system. A save writes to step-N.tmp, and one rename makes it the checkpoint."""

    remedy, unreachable = "name a folder that can", ConfigError

    def steps(self) -> list[int]:
        if self.path.is_dir():
            return steps_of(path.name for path in self.path.iterdir() if (path / STATE_FILE).is_file())
        if os.path.lexists(self.path):
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(self.path))
        return []

    def sizes(self, step: int) -> dict[str, int]:
        if not self.step(step).is_dir():
            return {}
        with os.scandir(self.step(step)) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    @contextmanager
    def open(self, file: Path, mode: str) -> Iterator[IO[bytes]]:
        if mode == "rb":
            with file.open(mode) as stream:
                yield stream
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{file.name}.tmp")
        with unfinished.open(mode) as stream:
            yield stream  # PyTorch closes it
        sync(unfinished)
        unfinished.replace(file)

    def part(self, stream: IO[bytes], start: int, length: int) -> IO[bytes]:
        return _Part(stream, start, length)

    def remove_file(self, file: Path) -> None:
        file.unlink()

    def prepare(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()

    def unfinished(self, step: int) -> Path:
        return self.path / f"step-{step}.tmp"

    def begin(self, step: int) -> str:
        return "__"

    def publish(self, step: int, state: bytes, claim: str) -> None:
        unfinished, final = self.unfinished(step), self.step(step)
        self.write(unfinished / STATE_FILE, state)
        sync(unfinished)
        _make_way(final)
        unfinished.rename(final)
        sync(self.path)

    def remove(self, step: int) -> None:
        if not self.step(step).is_symlink():
            self.step(step).rename(self.unfinished(step))
            shutil.rmtree(self.unfinished(step))

    def remove_unfinished(self) -> None:
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def reason_of(error: OSError) -> str:
    """Return why an operation failed; errors of remote stores have a message alone."""
    return error.strerror or str(error).strip().split("\n")[0] or type(error).__name__


def steps_of(names: Iterable[str]) -> list[int]:
    """Return the steps of which names are, in order."""
    return sorted(int(match[1]) for match in map(_SAVED.fullmatch, names) if match)


def _make_way(path: Path) -> None:
    """Free the name of a checkpoint: remove an older checkpoint of a history that this run left, move anything else."""
    if (path / STATE_FILE).is_file() and not path.is_symlink():
        (path / STATE_FILE).unlink()  # a checkpoint that is half removed must not look like one
        shutil.rmtree(path)
    elif os.path.lexists(path):
        aside = next(p for p in (path.with_name(f"{path.name}.other{i}") for i in count(1)) if not os.path.lexists(p))
        logger.warning(f"{path} is no checkpoint, and a checkpoint needs its name: it was renamed to {aside.name}")
        path.rename(aside)


class _Part(io.RawIOBase):
    """A part of an open file. It is not kept in memory, where it would be a third copy of a tensor."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, into: memoryview) -> int:
        self._stream.seek(self._start + self._at)
        read = self._stream.readinto(memoryview(into)[: max(self._length - self._at, 0)])
        self._at += read
        return read

"""Where checkpoints are kept: a folder of a file system, or a remote store (`remote_store.py`). Torch-free.

Both have the same names. A file appears whole or not at all, and so does a step.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Union

from trainer.config.errors import ConfigError, first_line
from trainer.config.writable import sync
from trainer.runtime.console import logger
from trainer.stores.file_part import FilePart

if TYPE_CHECKING:
    from upath import UPath

Place = Union[Path, "UPath"]
"""A file or folder of a file system, or a name in a remote store, with the methods of `pathlib.Path`."""

STATE_FILE = "state.json"
_SAVED = re.compile(r"step-([1-9]\d*)")
_UNFINISHED = re.compile(r"step-[1-9]\d*\.tmp")
STEP_NAME = re.compile(r"step-(0|[1-9]\d*)")


class Store:
    """A folder of checkpoints of a file system. A save writes to step-N.tmp, and one rename makes it the checkpoint.

    Methods raise an OSError for everything that the file system refuses. `RemoteStore` overrides
    what a remote store does otherwise.

    Args:
        path: The folder.
    """

    remedy = "name a folder that can"
    """What a user can do if the folder cannot be read or written."""
    unreachable: type[ConfigError] = ConfigError
    """The error for a folder that cannot be read."""

    def __init__(self, path: Place) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def step(self, step: int) -> Place:
        """Return the path of a step, which need not exist.

        Args:
            step: Number of the step.
        """
        return self.path / f"step-{step}"

    def read(self, file: Place) -> bytes:
        """Return the content of a file.

        Args:
            file: The file.
        """
        with self.open(file, "rb") as stream:
            return stream.read()

    def write(self, file: Place, content: bytes) -> None:
        """Write a file.

        Args:
            file: The file.
            content: Its content.
        """
        with self.open(file, "wb") as stream:
            stream.write(content)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order; [] if the folder is missing."""
        if self.path.is_dir():
            return steps_of(x.name for x in self.path.iterdir() if (x / STATE_FILE).is_file())
        if os.path.lexists(self.path):
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(self.path))
        return []

    def sizes(self, step: int) -> dict[str, int]:
        """Return name and bytes of every file of a step; {} if the step does not exist.

        Args:
            step: Number of the step.
        """
        if not self.step(step).is_dir():
            return {}
        with os.scandir(self.step(step)) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    @contextmanager
    def open(self, file: Path, mode: str) -> Iterator[IO[bytes]]:
        """Enter a context with a file. A written file is synced and gets its name by a rename at the end.

        A write also makes the folder of the file. After an error only FILE.tmp is left.

        Args:
            file: The file.
            mode: "rb" to read, "wb" to write.

        Yields:
            The open file.
        """
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
        """Return a part of an open file as a file.

        Args:
            stream: The open file.
            start: First byte.
            length: Number of bytes.
        """
        return FilePart(stream, start, length)

    def remove_file(self, file: Path) -> None:
        """Remove a file.

        Args:
            file: The file.
        """
        file.unlink()

    def prepare(self) -> None:
        """Make the folder, and remove the files of interrupted saves."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()

    def unfinished(self, step: int) -> Path:
        """Return step-N.tmp.

        Args:
            step: Number of the step.
        """
        return self.path / f"step-{step}.tmp"

    def begin(self, step: int) -> str:
        """Claim the place of a step before any rank writes. A folder needs no claim.

        Args:
            step: Number of the step.

        Returns:
            The beginning of the names of its files.
        """
        return "__"

    def publish(self, step: int, state: bytes, claim: str) -> None:
        """Write `state.json` into step-N.tmp, and rename that folder to step-N; an old step-N makes way.

        Args:
            step: Number of the step.
            state: The content of `state.json`.
            claim: Not used.
        """
        unfinished = self.unfinished(step)
        final = self.step(step)
        self.write(unfinished / STATE_FILE, state)
        sync(unfinished)
        _make_way(final)
        unfinished.rename(final)
        sync(self.path)

    def remove(self, step: int) -> None:
        """Rename the checkpoint, then remove it. A symbolic link stays.

        Args:
            step: Number of the step.
        """
        if not self.step(step).is_symlink():
            self.step(step).rename(self.unfinished(step))
            shutil.rmtree(self.unfinished(step))

    def remove_unfinished(self) -> None:
        """Remove the folders step-N.tmp."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def reason_of(error: OSError) -> str:
    """Return why an operation failed. Errors of remote stores have only a message.

    Args:
        error: The error.
    """
    return error.strerror or first_line(error)


def steps_of(names: Iterable[str]) -> list[int]:
    """Return the steps that names stand for, in order.

    Args:
        names: Names of folders; a name that is not step-N is left out.
    """
    return sorted(int(match[1]) for match in map(_SAVED.fullmatch, names) if match)


def _make_way(path: Path) -> None:
    """Free the name of a checkpoint: remove an older checkpoint of another history, rename anything else."""
    if (path / STATE_FILE).is_file() and not path.is_symlink():
        (path / STATE_FILE).unlink()  # a checkpoint that is half removed must not look like one
        shutil.rmtree(path)
    elif os.path.lexists(path):
        aside = next(
            p
            for p in (path.with_name(f"{path.name}.other{i}") for i in count(1))
            if not os.path.lexists(p)
        )
        logger.warning(
            f"{path} is no checkpoint, and a checkpoint needs its name: it was renamed to {aside.name}"
        )
        path.rename(aside)

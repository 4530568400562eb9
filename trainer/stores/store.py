"""Where checkpoints are kept: a folder of a file system, or names in a remote store. Torch-free.

Both have the same names. A file appears whole or not at all, and so does a step.

A remote store, such as `s3://bucket/run` through fsspec, holds objects by name: it has no folders, and renames nothing.
A save writes to step-N itself, where the object `saving` says that it is this program's and unfinished, and
`state.json` is written last. A step with `saving` and without `state.json` is never read, and removed later.

Two jobs may save to one name, for instance when a job is started again and the old one is still alive. `saving` holds
the claim of the last one that began, with which the names of its objects begin. Only that one is published.
"""

import errno
import io
import os
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Union

from trainer.config.errors import ConfigError, MissingFile, first_line
from trainer.config.writable import is_address, sync
from trainer.runtime.console import logger
from trainer.stores.file_part import FilePart

if TYPE_CHECKING:
    from upath import UPath

Place = Union[Path, "UPath"]
"""A file or folder of a file system, or a name in a remote store, with the methods of `pathlib.Path`."""

STATE_FILE = "state.json"
_SAVED = re.compile(r"step-([1-9]\d*)")
_UNFINISHED = re.compile(r"step-[1-9]\d*\.tmp")


class Store(ABC):
    """A folder of checkpoints. Its methods raise an OSError for whatever the file system or the store refuses."""

    remedy: str
    """What a user can do about one that cannot be read or written."""
    unreachable: type[ConfigError]
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
            return steps_of(
                path.name for path in self.path.iterdir() if (path / STATE_FILE).is_file()
            )
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
        return FilePart(stream, start, length)

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
        unfinished = self.unfinished(step)
        final = self.step(step)
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
    return error.strerror or first_line(error)


def steps_of(names: Iterable[str]) -> list[int]:
    """Return the steps of which names are, in order."""
    return sorted(int(match[1]) for match in map(_SAVED.fullmatch, names) if match)


def _make_way(path: Path) -> None:
    """Free the name of a checkpoint: remove an older checkpoint of a history that this run left, move anything else."""
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


SAVING_FILE = "saving"
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_OURS = re.compile(r"__([0-9a-f]+_)?\d+_\d+\.distcp|\.metadata(\.tmp)?")


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Enter a context in which every failure is an OSError; the packages of stores have errors of their own."""
    try:
        yield
    except (OSError, ConfigError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, first_line(error)) from error


class RemoteStore(Store):
    """Names in a remote store, through fsspec: an object appears when its last byte is there, or never."""

    remedy = "check address, credentials and network"
    unreachable = MissingFile

    @_as_os_errors()
    def objects(self, below: Place | None = None) -> dict[str, int]:
        """Return name and bytes of every object below a name, without that name; `is_file` would hide failures."""
        above = (below or self.path).path.rstrip("/")
        found = self.path.fs.find(above, detail=True)
        return {name.removeprefix(f"{above}/"): entry["size"] for name, entry in found.items()}

    def steps(self) -> list[int]:
        names = (name.partition("/") for name in self.objects())
        return steps_of(step for step, _, name in names if name == STATE_FILE)

    def sizes(self, step: int) -> dict[str, int]:
        return self.objects(self.step(step))

    @contextmanager
    def open(self, file: "UPath", mode: str) -> Iterator[IO[bytes]]:
        with _as_os_errors():
            stream = file.fs.open(file.path, mode)
        try:
            yield stream
            with _as_os_errors():
                stream.close()
        except BaseException:
            if mode == "wb" and not stream.closed:
                stream.discard()
                stream.closed = True  # or the garbage collector would write what there is
            raise

    @_as_os_errors()
    def read(self, file: "UPath") -> bytes:
        return super().read(file)

    @_as_os_errors()
    def part(self, stream: IO[bytes], start: int, length: int) -> IO[bytes]:
        stream.seek(start)
        # each piece that is read later would be a request
        return io.BytesIO(stream.read(length))

    @_as_os_errors()
    def remove_file(self, file: "UPath", *, missing_ok: bool = False) -> None:
        file.unlink(missing_ok=missing_ok)

    def prepare(self) -> None:
        self.write(self.path / ".writable", b"")
        self.remove_file(self.path / ".writable")
        self.remove_unfinished()
        others = {name.split("/")[0] for name in self.objects()} - {
            f"step-{step}" for step in self.steps()
        }
        if strange := sorted(name for name in others if _STEP.fullmatch(name)):
            raise ConfigError(
                f"checkpoint.folder = {str(self)!r}: {strange[0]} in it is no checkpoint of this program, and one may "
                "need its name; name another folder"
            )

    def unfinished(self, step: int) -> "UPath":
        return self.step(step)

    def begin(self, step: int) -> str:
        claim = f"__{uuid.uuid4().hex}_"
        self.remove(step)
        self.write(self.step(step) / SAVING_FILE, claim.encode())
        return claim

    def publish(self, step: int, state: bytes, claim: str) -> None:
        path = self.step(step)
        if (
            SAVING_FILE not in self.sizes(step)
            or self.read(path / SAVING_FILE).decode() != claim
        ):
            raise OSError(errno.EBUSY, "another job saves there, too")
        self.write(path / STATE_FILE, state)
        self.remove_file(path / SAVING_FILE)

    def remove(self, step: int) -> None:
        """Remove this program's objects under the name of a step: `state.json` first, `saving` last."""
        path = self.step(step)
        names = self.sizes(step)
        if STATE_FILE in names:
            self.write(path / SAVING_FILE, b"")
            self.remove_file(path / STATE_FILE)
        if ours := [f"{path.path}/{name}" for name in names if _OURS.fullmatch(name)]:
            with _as_os_errors():
                path.fs.rm(ours)
        self.remove_file(path / SAVING_FILE, missing_ok=True)

    def remove_unfinished(self) -> None:
        names = self.objects()
        for step, _, name in (name.partition("/") for name in names):
            if not (_STEP.fullmatch(step) and name == SAVING_FILE):
                continue
            if f"{step}/{STATE_FILE}" in names:  # published
                self.remove_file(self.path / step / SAVING_FILE)
            else:
                self.remove(int(step.removeprefix("step-")))


def store_of(key: str, address: str) -> Store:
    """Return the folder that a key names by a path or by an address.

    Raises:
        MissingFile: a package for such addresses is not installed.
        ConfigError: there are no such addresses.
    """
    if not is_address(address):
        return LocalStore(Path(address))
    kind, _, name = address.partition("://")
    if kind == "memory":
        raise ConfigError(
            f"{key} = {address!r} ends with the process; name a folder, or an address such as s3://bucket/run"
        )
    if not name.strip("/") or (name.startswith("/") and kind not in ("file", "local")):
        raise ConfigError(
            f"{key} = {address!r} names no bucket; name one, such as {kind}://bucket/run"
        )
    try:
        from upath import UPath

        # Another process may have written since the last look; of a file, ranks read only the bytes that they hold.
        place = UPath(address.rstrip("/"), use_listings_cache=False, default_cache_type="none")
        _ = place.fs  # imports the package of the store
        return RemoteStore(place)
    except ImportError as error:
        raise MissingFile(
            f"{key} = {address!r} cannot be opened ({error}); pip install universal_pathlib and the package of "
            "its store: s3fs for s3://, gcsfs for gs://, adlfs for abfs://"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{key} = {address!r} is no address ({error}); name one such as s3://bucket/run"
        ) from None


def named_step(key: str, address: str) -> tuple[Store, int | None]:
    """Return the folder around what a key names, and the step if the name is that of a checkpoint, `step-N`."""
    named = store_of(key, address)
    path = named.path.absolute()
    match = _STEP.fullmatch(path.name)
    return type(named)(path.parent), int(match[1]) if match else None


def saved_step(key: str, address: str) -> int | None:
    """Return the step of the checkpoint of this program that a key names; None: it is something else.

    Raises:
        ConfigError: as `store_of`, or it is in a store that does not answer from here.
    """
    store, step = named_step(key, address)
    try:
        return step if step is not None and STATE_FILE in store.sizes(step) else None
    except OSError as error:
        raise MissingFile(
            f"{store.step(step)} cannot be read ({reason_of(error)}); {store.remedy}"
        ) from None

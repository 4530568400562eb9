"""Checkpoints in a remote store, such as `s3://bucket/run`, through fsspec. Torch-free.

A store holds objects by name: it has no folders, and renames nothing. A save writes to step-N itself, where the object
`saving` says that it is this program's and unfinished, and `state.json` is written last. A step with `saving` and
without `state.json` is never read, and removed later.

Two jobs may save to one name, for instance when a job is started again and the old one is still alive. `saving` holds
the claim of the last one that began, with which the names of its objects begin. Only that one is published.
"""

import errno
import io
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.writable import is_address
from trainer.stores.store import STATE_FILE, LocalStore, Place, Store, reason_of, steps_of

if TYPE_CHECKING:
    from upath import UPath

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
        raise OSError(errno.EIO, str(error).strip().split("\n")[0]) from error


class RemoteStore(Store):
    """Names in a remote store, through fsspec: an object appears when its last byte is there, or never."""

    remedy, unreachable = "check address, credentials and network", MissingFile

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
        return io.BytesIO(stream.read(length))  # each piece that is read later would be a request

    @_as_os_errors()
    def remove_file(self, file: "UPath", *, missing_ok: bool = False) -> None:
        file.unlink(missing_ok=missing_ok)

    def prepare(self) -> None:
        self.write(self.path / ".writable", b"")
        self.remove_file(self.path / ".writable")
        self.remove_unfinished()
        others = {name.split("/")[0] for name in self.objects()} - {f"step-{step}" for step in self.steps()}
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
        if SAVING_FILE not in self.sizes(step) or self.read(path / SAVING_FILE).decode() != claim:
            raise OSError(errno.EBUSY, "another job saves there, too")
        self.write(path / STATE_FILE, state)
        self.remove_file(path / SAVING_FILE)

    def remove(self, step: int) -> None:
        """Remove this program's objects under the name of a step: `state.json` first, `saving` last."""
        path, names = self.step(step), self.sizes(step)
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
        raise ConfigError(f"{key} = {address!r} names no bucket; name one, such as {kind}://bucket/run")
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
        raise ConfigError(f"{key} = {address!r} is no address ({error}); name one such as s3://bucket/run") from None


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
        raise MissingFile(f"{store.step(step)} cannot be read ({reason_of(error)}); {store.remedy}") from None

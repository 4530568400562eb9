"""Checkpoints in a remote store. Torch-free.

A remote store, such as `s3://bucket/run` through fsspec, holds objects by name: it has no folders, and renames nothing.
A save writes to step-N itself. The object `saving` there marks the step as unfinished and of this program, and
`state.json` is written last. A step with `saving` and without `state.json` is never read, and removed later.

Two jobs may save to one name, for example if a job is started again while the old job is still alive. `saving` holds
the claim of the job that began last, and the names of its objects begin with this claim. Only this job is published.
"""

import errno
import io
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from trainer.config.errors import ConfigError, MissingFile, first_line
from trainer.stores.store import STATE_FILE, STEP_NAME, Place, Store, steps_of

if TYPE_CHECKING:
    from upath import UPath

SAVING_FILE = "saving"
_OURS = re.compile(r"__([0-9a-f]+_)?\d+_\d+\.distcp|\.metadata(\.tmp)?")


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Enter a context in which every failure except a ConfigError is an OSError.

    The packages of stores have errors of their own.
    """
    try:
        yield
    except (OSError, ConfigError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, first_line(error)) from error


class RemoteStore(Store):
    """Names in a remote store, through fsspec: an object appears when its last byte is written, or never."""

    remedy = "check address, credentials and network"
    unreachable = MissingFile

    @_as_os_errors()
    def objects(self, below: Place | None = None) -> dict[str, int]:
        """Return name and bytes of every object below a name, without that name; `is_file` would hide failures.

        Args:
            below: The name. None: the folder of checkpoints.
        """
        above = (below or self.path).path.rstrip("/")
        entries = self.path.fs.find(above, detail=True)
        return {name.removeprefix(f"{above}/"): x["size"] for name, x in entries.items()}

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        names = (name.partition("/") for name in self.objects())
        return steps_of(step for step, _, name in names if name == STATE_FILE)

    def sizes(self, step: int) -> dict[str, int]:
        """Return name and bytes of every object of a step; {} if the step does not exist.

        Args:
            step: Number of the step.
        """
        return self.objects(self.step(step))

    @contextmanager
    def open(self, file: "UPath", mode: str) -> Iterator[IO[bytes]]:
        """Enter a context with an object. After an error, a written object does not appear.

        Args:
            file: The object.
            mode: "rb" to read, "wb" to write.

        Yields:
            The open object.
        """
        with _as_os_errors():
            stream = file.fs.open(file.path, mode)
        try:
            yield stream
            with _as_os_errors():
                stream.close()
        except BaseException:
            if mode == "wb" and not stream.closed:
                stream.discard()
                # otherwise the garbage collector would write the partial object
                stream.closed = True
            raise

    @_as_os_errors()
    def read(self, file: "UPath") -> bytes:
        """Return the content of an object.

        Args:
            file: The object.
        """
        return super().read(file)

    @_as_os_errors()
    def part(self, stream: IO[bytes], start: int, length: int) -> IO[bytes]:
        """Return a part of an open object, in memory.

        Args:
            stream: The open object.
            start: First byte.
            length: Number of bytes.
        """
        stream.seek(start)
        # otherwise each later read of a piece would be a request
        return io.BytesIO(stream.read(length))

    @_as_os_errors()
    def remove_file(self, file: "UPath", *, missing_ok: bool = False) -> None:
        """Remove an object.

        Args:
            file: The object.
            missing_ok: Whether the object may be missing.
        """
        file.unlink(missing_ok=missing_ok)

    def prepare(self) -> None:
        """Check that the store can be written to, and remove the objects of interrupted saves.

        Raises:
            ConfigError: An object has the name of a checkpoint, but this program did not write it.
            OSError: The store cannot be written to.
        """
        self.write(self.path / ".writable", b"")
        self.remove_file(self.path / ".writable")
        self.remove_unfinished()
        others = {name.split("/")[0] for name in self.objects()} - {
            f"step-{step}" for step in self.steps()
        }
        if strange := sorted(name for name in others if STEP_NAME.fullmatch(name)):
            raise ConfigError(
                f"checkpoint.folder = {str(self)!r}: {strange[0]} in it is no checkpoint of this program, and one may "
                "need its name; name another folder"
            )

    def unfinished(self, step: int) -> "UPath":
        """Return the name of the step itself.

        Args:
            step: Number of the step.
        """
        return self.step(step)

    def begin(self, step: int) -> str:
        """Remove an older step of this name, and write `saving` with a new claim.

        Args:
            step: Number of the step.

        Returns:
            The claim, with which the names of the objects begin.
        """
        claim = f"__{uuid.uuid4().hex}_"
        self.remove(step)
        self.write(self.step(step) / SAVING_FILE, claim.encode())
        return claim

    def publish(self, step: int, state: bytes, claim: str) -> None:
        """Publish a step: check that `saving` still has this claim, write `state.json`, then remove `saving`.

        Args:
            step: Number of the step.
            state: The content of `state.json`.
            claim: See `begin`.

        Raises:
            OSError: An object cannot be written, or another job has claimed the step.
        """
        path = self.step(step)
        if (
            SAVING_FILE not in self.sizes(step)
            or self.read(path / SAVING_FILE).decode() != claim
        ):
            raise OSError(errno.EBUSY, "another job saves there, too")
        self.write(path / STATE_FILE, state)
        self.remove_file(path / SAVING_FILE)

    def remove(self, step: int) -> None:
        """Remove this program's objects under the name of a step: `state.json` first, `saving` last.

        Args:
            step: Number of the step.
        """
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
        """Remove the objects of interrupted saves and removals. Of a published step only a left `saving` is removed."""
        names = self.objects()
        for step, _, name in (name.partition("/") for name in names):
            if not (STEP_NAME.fullmatch(step) and name == SAVING_FILE):
                continue
            if f"{step}/{STATE_FILE}" in names:  # published
                self.remove_file(self.path / step / SAVING_FILE)
            else:
                self.remove(int(step.removeprefix("step-")))

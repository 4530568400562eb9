"""A lock on the dump folder, which belongs to one job at a time. The lock ends with the process that holds it.

The kernel holds the lock (`flock`) on `job.lock` in the folder, so a killed job leaves no stale lock. It holds between
machines where the file system shares locks: NFS from version 4 on, Lustre mounted with `flock`, GPFS, CephFS. On a file
system without locks the job warns and goes on.
"""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from trainer.config.errors import ConfigError
from trainer.config.writable import nearest_existing, writable_folder
from trainer.runtime.full_disk import full_disk

LOCK_FILE = "job.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# The ranks of a job that was killed just now are still ending.
_PATIENCE_SECONDS = 5.0


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Create the folder if it is missing; inside, turn errors of writing to it into errors of `job.dump_folder`.

    Raises:
        ConfigError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise _refused(folder, error) from None


def check_creatable(folder: Path) -> None:
    """Check that the folder can be created and written to, and leave no trace.

    Raises:
        ConfigError: it cannot.
    """
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".lct-", dir=nearest_existing(folder)))
    except OSError as error:
        raise _refused(folder, error) from None


def _refused(folder: Path, error: OSError) -> ConfigError:
    given = f"job.dump_folder = {str(folder)!r} cannot be written"
    if full := full_disk(error, nearest_existing(folder)):
        return ConfigError(f"{given}: {full}; make room there, or name another folder, and run the same command again")
    where = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return ConfigError(f"{given} ({where}); name a folder that can{writable_folder(folder)}")


@contextmanager
def folder_held(
    folder: Path, warn: Callable[[str], object], *, patience_seconds: float = _PATIENCE_SECONDS
) -> Iterator[None]:
    """Create the folder and hold its lock for this process.

    warn: called with one line if the file system has no locks; patience_seconds: time to wait for another job to end.

    Raises:
        ConfigError: another job holds the lock, or the folder cannot be written to.
    """
    with writing_to(folder):
        file = (folder / LOCK_FILE).open("ab+", buffering=0)  # a buffer would be written again when the file is closed
    with file:
        with writing_to(folder):
            locked = _wait_for_lock(file, patience_seconds)
            if locked is False:
                raise _taken(folder, file)
            if locked is None:
                warn(f"the file system of {folder} has no locks: let no other job use this folder as job.dump_folder")
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "start": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
            file.truncate(0)
            file.write(f"{json.dumps(holder)}\n".encode())
        yield


def holder_of(folder: Path, *, patience_seconds: float = _PATIENCE_SECONDS) -> ConfigError | None:
    """Return the error that names the job which holds the folder now; None if it is free or missing."""
    try:
        with (folder / LOCK_FILE).open("rb+", buffering=0) as file:
            return None if _wait_for_lock(file, patience_seconds) is not False else _taken(folder, file)
    except OSError:  # the job will report it
        return None


def _wait_for_lock(file: IO[bytes], patience_seconds: float) -> bool | None:
    """Wait for the lock, and return whether this process has it; None: the file system has no locks."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        time.sleep(0.1)


def _taken(folder: Path, file: IO[bytes]) -> ConfigError:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        who = f"process {holder['pid']} on {holder['host']}, started {holder['start']}"
    except (ValueError, KeyError, TypeError):  # the other job is just writing it
        who = "its name is not known"
    return ConfigError(
        f"job.dump_folder = {str(folder)!r} is in use by another job ({who}), and a folder belongs to one job at a "
        "time; wait for that job or stop it, or name another folder"
    )

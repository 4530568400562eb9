"""The folder of a run belongs to one job at a time: a lock that ends with the process that holds it.

The lock is the kernel's (`flock`) on `job.lock` in the folder, so that nothing stale is left by a killed job. On a file
system of several machines it holds between machines where the file system says so: NFS from version 4 on, Lustre
mounted with `flock`, GPFS, CephFS. Where the file system has no locks at all, the job says so and goes on without.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from trainer.config.errors import ConfigError

LOCK_FILE = "job.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# The ranks of a job that was killed just now are still ending.
_PATIENCE_SECONDS = 5.0


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Make the folder where it is missing, and write to it inside.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"job.dump_folder = {str(folder)!r} cannot be written ({error.strerror}: {error.filename}); "
            f"name a folder that can, such as './outputs'"
        ) from None


@contextmanager
def folder_held(
    folder: Path, warn: Callable[[str], object], *, patience_seconds: float = _PATIENCE_SECONDS
) -> Iterator[None]:
    """Make the folder and hold it for this process.

    warn: told in one line that the file system has no locks. patience_seconds: how long to wait for another job to end.

    Raises:
        ConfigError: another job holds it, or it cannot be written to.
    """
    with writing_to(folder):
        file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    with file:
        with writing_to(folder):
            _lock(file, folder, warn, patience_seconds)
        yield


def holder_of(folder: Path, *, patience_seconds: float = _PATIENCE_SECONDS) -> ConfigError | None:
    """Return the error that names the job which holds the folder now; None if it is free, or not there yet."""
    try:
        with (folder / LOCK_FILE).open("r+", encoding="utf-8") as file:
            return None if _wait_for_lock(file, patience_seconds) is not False else _taken(folder, file)
    except OSError:  # the job itself will say it
        return None


def _lock(file: IO[str], folder: Path, warn: Callable[[str], object], patience_seconds: float) -> None:
    """Wait for the lock, and write who has it."""
    locked = _wait_for_lock(file, patience_seconds)
    if locked is False:
        raise _taken(folder, file)
    if locked is None:
        warn(f"the file system of {folder} has no locks: let no other job use this folder as job.dump_folder")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "start": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
    file.truncate(0)
    file.write(json.dumps(holder) + "\n")
    file.flush()


def _wait_for_lock(file: IO[str], patience_seconds: float) -> bool | None:
    deadline = time.monotonic() + patience_seconds
    while (locked := _try_lock(file)) is False and time.monotonic() < deadline:
        time.sleep(0.1)
    return locked


def _try_lock(file: IO[str]) -> bool | None:
    """Whether the lock is ours now; None: there are no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _taken(folder: Path, file: IO[str]) -> ConfigError:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        who = f"process {holder['pid']} on {holder['host']}, started {holder['start']}"
    except (ValueError, KeyError, TypeError):  # just being written
        who = "it has not said which"
    return ConfigError(
        f"job.dump_folder = {str(folder)!r} is in use by another job ({who}), and a folder belongs to one job at a "
        "time; wait for that job or stop it, or name another folder"
    )

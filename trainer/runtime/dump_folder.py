"""Locks on the folders of a job. A folder belongs to one job at a time. A lock ends with the process that holds it.

The kernel holds the lock (`flock`) on `job.lock` in the folder, so a killed job leaves no stale lock; see "One job a
folder" in docs/architecture.md.
"""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from trainer.config.errors import ConfigError
from trainer.config.loader import RUN_FILE, to_toml
from trainer.config.schema import JobConfig
from trainer.config.writable import full_disk, is_address, nearest_existing, writable_folder
from trainer.runtime.console import logger

LOCK_FILE = "job.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# The ranks of a job that was just killed may still be ending.
_PATIENCE_SECONDS = 5.0

TENSORBOARD = "tb"
"""Folder of the curves for TensorBoard."""
FLIGHT_RECORDS = "comm_traces"
"""Folder of the records that ranks keep of their collectives, written after a hang."""
ESTIMATE = "estimate.json"
"""File of the prediction with which a run on GPUs compares its memory."""


def folders_of(config: JobConfig) -> dict[str, Path]:
    """Return the folders that a job writes to and locks, by the keys that name them; a remote store is left out.

    Args:
        config: The configuration.
    """
    folder = Path(config.job.dump_folder)
    folders = {"job.dump_folder": folder}
    settings = config.checkpoint
    if settings.enable and not settings.load_only and not is_address(settings.folder):
        checkpoints = folder / settings.folder
        if checkpoints.resolve() != folder.resolve():
            folders["checkpoint.folder"] = checkpoints
    return folders


def configuration_text(config: JobConfig) -> bytes | None:
    """Return the configuration as TOML. None on a machine without the package that writes it.

    Args:
        config: The configuration.
    """
    try:
        return to_toml(config).encode()
    except ModuleNotFoundError:
        return None


def save_configuration(config: JobConfig) -> None:
    """Write `config.toml`, which commands on the finished run read. Without the package tomli-w, only log a warning.

    Args:
        config: The configuration.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    file = Path(config.job.dump_folder, RUN_FILE)
    text = configuration_text(config)
    if text is None:
        logger.warning(
            f"{file} is not written, so `lct generate` cannot read this run: install tomli-w"
        )
        return
    with writing_to(file.parent):
        file.write_bytes(text)


@contextmanager
def writing_to(folder: Path, key: str = "job.dump_folder") -> Iterator[None]:
    """Create the folder if it is missing. Errors of writing, also inside, become ConfigErrors that name its key.

    Args:
        folder: The folder.
        key: The key that names it.

    Yields:
        None.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise _refused(folder, key, error) from None


def remove_estimate(config: JobConfig) -> None:
    """Remove the prediction of an earlier run: its settings may differ, and time-outs follow from it.

    Args:
        config: The configuration.
    """
    with suppress(OSError):  # a folder that cannot be written to is refused later
        Path(config.job.dump_folder, ESTIMATE).unlink(missing_ok=True)


def check_creatable(folder: Path, key: str) -> None:
    """Check that the folder of a key can be created and written to, and leave no trace.

    Args:
        folder: The folder.
        key: The key that names it.

    Raises:
        ConfigError: The folder cannot be created or written to.
    """
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".lct-", dir=nearest_existing(folder)))
    except OSError as error:
        raise _refused(folder, key, error) from None


def _refused(folder: Path, key: str, error: OSError) -> ConfigError:
    refusal = f"{key} = {str(folder)!r} cannot be written"
    if full := full_disk(error, nearest_existing(folder)):
        return ConfigError(
            f"{refusal}: {full}; make room there, or name another folder, and run the same command again"
        )
    where = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return ConfigError(f"{refusal} ({where}); name a folder that can{writable_folder(folder)}")


@contextmanager
def folder_held(
    folder: Path, *, key: str = "job.dump_folder", patience_seconds: float = _PATIENCE_SECONDS
) -> Iterator[None]:
    """Create the folder and hold its lock for this process. If the file system has no locks, the log has a warning.

    Args:
        folder: The folder.
        key: The key that names it, for messages.
        patience_seconds: Time to wait for another job to end.

    Yields:
        None.

    Raises:
        ConfigError: Another job holds the lock, or the folder cannot be written to.
    """
    with writing_to(folder, key):
        # a buffer would be written again when the file is closed
        file = (folder / LOCK_FILE).open("ab+", buffering=0)
    with file:
        with writing_to(folder, key):
            locked = wait_for_lock(file, patience_seconds)
            if locked is False:
                raise _taken(folder, key, file)
            if locked is None:
                logger.warning(
                    f"the file system of {folder} has no locks: let no other job use this folder as {key}"
                )
            holder = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "start": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            }
            file.truncate(0)
            file.write(f"{json.dumps(holder)}\n".encode())
        yield


def holder_of(
    folders: Mapping[str, Path], *, patience_seconds: float = _PATIENCE_SECONDS
) -> ConfigError | None:
    """Return the error that names the job which holds one of the folders now. None if they are free or missing.

    Args:
        folders: Key -> the folder that it names, see `folders_of`.
        patience_seconds: Time to wait for another job to end, for each folder.
    """
    for key, folder in folders.items():
        try:
            with (folder / LOCK_FILE).open("rb+", buffering=0) as file:
                if wait_for_lock(file, patience_seconds) is False:
                    return _taken(folder, key, file)
        except OSError:  # the job will report it
            continue
    return None


def wait_for_lock(file: IO[bytes], patience_seconds: float) -> bool | None:
    """Take the lock, and return whether it was free within the time. None if the file system has no locks.

    The process holds the lock until the file is closed.

    Args:
        file: The open file of the lock.
        patience_seconds: Time to wait.

    Returns:
        True if this process has the lock, False if another process holds it, None without locks.
    """
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


def _taken(folder: Path, key: str, file: IO[bytes]) -> ConfigError:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        who = f"process {holder['pid']} on {holder['host']}, started {holder['start']}"
    except (ValueError, KeyError, TypeError):  # the other job is just writing it
        who = "its name is not known"
    return ConfigError(
        f"{key} = {str(folder)!r} is in use by another job ({who}). A folder belongs to one job at a "
        "time; wait for that job or stop it, or name another folder"
    )

"""Writable folders for messages that refuse a folder; the reasons of a full disk; addresses of remote stores."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "a file has reached the largest size that this user may write (ulimit -f)",
}


_OF_FILES = (errno.EIO, errno.ESTALE, errno.EROFS, errno.EMFILE, errno.ENFILE)
"""Other errors of files, which may lack a file's name."""


def is_writable(folder: Path) -> bool:
    """Return whether a folder can be created and written: its nearest existing parent is a writable folder.

    Args:
        folder: The folder.
    """
    existing = nearest_existing(folder)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists. A broken link exists.

    Args:
        path: The path.
    """
    path = path.absolute()
    return next(part for part in (path, *path.parents) if os.path.lexists(part))


def is_address(folder: str) -> bool:
    """Return whether a text is the address of a remote store, such as `s3://bucket/run`, and no path.

    Args:
        folder: The text.
    """
    return "://" in folder


def writable_folder(refused: Path) -> str:
    """Return `, such as 'FOLDER'` for a writable folder elsewhere; empty if there is none.

    Args:
        refused: The refused folder.
    """
    for parent in (Path(), Path.home(), Path(tempfile.gettempdir())):
        folder = parent / "outputs"
        if is_writable(folder) and not folder.absolute().is_relative_to(refused.absolute()):
            return f", such as {str(folder) if folder.is_absolute() else f'./{folder}'!r}"
    return ""


def sync(path: Path) -> None:
    """Write a file or folder through to the disk.

    Args:
        path: The file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def os_error_of(error: BaseException) -> OSError | None:
    """Return the operating system's error behind an error, None if there is none. PyTorch's errors hide it.

    Args:
        error: The error, which may have been raised from or after the other.
    """
    seen = set()
    link = error
    while link is not None and id(link) not in seen:
        if isinstance(link, OSError) and link.errno:
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def full_disk(error: BaseException, folder: Path, needed: int = 0) -> str:
    """Return why nothing more can be written, such as `the disk is full (2 MiB are free)`; empty for another error.

    Args:
        error: The error of a write.
        folder: The folder.
        needed: Bytes to be written, which the answer then names, too; 0 if unknown.
    """
    cause = os_error_of(error)
    if cause is None or cause.errno not in _REASONS:
        return ""
    numbers = [f"about {_size(needed)} are needed"] if needed else []
    if cause.errno == errno.ENOSPC:
        numbers.insert(0, f"{_size(shutil.disk_usage(folder).free)} are free")
    return _REASONS[cause.errno] + (f" ({', '.join(numbers)})" if numbers else "")


def is_of_file(error: OSError) -> bool:
    """Return whether an error is about a file or a full disk, and not, for example, about a connection.

    Args:
        error: The error.
    """
    return error.filename is not None or error.errno in {*_REASONS, *_OF_FILES}


def _size(number: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1024:.0f} KiB"

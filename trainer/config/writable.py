"""Find a folder that a user can write to, for messages that refuse another one; addresses; files on the disk."""

import os
import tempfile
from pathlib import Path


def is_writable(folder: Path) -> bool:
    """Return whether the folder can be created and written to: its nearest existing parent is a writable folder."""
    existing = nearest_existing(folder)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists; a broken link exists."""
    path = path.absolute()
    return next(part for part in (path, *path.parents) if os.path.lexists(part))


def is_address(folder: str) -> bool:
    """Return whether this is the address of a folder in a remote store, such as `s3://bucket/run`, and no path."""
    return "://" in folder


def writable_folder(refused: Path) -> str:
    """Return `, such as 'FOLDER'`, a folder that can be written to and lies elsewhere than `refused`; empty if none."""
    home, temporary = Path.home() / "outputs", Path(tempfile.gettempdir()) / "outputs"
    for folder in (Path("outputs"), home, temporary):
        if is_writable(folder) and refused.absolute() not in (folder.absolute(), *folder.absolute().parents):
            return f", such as {str(folder) if folder.is_absolute() else f'./{folder}'!r}"
    return ""


def sync(path: Path) -> None:
    """Have a file or folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

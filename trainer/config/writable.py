"""Find a folder that a user can write to, for messages that refuse another one; refuse what is no folder."""

import os
import tempfile
from pathlib import Path

from trainer.config.errors import ConfigError


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


def check_local(name: str, folder: str) -> None:
    """Check that the value of a key is no address: only checkpoints are read and written in remote stores.

    Raises:
        ConfigError: it is one.
    """
    if is_address(folder):
        raise ConfigError(
            f"{name} = {folder!r} is an address, and only checkpoints may be in a remote store (checkpoint.folder, "
            "and a step-N of it as checkpoint.initial_load_path); name a folder"
        )


def writable_folder(refused: Path) -> str:
    """Return `, such as 'FOLDER'`, a folder that can be written to and lies elsewhere than `refused`; empty if none."""
    home, temporary = Path.home() / "outputs", Path(tempfile.gettempdir()) / "outputs"
    for folder in (Path("outputs"), home, temporary):
        if is_writable(folder) and refused.absolute() not in (folder.absolute(), *folder.absolute().parents):
            return f", such as {str(folder) if folder.is_absolute() else f'./{folder}'!r}"
    return ""

"""The origin of measured numbers: command, commit of the code, versions, device. Files of numbers begin with it."""

import platform
import shlex
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


@lru_cache(maxsize=1)
def commit() -> str:
    """Return the commit of the running code, with a + if files have changed. Later calls return the first answer."""
    described = subprocess.run(
        ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def versions(device: str) -> dict[str, str]:
    """Return the device, and the versions of torch and Python.

    Args:
        device: The device.
    """
    return {"device": device, "torch": version("torch"), "python": platform.python_version()}


def made_with(script: str, arguments: Sequence[str], *, device: str) -> dict[str, str]:
    """Return the head of a file of numbers.

    Args:
        script: Path of the script in the repository.
        arguments: The words of its command line.
        device: The device.
    """
    command = shlex.join(["python", script, *arguments])
    return {"command": command, "commit": commit()} | versions(device)

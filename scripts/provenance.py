"""Where a number comes from: the command, the commit of the code, versions and device. Every file of numbers has it."""

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
    """Return the commit of the code that runs, with a + where it was changed since; as of the first call."""
    described = subprocess.run(
        ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def versions(device: str) -> dict[str, str]:
    """Return on what something runs here."""
    return {"device": device, "torch": version("torch"), "python": platform.python_version()}


def made_with(script: str, arguments: Sequence[str], *, device: str) -> dict[str, str]:
    """Return what the head of a file of numbers says. script: its path in the repository."""
    command = shlex.join(["python", script, *arguments])
    return {"command": command, "commit": commit()} | versions(device)

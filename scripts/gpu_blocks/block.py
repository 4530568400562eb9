"""The run of a block of `gpu_check.py`: device, time left, notes and problems."""

import json
import math
import time
from pathlib import Path
from threading import Lock
from typing import Any

KEPT = "kept"
"""Name of the folder, next to the notes, of files that are kept."""
_RESERVE = 0.15  # share of the limit for the work after the last check of the time


def own_host(rank: int, gpus: int) -> dict[str, str]:
    """Return the variables with which a rank shares a GPU: a host for each round of ranks over the GPUs.

    Args:
        rank: The rank of the process among all ranks of this machine.
        gpus: The number of GPUs of this machine; 0 on a CPU.
    """
    if not gpus:
        return {"LOCAL_RANK": str(rank)}
    network = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return {"LOCAL_RANK": str(rank % gpus), "NCCL_HOSTID": f"host-{rank // gpus}", **network}


def largest(*errors: float) -> float:
    """Return the largest of some errors, 0.0 for none. If an error is NaN, return NaN, which `max` can pass over.

    Args:
        *errors: The errors.
    """
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)


class Skipped(Exception):
    """The block cannot run here; the message says why."""


class Check:
    """The run of a block. Every note is written at once, so that a killed block keeps its notes.

    Args:
        device: "cuda" or "cpu".
        path: The file of the notes.
        limit: Seconds from now until the block is killed.
    """

    def __init__(self, device: str, path: Path, limit: float) -> None:
        self.device = device
        self.facts: dict[str, Any] = {}
        self.problems: list[str] = []
        self._headline = ""
        self._verdict = "failed"
        self._path = path
        self._lock = Lock()  # several threads may make notes
        self._end = time.monotonic() + limit * (1 - _RESERVE)

    @property
    def is_dry(self) -> bool:
        """Whether this is a dry run: on a CPU, with small shapes."""
        return self.device == "cpu"

    def left(self) -> float:
        """Return the seconds until the block should end."""
        return max(self._end - time.monotonic(), 0)

    def file(self, name: str) -> Path:
        """Return the path of a file that is kept: after the block, it is moved to the folder of the results.

        Args:
            name: The name of the file.
        """
        folder = self._path.parent / KEPT
        folder.mkdir(exist_ok=True)
        return folder / name

    def note(self, **facts: Any) -> None:
        """Keep facts for the results.

        Args:
            **facts: Numbers, text, lists or dictionaries.
        """
        with self._lock:
            self.facts |= facts
            self._write()

    def headline(self, text: str) -> None:
        """Set the line of the block on the screen.

        Args:
            text: The line.
        """
        self._headline = text
        self._write()

    def expect(self, holds: bool, problem: str) -> None:
        """Note a problem, which fails the block, if a condition does not hold.

        Args:
            holds: The condition.
            problem: The problem.
        """
        if not holds:
            with self._lock:
                self.problems.append(problem)
                self._write()

    def end(self, skipped: str | None = None) -> None:
        """Set the verdict.

        Args:
            skipped: Why the block could not run; None if it ran.
        """
        if skipped is not None:
            self._headline = skipped
        self._verdict = "failed" if self.problems else "passed" if skipped is None else "skipped"
        self._write()

    def _write(self) -> None:
        notes = {"verdict": self._verdict, "headline": self._headline, "problems": self.problems, "facts": self.facts}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(_plain(notes)))
        new.replace(self._path)


def _plain(x: Any) -> Any:
    """Return a value that JSON can hold: other objects and numbers that are not finite become text."""
    if isinstance(x, dict):
        return {str(key): _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    return x if isinstance(x, str | int | None) else str(x)

"""How ranks end, told to each other through the store: who failed, who lost its peers, and so who says nothing.

The store lives in the launcher, so it outlasts a rank. What is told is short: one line per rank, read once.
"""

import re
import threading
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trainer.config.schema import Comm
from trainer.runtime.process_group import Process

_PACKAGE = Path(__file__).resolve().parent.parent
_LOST = "lost its peers"
_CAUSE_LENGTH = 200
_TIMED_OUT = re.compile(r"(?:Timed out waiting|timeout after) (\d+)ms")


class Reports:
    """The store of the job, which the process group uses too, and what ranks report there of their end.

    patience_seconds: how long a rank that lost its peers waits for their reports.

    Raises:
        dist.DistError: the store cannot be reached within `comm.init_timeout_seconds`.
    """

    def __init__(self, process: Process, comm: Comm, *, patience_seconds: float = 5.0) -> None:
        self.process, self.comm, self.patience_seconds = process, comm, patience_seconds
        self.store: dist.Store = dist.HashStore()  # alone: no port is taken
        if process.world_size > 1:
            timeout = timedelta(seconds=comm.init_timeout_seconds)
            self.store, *_ = next(dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout))
        self._reports = dist.PrefixStore("reports", self.store)

    def failed(self, error: Exception) -> None:
        """Tell that this rank has failed by itself."""
        cause = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        self._tell_and_hear(f"failed ({cause[:_CAUSE_LENGTH]})", patience_seconds=0)

    def lost(self, error: Exception) -> str | None:
        """Tell that this rank lost its peers by `error`, and hear them; one line for the user.

        None: a rank that lost its peers too, and has a lower number, says it.
        """
        told = self._tell_and_hear(_LOST, self.patience_seconds)
        mine, place = self.process.rank, _place(error)
        if not told:
            reason = str(error).partition("\n")[0]
            return f"rank {mine} lost its peers {place}, and the store of the job too: {reason}"
        if mine != min(rank for rank, how in told.items() if how == _LOST):
            return None
        causes = [f"rank {rank} {how}" for rank, how in told.items() if how != _LOST]
        silent = [rank for rank in range(self.process.world_size) if rank not in told]
        if silent and not causes:
            limit = self._limit(error)
            how = f"did not answer within {limit}" if limit else "went away without a word"
            causes = [f"{_ranks(silent)} {how}"]
        return f"{'; '.join(causes) or 'a connection was lost'}; rank {mine} waited {place}"

    def _limit(self, error: Exception) -> str | None:
        """The time-out that has passed; None: it was none."""
        found = _TIMED_OUT.search(str(error))
        if found is None:
            return None
        seconds = int(found[1]) / 1000
        # Of several with the same value, the likeliest: most of a run is training.
        order = ("checkpoint", "init", "train")
        names = [name for name in order if getattr(self.comm, f"{name}_timeout_seconds") == seconds]
        return f"{seconds:,g} s" + (f" (comm.{names[-1]}_timeout_seconds)" if names else "")

    def _tell_and_hear(self, how: str, patience_seconds: float) -> dict[int, str]:
        """Rank -> how it ended, of the ranks that have told it in time; empty if the store does not answer."""
        told: dict[int, str] = {}

        def talk() -> None:
            try:
                self._reports.append("lines", f"{self.process.rank} {how}\n")
                count = self._reports.add("count", 1)
                deadline = time.monotonic() + patience_seconds
                while count < self.process.world_size and not self._reports.add("over", 0):
                    if time.monotonic() >= deadline:
                        self._reports.add("over", 1)  # one rank's patience is all ranks': they end soon after
                    time.sleep(0.1)
                    count = self._reports.add("count", 0)
                lines = self._reports.get("lines").decode().splitlines()
            except RuntimeError:  # the launcher that had it has ended
                return
            told.update((int(rank), text) for rank, _, text in (line.partition(" ") for line in lines))

        # The store has no time-out of its own for a machine that does not answer any more.
        talker = threading.Thread(target=talk, daemon=True)
        talker.start()
        talker.join(patience_seconds + 2)
        return dict(sorted(told.items()))


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def _place(error: Exception) -> str:
    """Where in this package it happened: functions from the outside in, then file, line and text of the last."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(_PACKAGE) and Path(frame.filename).name != "process_group.py"
    ]
    if not frames:
        return "at the start of the process group"
    file = Path(frames[-1].filename).relative_to(_PACKAGE.parent)
    names = [frame.name for frame in frames if not frame.name.startswith("<")]  # such as <listcomp>
    return f"in {' > '.join(names)} ({file}:{frames[-1].lineno}: {frames[-1].line})"

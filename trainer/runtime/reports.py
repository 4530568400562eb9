"""Reports of how ranks end, exchanged through the store of the job, so that one rank names the cause.

The store lives in the launcher, so it outlasts a rank. Each rank writes one line, and reads all lines once.
"""

import re
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from trainer.config.schema import Comm
from trainer.runtime.process_group import Process
from trainer.runtime.time_limits import STEPS_OF_A_LIMIT

_PACKAGE = Path(__file__).resolve().parent.parent
_LOST = "lost its peers"
_CAUSE_LENGTH = 200
_PATIENCE_SECONDS = 5.0  # of a rank that lost its peers, for their reports
_AROUND = ("rank.py", "process_group.py")  # files that every rank runs around its work
_TIMED_OUT = re.compile(r"(?:Timed out waiting|timeout after) (\d+)ms")


class Reports:
    """The store of the job, which the process group uses too, and the reports that ranks write there at their end.

    Args:
        process: This process.
        comm: Table `[comm]`; DistError if the store cannot be reached within `init_timeout_seconds`.
    """

    def __init__(self, process: Process, comm: Comm) -> None:
        self.process = process
        self.comm = comm
        self.store: dist.Store = dist.HashStore()  # alone: no port is taken
        if process.world_size > 1:
            timeout = timedelta(seconds=comm.init_timeout_seconds)
            self.store, *_ = next(
                dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout)
            )
        self._reports = dist.PrefixStore("reports", self.store)

    def failed(self, error: BaseException) -> None:
        """Report that this rank has failed by itself.

        Args:
            error: The error.
        """
        cause = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        self._exchange(f"failed ({cause[:_CAUSE_LENGTH]})", patience_seconds=0)

    def lost(self, error: Exception) -> str | None:
        """Report that this rank lost its peers, wait some seconds for their reports, and return one line for the user.

        Args:
            error: The error of the collective.

        Returns:
            The line. None if a lower rank also lost its peers: that rank prints the line.
        """
        reports = self._exchange(_LOST, _PATIENCE_SECONDS)
        own_rank = self.process.rank
        place = _place(error)
        if not reports:
            reason = str(error).partition("\n")[0]
            return f"rank {own_rank} lost its peers {place}, and the store of the job too: {reason}"
        if own_rank != min(rank for rank, how in reports.items() if how == _LOST):
            return None
        causes = [f"rank {rank} {how}" for rank, how in reports.items() if how != _LOST]
        silent = [rank for rank in range(self.process.world_size) if rank not in reports]
        if silent and not causes:
            limit = self._limit(error)
            how = f"did not answer within {limit}" if limit else "went away without a word"
            causes = [f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} {how}"]
        return f"{'; '.join(causes) or 'a connection was lost'}; rank {own_rank} waited {place}"

    def _limit(self, error: Exception) -> str | None:
        """Return the time-out that has passed and its setting, as text; None if the error is no time-out."""
        match = _TIMED_OUT.search(str(error))
        if match is None:
            return None
        seconds = int(match[1]) / 1000
        # If several settings have this value, the likeliest is named: most of a run is training.
        order = ("checkpoint", "init", "train")
        names = [
            name for name in order if getattr(self.comm, f"{name}_timeout_seconds") == seconds
        ]
        origin = (
            f"comm.{names[-1]}_timeout_seconds" if names else f"{STEPS_OF_A_LIMIT} times a step"
        )
        return f"{seconds:,g} s ({origin})"

    def _exchange(self, how: str, patience_seconds: float) -> dict[int, str]:
        """Report how this rank ended, and wait for the reports of the others.

        Returns rank -> how it ended, of the ranks that reported in time, with this rank; empty if the store does not
        answer.
        """
        reports = {}
        store = self._reports

        def talk() -> None:
            try:
                store.append("lines", f"{self.process.rank} {how}\n")
                count = store.add("count", 1)
                deadline = time.monotonic() + patience_seconds
                while count < self.process.world_size and not store.add("over", 0):
                    if time.monotonic() >= deadline:
                        # the first rank to give up ends the wait of all
                        store.add("over", 1)
                    time.sleep(0.1)
                    count = store.add("count", 0)
                lines = store.get("lines").decode().splitlines()
            except RuntimeError:  # the launcher, and the store with it, has ended
                return
            reports.update(
                (int(rank), text) for rank, _, text in (line.partition(" ") for line in lines)
            )

        # The store has no time-out for a machine that no longer answers.
        talker = threading.Thread(target=talk, daemon=True)
        talker.start()
        talker.join(patience_seconds + 2)
        return dict(sorted(reports.items()))


def _place(error: Exception) -> str:
    """Return where in this package the error happened.

    The text has functions from the outside in, then file, line and text of the last function.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(_PACKAGE)
        and Path(frame.filename).name not in _AROUND
    ]
    if not frames:
        return "at the start of the process group"
    file = Path(frames[-1].filename).relative_to(_PACKAGE.parent)
    # such as <listcomp>
    names = [frame.name for frame in frames if not frame.name.startswith("<")]
    return f"in {' > '.join(names)} ({file}:{frames[-1].lineno}: {frames[-1].line})"

"""Start one process per rank of this node: `python -m trainer.runtime.launch --nproc-per-node N [train.py arguments]`.

`torchrun train.py ...` does the same job, but returns 1 and prints a trace of its own when a rank fails. This launcher
returns the failing rank's exit code and names the rank in one line. It passes the signals of `job.stop_signals` on to
the ranks, which finish their step, save, and end in good order; a second signal ends them at once. When a rank has
failed, the others have a few seconds to end. A rank that hangs is asked for its stack and killed. When the launcher
is killed, its ranks end at once (`runtime/launcher_watch.py`). Several nodes wait for each other before their ranks
start (`runtime/job_store.py`).
"""

import argparse
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.config.schema import STOP_SIGNALS
from trainer.runtime.console import report
from trainer.runtime.garbage import imports_uncollected
from trainer.runtime.job_store import (
    NodesMissing,
    StoreError,
    listener_of_one_node,
    meet,
    open_store,
    serve,
)
from trainer.runtime.nodes import Nodes, whole_number
from trainer.runtime.output import outlasting_readers
from trainer.runtime.rank_processes import (
    LAUNCHER_SIGNALS,
    LOST_PEERS,
    RankEnd,
    RankProcesses,
    RankProgram,
    can_fork,
    flight_record,
    signals_held,
)
from trainer.runtime.stop import Stopped, ends_by, handled_by

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_PROGRAM = "trainer.commands.rank"  # what each rank runs
# After a failure the other ranks notice it, exchange reports, and name the cause.
_GRACE_SECONDS = 10.0
# If the first rank to end has lost its peers, it has waited for the others already.
_GRACE_AFTER_LOST_PEERS_SECONDS = 2.0
# For ranks that a signal of a terminal or a scheduler ends with this launcher.
_SIGNALLED_SECONDS = 30.0
# For the launchers of other nodes, whose ranks may end later.
_OTHER_NODES_SECONDS = 300.0


@dataclass(frozen=True)
class Launch:
    """The ranks that this launcher starts.

    Attributes:
        nodes: The nodes of the job.
        ranks: Number of ranks on this node.
        timeout: Seconds to wait for other nodes.
        program: The program of each rank.
        preload: A module to import before ranks are forked. None: ranks are fresh processes.
        end_seconds: Time for all ranks to end after the first one has ended well.
    """

    nodes: Nodes
    ranks: int
    timeout: int
    program: RankProgram
    preload: str | None = None
    end_seconds: float = math.inf

    def variables(self, address: str, port: int) -> dict[int, dict[str, str]]:
        """Return the environment variables of each rank, by its number in the job, with the names of torchrun.

        Args:
            address: Address of the job's store.
            port: Port of the job's store.
        """
        common = {
            "GROUP_RANK": str(self.nodes.rank),
            "GROUP_WORLD_SIZE": str(self.nodes.count),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "WORLD_SIZE": str(self.ranks * self.nodes.count),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.nodes.job,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher serves the store, not rank 0
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }
        first = self.nodes.rank * self.ranks
        return {
            first + local: common | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            for local in range(self.ranks)
        }


def main(argv: list[str] | None = None) -> int:
    """Return the exit code of the job, after running the ranks of this node to their end.

    After a signal the code is 0 if all ranks ended in good order, else 128 + the signal's number.

    Args:
        argv: The command line. None: `sys.argv`.
    """
    parser = argparse.ArgumentParser(
        prog="trainer.runtime.launch",
        description="Start one process per rank of this node; all other arguments go to train.py.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", required=True, help="ranks on this node")
    add("--start-timeout", default="300", help="seconds to wait for other nodes (default: 300)")
    add(
        "--program", default=_PROGRAM, help="module that each rank runs (default: the training)"
    )
    text = "module to import before ranks are forked, where that is possible; without it each rank is a fresh process"
    add("--preload", help=text)
    text = "folder of the files of NCCL's watchdogs; without it, a rank that they end is reported as crashed"
    add("--flight-records", type=Path, help=text)
    text = "signals that are passed on to the ranks, separated by commas (default: all of job.stop_signals)"
    add("--stop-signals", default=",".join(STOP_SIGNALS), help=text)
    text = "seconds after the first rank has ended well in which all others must end (default: no limit)"
    add("--end-timeout", type=float, default=math.inf, help=text)
    options, arguments = parser.parse_known_args(argv)
    try:
        ranks = whole_number(
            "--nproc-per-node", options.nproc_per_node, such_as="--nproc-per-node 2"
        )
        timeout = whole_number(
            "--start-timeout", options.start_timeout, such_as="--start-timeout 300"
        )
        nodes = Nodes.from_environment()
    except ConfigError as error:
        report(f"error: {error}")
        return 2
    launch = Launch(
        nodes,
        ranks,
        timeout,
        RankProgram(options.program, arguments),
        options.preload,
        options.end_timeout,
    )
    stop_signals = [signal.Signals[name] for name in options.stop_signals.split(",") if name]
    return _run(launch, Watchdog(options.flight_records), stop_signals)


def _run(launch: Launch, watchdog: "Watchdog", stop_signals: Sequence[signal.Signals]) -> int:
    """Run the job and return its exit code; report a failure or a stop in one line."""
    processes = RankProcesses()
    with _passing_signals_on(processes, stop_signals) as received:
        try:
            store = _start(launch, processes)
            processes.wait(watchdog.grace_of, launch.end_seconds)
        except (ConfigError, NodesMissing) as error:
            report(f"error: {error}")
            return 2 if isinstance(error, ConfigError) else 1
        except StoreError as error:
            report(
                f"error: a node ended, or was cut off, before the ranks had started ({error})"
            )
            return 1
        except Stopped as stopped:
            processes.end_by(stopped.number, _SIGNALLED_SECONDS)
            report(f"error: stopped by {stopped.number.name}")
            return 128 + stopped.number
        if processes.overdue:
            report(
                f"error: rank {', '.join(map(str, processes.overdue))} still ran "
                f"{launch.end_seconds:g} s (comm.checkpoint_timeout_seconds) after rank "
                f"{processes.ends[0].rank} had ended, and was killed"
            )
            return 1
        if processes.first_failure is not None:
            return _failed(processes.ends, received, watchdog)
        if launch.nodes.count > 1:  # the first node has the store of the others' ranks
            with suppress(StoreError):
                meet(store, launch.nodes, "ends", _OTHER_NODES_SECONDS)
        return 0


def _start(launch: Launch, processes: RankProcesses) -> "TCPStore":
    """Start the ranks, and return the store of the job, which lives as long as the ranks.

    With several nodes, first wait for the launchers of all nodes.
    """
    nodes = launch.nodes
    if nodes.count > 1:
        with signals_held():
            import_module("torch.distributed")
        store = open_store(nodes, launch.ranks, launch.timeout)
        meet(store, nodes, "starts", launch.timeout)
        processes.start(
            launch.program, launch.variables(nodes.address, nodes.port), forked=False
        )
        return store
    _keep_gloo_on_this_machine()
    listener = listener_of_one_node()
    # Before the store is served, which takes threads. Ranks that come sooner wait in the queue of the socket.
    forked = launch.preload is not None and can_fork()
    if forked:
        with imports_uncollected(), signals_held():
            import_module(launch.preload)
            import_module(launch.program.module)
        forked = can_fork()
    address, port = listener.getsockname()
    processes.start(launch.program, launch.variables(address, port), forked=forked)
    with signals_held():
        return serve(listener, address)


def _keep_gloo_on_this_machine() -> None:
    """Let gloo listen on the loopback interface alone, unless the user has named one.

    PyTorch sends pickles over gloo, such as the plan of a checkpoint, so no other machine may connect.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    if loopback := next((name for name in ("lo", "lo0") if name in interfaces), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


class Watchdog:
    """NCCL's watchdogs of the ranks. They write a file before they abort a rank that waits too long.

    Args:
        folder: Folder of these files. None: there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        # clocks of file systems are coarse
        self.folder = folder
        self._started = time.time() - 2

    def ended(self, rank: int | None, code: int) -> bool:
        """Return whether a watchdog ended this rank: by SIGABRT, with a flight record that this job has written.

        Without a folder of flight records: False.

        Args:
            rank: The rank. None: any rank; the record of any rank counts.
            code: The exit code of its process.
        """
        if self.folder is None or code != -signal.SIGABRT:
            return False
        paths = self.folder.glob(flight_record("*" if rank is None else rank))
        return any(path.exists() and path.stat().st_mtime >= self._started for path in paths)

    def grace_of(self, first: RankEnd) -> tuple[float, bool]:
        """Return the seconds that the other ranks have after the first failure, and whether to show their stacks.

        Args:
            first: The first end of a rank.
        """
        lost = first.code == LOST_PEERS
        # Watchdogs of other ranks write their files meanwhile; a rank that still runs after that hangs.
        aborted = self.ended(None, first.code)
        return (_GRACE_AFTER_LOST_PEERS_SECONDS if lost else _GRACE_SECONDS), lost or aborted


def _failed(ends: Sequence[RankEnd], received: Sequence[int], watchdog: Watchdog) -> int:
    """Say in one line on stderr why the ranks failed; return the exit code of the launcher.

    The line names the rank that failed, the signal that ended the ranks, or the node with the cause. If the code is 2,
    no line is printed, because the rank has named the wrong setting.
    """
    (rank, code), hung = _cause(
        ends, lambda end: end.code == LOST_PEERS or watchdog.ended(*end)
    )
    ended_by = -code if code < 0 else code - 128
    if ended_by in received:
        report(f"error: stopped by {signal.Signals(ended_by).name} at once")
        return 128 + ended_by
    if hung:
        report(f"error: rank {rank} hung, and was killed when its peers had given it up")
        return 1
    if code == LOST_PEERS and ends[0].code == 0:
        report(
            f"error: rank {ends[0].rank} ended before the others, with exit code 0, and they lost it"
        )
        return 1
    if code == LOST_PEERS:
        report("error: the ranks of this node lost their peers; the cause is on another node")
        return 1
    if watchdog.ended(rank, code):
        report(
            f"error: rank {rank} waited too long for its peers, and NCCL's watchdog ended it; the last collectives of "
            f"the ranks are in {watchdog.folder} (docs/performance.md says how to read them). If all ranks were at "
            "work, raise comm.train_timeout_seconds"
        )
        return 1
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    how += ", mostly for lack of host memory" * (code == -signal.SIGKILL)
    if code != 2:  # the rank has named the wrong setting
        report(f"error: rank {rank} failed first ({how}); the other ranks were stopped")
    return code if code > 0 else 128 - code


def _cause(
    ends: Sequence[RankEnd], lost_peers: Callable[[RankEnd], bool]
) -> tuple[RankEnd, bool]:
    """Return the end that caused the failure, and whether this launcher ended that rank because it hung.

    Args:
        ends: The ends of all ranks of this node, in order.
        lost_peers: Whether a rank ended because of another one.
    """
    first, *later = [end for end in ends if end.code != 0]
    others = [end for end in later if not lost_peers(end)]
    if not others or not lost_peers(first):
        return first, False
    # a rank that SIGTERM could end did not hang
    ended_by_us = {-signal.SIGKILL: 1, -signal.SIGTERM: 2}
    cause = min(others, key=lambda end: ended_by_us.get(end.code, 0))
    return cause, cause.code in ended_by_us


@contextmanager
def _passing_signals_on(
    processes: RankProcesses, stop_signals: Sequence[signal.Signals]
) -> Iterator[list[int]]:
    """Pass SIGTERM, SIGINT and these signals on to the ranks inside; yield the list of the signals that ranks got.

    For SIGUSR1, the ranks get the first other signal of `stop_signals`, or SIGTERM: SIGUSR1 makes a rank show stacks.
    Without ranks a signal ends the launcher by `Stopped`, and so does a signal that is not passed on.
    """
    received = []
    others = (number for number in stop_signals if number != signal.SIGUSR1)
    instead = next(others, signal.SIGTERM)

    def pass_on(number: int, _: FrameType | None) -> None:
        if not processes.running:
            raise Stopped(number)
        sent = instead if number == signal.SIGUSR1 else signal.Signals(number)
        received.append(sent)
        processes.send(sent)

    passed_on = dict.fromkeys((signal.SIGTERM, signal.SIGINT, *stop_signals), pass_on)
    with handled_by(dict.fromkeys(LAUNCHER_SIGNALS, ends_by) | passed_on):
        yield received


if __name__ == "__main__":
    with outlasting_readers(is_log=True):
        sys.exit(main())

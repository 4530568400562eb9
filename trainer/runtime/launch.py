"""Start one process per rank of this node: `python -m trainer.runtime.launch --nproc-per-node N [train.py arguments]`.

`torchrun train.py ...` does the same job, but returns 1 and prints a trace of its own when a rank fails. This launcher
returns the failing rank's exit code and names the rank in one line. It passes SIGTERM and SIGINT on to the ranks, which
finish their step, save, and end in good order; a second signal ends them at once. When a rank has failed, the others
have a few seconds to end. A rank that hangs is asked for its stack and killed. When the launcher is killed, its ranks
end at once (`runtime/launcher_watch.py`). Several nodes wait for each other before their ranks start
(`runtime/job_store.py`).
"""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.config.errors import ConfigError
from trainer.runtime.console import report
from trainer.runtime.job_store import NodesMissing, open_store
from trainer.runtime.nodes import Nodes, whole_number
from trainer.runtime.process_group import LOST_PEERS, flight_record

_PROGRAM = ["-m", "trainer.commands.rank"]  # what each rank runs
# After a failure the other ranks notice it, exchange reports, and name the cause.
_GRACE_SECONDS = 10.0
# If the first rank to end has lost its peers, it has waited for the others already.
_GRACE_AFTER_LOST_PEERS_SECONDS = 2.0
_STACK_SECONDS = 0.5


def main(argv: list[str] | None = None) -> int:
    """Run the ranks of this node to their end, and return the exit code of the job.

    After a signal the code is 0 if all ranks ended in good order, else 128 + the signal's number.
    """
    parser = argparse.ArgumentParser(
        prog="trainer.runtime.launch",
        description="Start one process per rank of this node; what is not listed here goes to train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc-per-node", required=True, help="ranks on this node")
    parser.add_argument("--start-timeout", default="300", help="seconds to wait for other nodes (default: 300)")
    parser.add_argument("--program", help="module that each rank runs (default: the training of train.py)")
    text = "folder of the files of NCCL's watchdogs; without it, a rank that they end is reported as crashed"
    parser.add_argument("--flight-records", type=Path, help=text)
    given, train_arguments = parser.parse_known_args(argv)
    try:
        ranks = whole_number("--nproc-per-node", given.nproc_per_node, such_as="--nproc-per-node 2")
        timeout = whole_number("--start-timeout", given.start_timeout, such_as="--start-timeout 300")
        nodes = Nodes.from_environment(os.environ)
    except ConfigError as error:
        report(f"error: {error}")
        return 2
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each of these loggers has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)  # one line of ours reports the error
    watchdog = Watchdog(given.flight_records)
    program = _PROGRAM if given.program is None else ["-m", given.program]
    with _passing_signals_on() as received, _killing_stragglers(watchdog):
        command = [*program, "--launched-by", str(os.getpid()), *train_arguments]
        return _run(nodes, ranks, timeout, command, received, watchdog)


def _configured(nodes: Nodes, ranks: int, timeout_seconds: int) -> tuple[LaunchConfig, TCPStore]:
    """Wait for the other nodes, and return what the agent of this node needs, and the store of the job."""
    if nodes.count == 1:
        nodes = replace(nodes, address="127.0.0.1")
        _keep_gloo_on_this_machine()
    store, port = open_store(nodes, ranks, timeout_seconds)
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=ranks,
        run_id=nodes.job,
        max_restarts=0,
        monitor_interval=0.1,
        # Not "c10d": its state is a pickle in the store, and whoever reaches the store could have code run here.
        rdzv_backend="static",
        rdzv_endpoint=replace(nodes, port=port).place,
        rdzv_configs={"rank": nodes.rank, "timeout": timeout_seconds},
        signals_to_handle="SIGHUP,SIGQUIT",  # the agent leaves SIGTERM and SIGINT to this process
    )
    return config, store


def _keep_gloo_on_this_machine() -> None:
    """Let gloo listen on the loopback interface alone, unless the user has named one.

    PyTorch sends pickles over gloo, such as the plan of a checkpoint, so no other machine may connect.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    if loopback := next((name for name in ("lo", "lo0") if name in interfaces), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


class Watchdog:
    """NCCL's watchdogs of the ranks, recognised by what they write before they abort a rank that waits too long.

    folder: of these files; None: there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._started = folder, time.time() - 2  # clocks of file systems are coarse

    def ended(self, rank: int | None, code: int) -> bool:
        """Return whether a watchdog ended this rank, or some rank, whose process has this code."""
        if self.folder is None or code != -signal.SIGABRT:
            return False
        paths = self.folder.glob(flight_record("*")) if rank is None else [self.folder / flight_record(rank)]
        return any(path.exists() and path.stat().st_mtime >= self._started for path in paths)


def _run(
    nodes: Nodes,
    ranks: int,
    timeout_seconds: int,
    command: list[str],
    received: list[int],
    watchdog: Watchdog,
) -> int:
    """Run the job and return its exit code; report a failure or stop in one line. `received`: signals passed on."""
    try:
        config, _store = _configured(nodes, ranks, timeout_seconds)  # which lives as long as the job
        elastic_launch(config, sys.executable)("-u", *command)
    except (ConfigError, NodesMissing) as error:
        report(f"error: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    except DistError as error:
        reason = str(error).partition("\n")[0]
        report(f"error: a node ended, or was cut off, before the ranks had started ({reason})")
        return 1
    except ChildFailedError as error:
        return _failed(error, received, watchdog)
    except SignalException as error:
        report(f"error: stopped by {signal.Signals(error.sigval).name}")
        return 128 + error.sigval
    return 0


def _failed(error: ChildFailedError, received: list[int], watchdog: Watchdog) -> int:
    """Name the rank that failed, or the signal that ended the ranks, in one line, and return the exit code."""
    rank, failure, hung = _cause(error, lambda rank, code: code == LOST_PEERS or watchdog.ended(rank, code))
    ended_by = -failure.exitcode if failure.exitcode < 0 else failure.exitcode - 128
    if ended_by in received:
        report(f"error: stopped by {signal.Signals(ended_by).name} at once")
        return 128 + ended_by
    if hung:
        report(f"error: rank {rank} hung, and was killed when its peers had given it up")
        return 1
    if failure.exitcode == LOST_PEERS:
        report("error: the ranks of this node lost their peers; the cause is on another node")
        return 1
    if watchdog.ended(rank, failure.exitcode):
        report(
            f"error: rank {rank} waited too long for its peers, and NCCL's watchdog ended it; the last collectives of "
            f"the ranks are in {watchdog.folder} (docs/performance.md says how to read them). If all ranks were at "
            "work, raise comm.train_timeout_seconds"
        )
        return 1
    how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else failure.signal_name()
    how += ", mostly for lack of host memory" * (failure.exitcode == -signal.SIGKILL)
    if failure.exitcode != 2:  # the rank has named the wrong setting
        report(f"error: rank {rank} failed first ({how}); the other ranks were stopped")
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _cause(error: ChildFailedError, lost_peers: Callable[[int, int], bool]) -> tuple[int, ProcessFailure, bool]:
    """Return the rank that has the cause, how it ended, and whether it hung, so that this launcher ended it.

    lost_peers: (rank, exit code) -> whether that rank ended because of another one.
    """
    rank, first = error.get_first_failure()
    if not lost_peers(rank, first.exitcode):
        return rank, first, False
    others = {rank: failure for rank, failure in error.failures.items() if not lost_peers(rank, failure.exitcode)}
    ended_by_us = {-signal.SIGKILL: 1, -signal.SIGTERM: 2}  # a rank that SIGTERM could end did not hang
    for rank, failure in sorted(others.items(), key=lambda item: ended_by_us.get(item[1].exitcode, 0)):
        return rank, failure, failure.exitcode in ended_by_us
    return rank, first, False


@contextmanager
def _killing_stragglers(watchdog: Watchdog) -> Iterator[None]:
    """When a rank has failed inside, kill the ranks that still run some seconds later.

    The elastic agent would wait for half a minute, and a rank that hangs or is stopped does not answer its SIGTERM.
    Processes that this one has started before, such as an estimate of memory, may fail as they like.
    """
    timers: list[threading.Timer] = []
    others = set(_children())

    def look(_: int, __: FrameType | None) -> None:
        for rank in set(_children()) - others:
            with suppress(ChildProcessError):
                # Left for the agent to collect.
                ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None and ended.si_status != 0 and not timers:
                    give_up_soon(ended)

    def give_up_soon(ended: os.waitid_result) -> None:
        lost = ended.si_code == os.CLD_EXITED and ended.si_status == LOST_PEERS
        # Watchdogs of other ranks write their files meanwhile; who still runs after that hangs.
        aborted = ended.si_code != os.CLD_EXITED and watchdog.ended(None, -ended.si_status)
        seconds = _GRACE_AFTER_LOST_PEERS_SECONDS if lost else _GRACE_SECONDS
        timers.append(threading.Timer(seconds, _kill_ranks, kwargs={"show_stacks": lost or aborted}))
        timers[0].daemon = True
        timers[0].start()

    before = signal.signal(signal.SIGCHLD, look)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
        for timer in timers:
            timer.cancel()


def _kill_ranks(*, show_stacks: bool) -> None:
    for number in (*([signal.SIGUSR1] if show_stacks else []), signal.SIGKILL):
        for rank in _rank_processes():
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        time.sleep(_STACK_SECONDS)


@contextmanager
def _passing_signals_on() -> Iterator[list[int]]:
    received: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        ranks = _rank_processes()
        if not ranks:  # the agent ends by this exception, as by any other signal
            raise SignalException(f"signal {number} before the ranks were started", signal.Signals(number))
        received.append(number)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rank_processes() -> list[int]:
    """Return the process ids of the ranks that this launcher has started and that still run."""
    ranks = []
    for pid in _children():
        with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
            if b"--launched-by" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                ranks.append(pid)
    return ranks


def _children() -> list[int]:
    """Return the process ids of this process's children, also of those that ended and are not collected yet."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # the thread may have ended
            found += map(int, (task / "children").read_text().split())
    return found


if __name__ == "__main__":
    sys.exit(main())

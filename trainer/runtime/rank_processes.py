"""The processes of the ranks of one node: started, watched, sent signals, and killed when one of them fails.

A rank is a fresh Python process, or a fork of the launcher, which has then imported PyTorch once for all ranks:

    fresh    launcher -> python -m MODULE --launched-by PID ARGUMENTS   (each rank imports PyTorch)
    forked   launcher imports PyTorch and MODULE -> fork -> MODULE.rank_process() with the same words in sys.argv

Torch-free. The launcher (`runtime/launch.py`) is the only caller. This module never decides why a job failed.

State of the process: A forked rank has handlers of signals and standard output as a fresh process has them.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from trainer.runtime.output import outlast_readers

LOST_PEERS = 3
"""Exit code of a rank that ended because another rank failed: the launcher looks for the cause elsewhere."""

LAUNCHER_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""The signals for which the launcher sets handlers; a fork of the launcher has them at first."""
_STACK_SECONDS = 0.5
_POLL_SECONDS = 0.05


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold the launcher's signals back inside, and handle them afterwards.

    It is for imports: Python ignores an exception that a handler raises in a callback of an import.

    Yields:
        None.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def flight_record(rank: int | str) -> str:
    """Return the name of the file of a rank's last collectives; NCCL's watchdog appends the rank itself.

    Args:
        rank: The rank, or "" or a pattern.
    """
    return f"rank_{rank}"


@dataclass(frozen=True)
class RankProgram:
    """The program of every rank.

    Attributes:
        module: Has `rank_process() -> int`, which reads sys.argv, and calls it as `__main__`.
        arguments: The arguments of the program.
    """

    module: str
    arguments: Sequence[str]

    @property
    def words(self) -> list[str]:
        """The words after the program's name, first those by which a rank knows its launcher."""
        return ["--launched-by", str(os.getpid()), *self.arguments]


class RankEnd(NamedTuple):
    """How a rank ended. code: its exit code; negative: the number of the signal that ended it."""

    rank: int
    code: int


class RankProcesses:
    """The ranks of this node, by their numbers in the job."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes] | _Fork] = {}
        self.ends: list[RankEnd] = []
        """The ranks that have ended, in the order in which they were seen."""
        self.overdue: list[int] = []
        """The ranks that were killed because they still ran long after another one had ended well."""

    @property
    def running(self) -> list[int]:
        """The ranks that have not been seen to end."""
        ended = {end.rank for end in self.ends}
        return [rank for rank in self._processes if rank not in ended]

    @property
    def first_failure(self) -> RankEnd | None:
        """The first end with another code than 0; None if no rank has failed."""
        return next((end for end in self.ends if end.code != 0), None)

    def start(
        self, program: RankProgram, variables: Mapping[int, Mapping[str, str]], *, forked: bool
    ) -> None:
        """Start a process for each rank.

        Args:
            program: The program of each rank.
            variables: Rank -> environment variables that it gets in addition to the launcher's.
            forked: Whether ranks are forks of this process, see `can_fork`.
        """
        begin = _forked if forked else _fresh
        for rank, own in variables.items():
            self._processes[rank] = begin(program, own)

    def look(self) -> None:
        """Add the ranks that have ended since the last call to `ends`."""
        for rank in self.running:
            code = self._processes[rank].poll()
            if code is not None:
                self.ends.append(RankEnd(rank, code))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that still runs.

        Args:
            number: The signal.
        """
        for rank in self.running:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, number)

    def wait(
        self, grace_of: Callable[[RankEnd], tuple[float, bool]], end_seconds: float = math.inf
    ) -> None:
        """Wait for the end of all ranks.

        When one has failed, ask the others to end by SIGTERM, and later kill the ranks that still run.

        Args:
            grace_of: From the first failure to the seconds that the others have, and whether to show the stacks of
                killed ranks.
            end_seconds: Time after the first end with code 0 in which all other ranks must end. Later ranks are killed,
                and are listed in `overdue`.
        """
        deadline = None
        shows_stacks = False
        last_end = math.inf
        while self.running:
            time.sleep(_POLL_SECONDS)
            self.look()
            now = time.monotonic()
            if deadline is None and self.first_failure is not None:
                seconds, shows_stacks = grace_of(self.first_failure)
                deadline = now + seconds
                self.send(signal.SIGTERM)
            if last_end == math.inf and self.ends:
                last_end = now + end_seconds
            if deadline is None and now > last_end:
                self.overdue = self.running
                self.kill(show_stacks=True)
            if deadline is not None and now > deadline:
                self.kill(show_stacks=shows_stacks)

    def end_by(self, number: signal.Signals, seconds: float) -> None:
        """Send a signal to all ranks, and kill the ranks that still run some seconds later.

        Args:
            number: The signal.
            seconds: The time.
        """
        self.send(number)
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.look()
        self.kill(show_stacks=False)

    def kill(self, *, show_stacks: bool) -> None:
        """Kill the ranks that still run by SIGKILL, and wait for their ends.

        Args:
            show_stacks: First send SIGUSR1, at which a rank prints the stacks of its threads.
        """
        self.look()
        if show_stacks and self.running:
            self.send(signal.SIGUSR1)
            time.sleep(_STACK_SECONDS)
        self.send(signal.SIGKILL)
        while self.running:
            time.sleep(_POLL_SECONDS)
            self.look()


def can_fork() -> bool:
    """Return whether ranks may be forks of this process.

    A fork has only the thread that forks, so locks of other threads stay locked for ever. CUDA cannot be used in a fork
    of a process that has used it. Packages of a user, which are imported already, may have started threads or CUDA.
    """
    return sys.platform == "linux" and threading.active_count() == 1 and not _uses_cuda()


def _uses_cuda() -> bool:
    """Return whether this process has started CUDA's driver. The driver keeps the file /dev/nvidia-uvm open."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own descriptor is closed by now
            if os.readlink(link).startswith("/dev/nvidia-uvm"):
                return True
    return False


def _fresh(program: RankProgram, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", program.module, *program.words]
    return subprocess.Popen(command, env=os.environ | variables, start_new_session=True)


@dataclass
class _Fork:
    """A forked process, with the two names of `subprocess.Popen` that are used here."""

    pid: int
    _code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def _forked(program: RankProgram, variables: Mapping[str, str]) -> _Fork:
    words = program.words
    sys.stdout.flush()
    sys.stderr.flush()
    # in the rank, the handlers are the launcher's until the rank has set its own
    signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    pid = os.fork()
    if pid == 0:
        _be_rank(program.module, words, variables)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)
    return _Fork(pid)


def _be_rank(module: str, words: list[str], variables: Mapping[str, str]) -> NoReturn:
    """Run the program of a rank in this fork as a fresh `python -u -m MODULE` would, and end the process."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in LAUNCHER_SIGNALS[2:]:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_SIGNALS)
        os.environ.update(variables)
        sys.argv = [module, *words]
        outlast_readers(buffered=False, is_log=False)
        code = import_module(module).rank_process()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)

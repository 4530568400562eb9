"""Stop in good order after a signal of `job.stop_signals` or `job.max_minutes`: ranks agree on one reason each step.

`Stopped` is for the time before ranks run, when nothing can be saved yet. Torch-free.

State of the process: The handlers of signals, for the run.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from trainer.config.schema import STOP_SIGNALS
from trainer.runtime.console import report

Handler = Callable[[int, FrameType | None], None]
# A scheduler signals every process of a job, and the launcher passes its own signal on: both count as one signal.
_SAME_SIGNAL_SECONDS = 2.0
_SHOWS_STACKS = signal.SIGUSR1  # in a rank, see commands/rank.py


class Stopped(BaseException):
    """A signal ends this process, because it has no ranks to pass the signal on to, or does not pass on this signal.

    Like `KeyboardInterrupt`, it is no `Exception`. A handler may raise it within any import, and a library that catches
    every `Exception` there must not turn it into another error.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = signal.Signals(number)


def ends_by(number: int, _: FrameType | None) -> None:
    """Raise `Stopped`: a handler of signals.

    Args:
        number: The signal.
        _: Not used.
    """
    raise Stopped(number)


@contextmanager
def handled_by(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Set handlers of signals inside. An ignored signal, for example SIGHUP under nohup, stays ignored.

    Args:
        handlers: Handler of each signal.

    Yields:
        None.
    """
    before = {
        number: signal.signal(number, how)
        for number, how in handlers.items()
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rank_signals(names: Sequence[str]) -> tuple[signal.Signals, ...]:
    """Return the signals of `job.stop_signals` at which a rank stops. SIGUSR1 is left out: it shows the rank's stacks.

    Args:
        names: Names of signals.
    """
    return tuple(
        number
        for name in dict.fromkeys(names)
        if (number := signal.Signals[name]) != _SHOWS_STACKS
    )


class Stop:
    """A context in which a first signal only asks for a stop, which `reason` reports to all ranks.

    A second signal, or the end of `timeout_seconds` after the first, ends the process at once with 128 + the signal's
    number. The exit restores the handlers. In another thread than the main thread the context does nothing.

    Args:
        timeout_seconds: Time after the first signal.
        signals: Names, as in `job.stop_signals`. SIGUSR1 is left to `commands/rank.py`. An ignored signal stays
            ignored, for example SIGHUP under nohup.
        max_minutes: Time after which `reason` stops the run, too.
        prints: Whether this rank reports the first signal and the time-out.
    """

    def __init__(
        self,
        timeout_seconds: float,
        *,
        signals: Sequence[str] = STOP_SIGNALS,
        max_minutes: float | None = None,
        prints: bool = False,
    ) -> None:
        self.signals = rank_signals(signals)
        self.timeout = timeout_seconds
        self.max_minutes = max_minutes
        self.prints = prints
        self.started = time.monotonic()
        self.signal = 0
        self._undo = ExitStack()

    def votes(self) -> list[float]:
        """Return this rank's votes, 0 or 1: for `max_minutes`, then for each signal of `signals`.

        The sums of the votes over all ranks decide in `reason`.
        """
        over = (
            self.max_minutes is not None
            and time.monotonic() - self.started > 60 * self.max_minutes
        )
        return [float(over), *(float(self.signal == number) for number in self.signals)]

    def reason(self, votes: Sequence[float]) -> str | None:
        """Return why all ranks stop after this step. None if they continue.

        Args:
            votes: Sums of the votes of all ranks.
        """
        over, *signals = votes
        for number, asked in zip(self.signals, signals, strict=True):
            if asked:
                return f"stopped by {number.name}"
        return f"job.max_minutes = {self.max_minutes:g} passed: stopped" if over else None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            # Python handles signals in the main thread, which may wait in a collective. The watcher reads their numbers
            # from this pipe as soon as they arrive.
            self._read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)
            watcher = threading.Thread(target=self._watch, name="stop signals", daemon=True)
            before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            # undone in the reverse order
            self._undo.callback(os.close, self._read_end)
            self._undo.callback(watcher.join)
            self._undo.callback(os.close, write_end)  # the watcher reads its end
            self._undo.callback(signal.set_wakeup_fd, before)
            quiet = handled_by(dict.fromkeys(self.signals, lambda *_: None))
            self._undo.enter_context(quiet)
            watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _watch(self) -> None:
        first = 0.0
        ready = select.poll()  # `select` takes the first 1024 files only
        ready.register(self._read_end)
        while True:
            left = first + self.timeout - time.monotonic()
            if not ready.poll(1000 * max(left, 0) if self.signal else None):
                if self.prints:
                    limit = f"checkpoint.stop_timeout_seconds = {self.timeout}"
                    report(f"error: not stopped within {limit}: ended at once")
                os._exit(128 + self.signal)
            numbers = os.read(self._read_end, 64)
            if not numbers:
                return
            for number in filter(self.signals.__contains__, numbers):
                if not self.signal:
                    self.signal = number
                    first = time.monotonic()
                    if self.prints:
                        name = signal.Signals(number).name
                        line = f"{name}: stopping after this step; a second signal ends the run at once"
                        report(line)
                elif time.monotonic() - first > _SAME_SIGNAL_SECONDS:
                    os._exit(128 + number)

"""Stopping in good order: SIGTERM, SIGINT and `job.max_minutes`, as one flag that ranks agree on after each step."""

import os
import select
import signal
import sys
import threading
import time
from types import TracebackType

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.distributed.sharding.exchange import all_reduce

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OUT_OF_TIME = 1  # below every signal of SIGNALS: of several reasons the largest counts
# A scheduler signals every process of a job, and the launcher passes its own signal on: that is one signal.
_SAME_SIGNAL_SECONDS = 2.0


class Stop:
    """While entered, a first signal only asks for a stop; `agreed` tells all ranks.

    A second signal, or `timeout_seconds` after the first, end the process at once with 128 + the
    signal's number. Handlers are those of before again on the way out. Outside of the main thread nothing is done.

    max_minutes: after which `agreed` stops the run, too; speaks: whether this rank tells when the time-out has passed.
    """

    def __init__(self, timeout_seconds: float, *, max_minutes: float | None = None, speaks: bool = False) -> None:
        self.timeout = timeout_seconds
        self.max_minutes = max_minutes
        self.started = time.monotonic()
        self.speaks = speaks
        self.signal = 0
        self._entered = False

    def agreed(self, world: DeviceMesh) -> str | None:
        """Why all ranks stop after this step; None: they go on. A collective, with the same answer on every rank."""
        over = self.max_minutes is not None and time.monotonic() - self.started > 60 * self.max_minutes
        mine = torch.tensor(self.signal or int(over), dtype=torch.int32, device=world.device_type)
        reason = int(all_reduce(mine, world, "max").item())
        if reason == _OUT_OF_TIME:
            return f"job.max_minutes = {self.max_minutes:g} passed: stopped"
        return f"stopped by {signal.Signals(reason).name}" if reason else None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            # Python handles signals in the main thread, which may wait in a collective; their numbers, written to this
            # pipe when they arrive, are seen by the watcher at once.
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._handlers_before = {number: signal.signal(number, _do_nothing) for number in SIGNALS}
            self._watcher = threading.Thread(target=self._watch, name="stop signals", daemon=True)
            self._watcher.start()
            self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._entered:
            self._entered = False
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._write_end)  # the watcher reads its end
            self._watcher.join()
            os.close(self._read_end)

    def _watch(self) -> None:
        first = 0.0
        ready = select.poll()  # `select` knows the first 1024 files only
        ready.register(self._read_end)
        while True:
            left = max(first + self.timeout - time.monotonic(), 0) if self.signal else None
            if not ready.poll(None if left is None else 1000 * left):
                if self.speaks:
                    limit = f"checkpoint.stop_timeout_seconds = {self.timeout}"
                    print(f"error: not stopped within {limit}: ended at once", file=sys.stderr, flush=True)
                os._exit(128 + self.signal)
            numbers = os.read(self._read_end, 64)
            if not numbers:
                return
            for number in filter(SIGNALS.__contains__, numbers):
                if not self.signal:
                    self.signal, first = number, time.monotonic()
                elif time.monotonic() - first > _SAME_SIGNAL_SECONDS:
                    os._exit(128 + number)


def _do_nothing(number: int, frame: object) -> None:
    """In place of the default, which would end the process."""

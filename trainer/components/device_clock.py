"""When a device reached a point of its work, by the host's clock, although the host is ahead of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | float
"""A point in the work of a device: an event of a GPU; on a CPU the time, because the work before it is done."""


class DeviceClock:
    """Tells `time.perf_counter` of points in the work of a device. Making it waits for what the device does."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._beside = torch.cuda.Stream(device) if self._on_gpu else None
        self._known = self.mark()
        if self._on_gpu:
            self._known.synchronize()
        self._time = time.perf_counter()

    def mark(self) -> Mark:
        """Note the end of what the device was given until now."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time_of(self, mark: Mark) -> float:
        """Wait until the device has reached a mark, the latest so far, and return when that was."""
        if not self._on_gpu:
            return mark
        mark.synchronize()
        # From the last one asked for: an event counts milliseconds in a float32.
        self._time += self._known.elapsed_time(mark) / 1e3
        self._known = mark
        return self._time

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """Let what runs inside, and the host that reads its results, wait for nothing that came after the mark.

        Collectives inside need a group of their own: NCCL runs those of a group one after another.
        """
        if not self._on_gpu:
            yield
            return
        self._beside.wait_event(mark)
        with torch.cuda.stream(self._beside):
            yield

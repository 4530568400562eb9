"""When a device reached a point of its work, by the host's clock, although the host runs ahead of the device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | float
"""A point in the work of a device: an event of a GPU; on a CPU the time, because the work before it is done."""


class DeviceClock:
    """Returns the value of `time.perf_counter` at points in the work of a device.

    The constructor waits until the device is idle.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._known = self.mark()
        if self._on_gpu:
            self._known.synchronize()
        self._time = time.perf_counter()

    def mark(self) -> Mark:
        """Return a mark after the work on the current stream so far."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time_of(self, mark: Mark) -> float:
        """Wait until the device has reached a mark, and return the time.

        Args:
            mark: Not earlier than the mark of the last call.

        Returns:
            The time of the mark, in seconds of `time.perf_counter`.
        """
        if not self._on_gpu:
            return mark
        mark.synchronize()
        # Measure from the last mark, because an event counts milliseconds in float32.
        self._time += self._known.elapsed_time(mark) / 1e3
        self._known = mark
        return self._time

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """Run the work inside `with` after the mark, without a wait for work that the host has queued since the mark.

        A host that reads results of the work inside does not wait for the queued work either.

        Collectives inside need a group of their own, because NCCL runs the collectives of a group one after another.

        Args:
            mark: The work inside begins after it.

        Yields:
            None, on a stream of its own if the device is a GPU.
        """
        if not self._on_gpu:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

"""Python's garbage collector, run when all ranks run it: collections at random times make the others wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollector:
    """Collects the young generations every `freq` steps; see `manual_garbage_collection`."""

    def __init__(self, freq: int) -> None:
        self.freq = freq

    def step(self, step: int) -> None:
        if step % self.freq == 0:
            gc.collect(1)


@contextmanager
def manual_garbage_collection(freq: int) -> Iterator[GarbageCollector]:
    """Switch automatic collection off inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield GarbageCollector(freq)
    finally:
        if was_enabled:
            gc.enable()

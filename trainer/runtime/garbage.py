"""What is done with memory that is free again.

Python's garbage collector runs when all ranks run it: collections at random times make the others wait.
"""

import ctypes
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


# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Keep host memory that is free again, where the C library is glibc.

    It returns each large block to the system, and logits and their gradients are such: their pages would be mapped and
    cleared anew in every step.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)

"""Garbage collection on all ranks at once, and freed memory kept for the next step."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def manual_garbage_collection(freq: int) -> Iterator[Callable[[int], None]]:
    """Switch automatic collection off inside, and yield a function of the step that collects every `freq` steps.

    A rank that collects at a time of its own makes the others wait.
    """

    def collect(step: int) -> None:
        if step % freq == 0:
            gc.collect(1)  # the young generations

    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()


# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Keep freed host memory in the process, where the C library is glibc.

    By default glibc returns each large block to the system. The pages of logits and their gradients would then be
    mapped and cleared again in every step.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)

"""Garbage collection: not while modules are imported, and on all ranks at once.

State of the process: Python's collector is off, and collections leave imported modules out, for the run. All ranks
collect at the same step, and give free host memory back.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_COLLECT = 50
_GIVE_BACK = 10
"""Number of steps between two collections, and between two returns of memory."""


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Switch collections off inside, for imports, and let later collections skip all objects that exist at the end.

    Modules are not garbage. Searching PyTorch's modules for garbage takes a fifth of their import, and half a second at
    each full collection.

    Yields:
        None.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def manual_garbage_collection() -> Iterator[Callable[[int], None]]:
    """Switch Python's automatic garbage collection off inside, and yield a function that collects every few steps.

    A rank that collects at its own time makes the others wait. Every few steps free memory goes back to the system.
    glibc reuses aligned blocks, like PyTorch's, only in part (glibc's bug 14581), and a process with several threads
    would grow by megabytes per step.

    Yields:
        A function to call with the number of each finished step.
    """
    library = ctypes.CDLL(None)
    give_back = library.malloc_trim if hasattr(library, "malloc_trim") else lambda _kept: None

    def collect(step: int) -> None:
        if step % _COLLECT == 0:
            gc.collect(1)  # the young generations
        if step % _GIVE_BACK == 0:
            give_back(0)

    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()

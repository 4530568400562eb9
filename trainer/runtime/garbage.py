"""Garbage collection on all ranks at once."""

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

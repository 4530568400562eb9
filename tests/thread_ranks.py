"""Ranks as threads of one process, on a CPU or on one GPU, where each has a stream of its own.

    run_ranks(4, function, *args)      # function(rank, mesh, *args) on 4 threads -> their results, in order

The project's collectives run over a mailbox (`thread_group.py`), which finds missing waits and overwritten buffers.

The autograd engine has one thread for each GPU. Backwards of ranks that wait for each other would never end in it, so
the backward of a rank runs in the rank's own thread.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from math import prod
from typing import Any
from unittest import mock

import torch
from torch.distributed.distributed_c10d import _world

from tests.thread_group import Mailbox, ThreadGroup

_GRACE = 5.0  # seconds in which a rank ends after its wait has ended at the limit


def run_ranks(n: int, function: Callable[..., Any], *args: Any, device: str = "cpu", limit: float = 120.0) -> list[Any]:
    """Return what `function(rank, mesh, *args)` returns on n ranks, in their order; mesh: a `ThreadMesh` of all ranks.

    device: of the tensors, `cpu` or `cuda`. limit: seconds for all.

    Raises:
        Exception: the first one of a rank, with a note that says which rank.
        TimeoutError: a rank waited, or ran, beyond the limit.
        AssertionError: a rank did not wait for an operation, or overwrote what it sent before its wait.
    """
    mailbox, threads_before = Mailbox(torch.device(device), limit), torch.get_num_threads()
    results: dict[int, Any] = {}
    if device == "cuda":
        torch.cuda.synchronize()  # arguments may still be computed on the caller's stream

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            mesh = ThreadMesh(mailbox, rank, (n,))
            with torch.autograd.set_multithreading_enabled(False), _stream(device), mesh.registered():
                results[rank] = function(rank, mesh, *args)
            mailbox.end(rank)
        except BaseException as error:  # of any kind: the others would wait for ever
            mailbox.end(rank, error)

    threads = [
        # PyTorch keeps settings of its compiler in the context of the caller.
        threading.Thread(target=copy_context().run, args=(body, rank), name=f"rank {rank}", daemon=True)
        for rank in range(n)
    ]
    with _own_tensors():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(mailbox.remaining() + _GRACE)
    torch.set_num_threads(threads_before)
    if mailbox.failure is not None:
        rank, error = mailbox.failure
        error.add_note(f"on rank {rank} of {n} ranks that are threads")
        raise error
    if running := [thread.name for thread in threads if thread.is_alive()]:
        raise TimeoutError(f"{', '.join(running)} of {n} did not end within {limit} seconds")
    return [results[rank] for rank in range(n)]


@contextmanager
def _stream(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.current_stream().synchronize()


@contextmanager
def _own_tensors() -> Iterator[None]:
    """Let every rank compute what the project caches by device: such a tensor belongs to the stream that filled it."""
    with ExitStack() as stack:
        for module in [module for name, module in list(sys.modules.items()) if name.startswith("trainer.")]:
            for name, value in list(vars(module).items()):
                if hasattr(value, "cache_info") and "device" in inspect.signature(value).parameters:
                    stack.enter_context(mock.patch.object(module, name, value.__wrapped__))
        yield


class ThreadMesh:
    """What this project asks of a `DeviceMesh`, for one of several ranks that are threads."""

    def __init__(self, mailbox: Mailbox, rank: int, shape: tuple[int, ...], flat: "ThreadMesh | None" = None) -> None:
        self.shape, self.ndim, self.device_type = shape, len(shape), mailbox.device.type
        self._mailbox, self._rank, self._flat = mailbox, rank, flat or self
        self._registered: list[ThreadGroup] = [] if flat is None else flat._registered
        grid = torch.arange(prod(shape)).view(shape)
        lines = (grid.movedim(dim, -1).reshape(-1, shape[dim]).tolist() for dim in range(self.ndim))
        self._groups = [self._group(line) for of_dim in lines for line in of_dim if rank in line]

    def size(self, dim: int | None = None) -> int:
        return prod(self.shape) if dim is None else self.shape[dim]

    def get_local_rank(self, dim: int = 0) -> int:
        return self._groups[dim].rank()

    def get_group(self, dim: int = 0) -> ThreadGroup:
        return self._groups[dim]

    def reshaped(self, *shape: int) -> "ThreadMesh":
        """Return a mesh of the same ranks with other dimensions."""
        return ThreadMesh(self._mailbox, self._rank, shape, self._flat)

    def _flatten(self, name: str) -> "ThreadMesh":
        return self._flat

    def _group(self, ranks: list[int]) -> ThreadGroup:
        """Make a group, which functions of `torch.distributed` find until `registered` ends."""
        number = len(self._registered)  # all ranks make their groups in the same order
        group = ThreadGroup(self._mailbox, f"group {number} of ranks {ranks}", ranks, self._rank)
        self._registered.append(group)
        _world.pg_map[group] = ("threads", None)
        _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        return group

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Check at the end that all operations were waited for, and remove the rank's groups from PyTorch's tables."""
        try:
            yield
            for group in self._registered:
                group.check_waits()
        finally:
            for group in self._registered:
                del _world.pg_map[group], _world.pg_group_ranks[group]

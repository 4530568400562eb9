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
from functools import cache, wraps
from itertools import chain
from math import prod
from typing import Any
from unittest import mock

import torch
from torch.distributed.distributed_c10d import _world

from tests.thread_group import Mailbox, ThreadGroup

_GRACE = 5.0  # seconds in which a rank ends after its wait has ended at the limit


def run_ranks(n: int, function: Callable[..., Any], *args: Any, device: str = "cpu", limit: float = 120.0) -> list[Any]:
    """Return the results of `function(rank, mesh, *args)` on n ranks, in their order.

    Args:
        n: Number of ranks.
        function: Called with the rank, a `ThreadMesh` of all ranks, and `args`.
        args: Further arguments.
        device: Device of the tensors, `cpu` or `cuda`.
        limit: Seconds for all ranks.

    Raises:
        Exception: The first error of a rank, with a note that names the rank.
        TimeoutError: A rank waited or ran beyond the limit.
        AssertionError: A rank did not wait for an operation, or changed a sent tensor before its wait.
    """
    mailbox, results = Mailbox(torch.device(device), limit), {}
    groups: list[list[ThreadGroup]] = [[] for _ in range(n)]
    if device == "cuda":
        torch.cuda.synchronize()  # arguments may still be computed on the caller's stream

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            with torch.autograd.set_multithreading_enabled(False), _stream(device):
                results[rank] = function(rank, ThreadMesh(mailbox, rank, (n,), groups[rank]), *args)
            mailbox.end(rank)
        except BaseException as error:  # of any kind: the others would wait for ever
            mailbox.end(rank, error)

    _run(body, n, mailbox, groups)
    if mailbox.failure is not None:
        rank, error = mailbox.failure
        error.add_note(f"on rank {rank} of {n} ranks that are threads")
        raise error
    if missing := [rank for rank in range(n) if rank not in results]:
        raise TimeoutError(f"rank(s) {missing} of {n} did not end within {limit} seconds")
    for group in chain(*groups):
        group.check_waits()
    return [results[rank] for rank in range(n)]


def _run(body: Callable[[int], None], n: int, mailbox: Mailbox, groups: list[list[ThreadGroup]]) -> None:
    """Call `body(rank)` in n threads, and wait for them until the limit; remove their groups from PyTorch's tables."""
    # PyTorch keeps settings of its compiler in the context of the caller.
    threads = [threading.Thread(target=copy_context().run, args=(body, rank), daemon=True) for rank in range(n)]
    threads_before = torch.get_num_threads()
    try:
        with _own_tensors():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(mailbox.remaining() + _GRACE)
    finally:
        torch.set_num_threads(threads_before)
        for group in chain(*groups):
            del _world.pg_map[group], _world.pg_group_ranks[group]


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
    """Let every rank compute the tensors that the project caches by device.

    A tensor belongs to the stream that filled it.
    """
    with ExitStack() as stack:
        ours = [module for name, module in sys.modules.items() if name.startswith(("trainer.", "longshard."))]
        for module in ours:
            for name, value in list(vars(module).items()):
                if hasattr(value, "cache_info") and "device" in inspect.signature(value).parameters:
                    stack.enter_context(mock.patch.object(module, name, _cached_by_rank(value.__wrapped__)))
        yield


def _cached_by_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a cache for each thread."""
    caches = threading.local()

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(caches, "own"):
            caches.own = cache(function)
        return caches.own(*args, **kwargs)

    return call


class ThreadMesh:
    """The part of `DeviceMesh` that this project uses, for one of several ranks that are threads.

    groups: the rank's own groups.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        rank: int,
        shape: tuple[int, ...],
        groups: list[ThreadGroup],
        flat: "ThreadMesh | None" = None,
    ) -> None:
        self.shape, self.ndim, self.device_type = shape, len(shape), mailbox.device.type
        self._mailbox, self._rank, self._flat = mailbox, rank, flat or self
        self._own_groups = groups
        grid = torch.arange(prod(shape)).view(shape)
        lines = (grid.movedim(dim, -1).reshape(-1, shape[dim]).tolist() for dim in range(self.ndim))
        self._groups = [self._group(line) for groups_of_dim in lines for line in groups_of_dim if rank in line]

    def size(self, dim: int | None = None) -> int:
        return prod(self.shape) if dim is None else self.shape[dim]

    def get_local_rank(self, dim: int = 0) -> int:
        return self._groups[dim].rank()

    def get_group(self, dim: int = 0) -> ThreadGroup:
        return self._groups[dim]

    def reshaped(self, *shape: int) -> "ThreadMesh":
        """Return a mesh of the same ranks with other dimensions."""
        return ThreadMesh(self._mailbox, self._rank, shape, self._own_groups, self._flat)

    def _flatten(self, name: str) -> "ThreadMesh":
        return self._flat

    def _group(self, ranks: list[int]) -> ThreadGroup:
        """Make a group, and enter it into tables in which functions of `torch.distributed` look for it."""
        number = len(self._own_groups)  # all ranks make their groups in the same order
        group = ThreadGroup(self._mailbox, f"group {number} of ranks {ranks}", ranks, self._rank)
        _world.pg_map[group] = ("threads", None)
        _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        self._own_groups.append(group)
        return group

"""Processes that a benchmark compares: ranks that share a problem, and one process that has all of it."""

import statistics
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Row = dict[str, object]


@dataclass(frozen=True)
class Times:
    """One forward and backward: seconds of a clock that all processes share, and CPU seconds of all threads."""

    start: float
    middle: float
    end: float
    cpu: float


def span(times: Sequence[Times]) -> float:
    """Return the seconds from the first start to the last end of several ranks.

    Args:
        times: Times of each rank.
    """
    return max(one.end for one in times) - min(one.start for one in times)


def compared(whole: Sequence[Times], shares: Sequence[Sequence[Times]]) -> Row:
    """Compare the ranks with the one process of the same round.

    Args:
        whole: Times of the one process, one per round.
        shares: Times of every rank, one sequence per round.

    Returns:
        Ratios of times, medians over the rounds, and the median milliseconds of the ranks and of the one process.
        `cpu_ratio` compares the CPU time of all threads, which other work on the machine disturbs least.
    """
    ratios = [span(ranks) / span([one]) for one, ranks in zip(whole, shares, strict=True)]
    cpu = [sum(rank.cpu for rank in ranks) / one.cpu for one, ranks in zip(whole, shares, strict=True)]
    forward, backward = (
        statistics.median(max(length(rank) for rank in ranks) for ranks in shares)
        / statistics.median(length(one) for one in whole)
        for length in (lambda x: x.middle - x.start, lambda x: x.end - x.middle)
    )
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "ratio_of_fastest": round(min(map(span, shares)) / min(span([one]) for one in whole), 4),
        "cpu_ratio": round(statistics.median(cpu), 4),
        "forward_ratio": round(forward, 4),
        "backward_ratio": round(backward, 4),
        "ms": round(1e3 * statistics.median(map(span, shares)), 2),
        "whole_ms": round(1e3 * statistics.median(span([one]) for one in whole), 2),
    }


class PeakBytes(TorchDispatchMode):
    """Measures the peak in bytes of the tensors created under it that are alive. Scratch memory of kernels is not seen.

    Tensors on meta have no bytes.

    Args:
        existing: Tensors whose memory does not count, any shape.
    """

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._existing = {x.untyped_storage()._cdata for x in existing}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not x.is_meta and x.untyped_storage()._cdata not in self._existing:
                storage = x.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


# ---- processes


class Contender(Protocol):
    """Measures in a process of a team. A team calls its other methods by name."""

    def close(self) -> None:
        """Close all that the measures have opened."""


class Team:
    """One process for the whole problem and one for each rank; processes that are not asked sleep on their pipes.

    Args:
        degree: Number of ranks.
        whole: Class of the contender with the whole problem; the call `prepare` has its arguments.
        share: Class of the contender of a rank.
        device: With `cuda`, each rank has a GPU and NCCL, and the whole problem has the first GPU.
    """

    def __init__(self, degree: int, whole: type[Contender], share: type[Contender], device: str = "cpu") -> None:
        self.degree = degree
        self.device = device
        self._contenders = (whole, share)

    def __enter__(self) -> "Team":
        self._folder = tempfile.TemporaryDirectory()
        context = torch.multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []
        for rank in (None, *range(self.degree)):
            ours, theirs = context.Pipe()
            made = self._contenders[rank is not None]
            process = context.Process(
                target=_serve, args=(theirs, rank, self.degree, self._folder.name, made, self.device), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append((process, ours))
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._members:
            connection.close()
            process.join(timeout=5)
            process.kill()
        self._folder.cleanup()

    def whole(self, name: str, *args: object) -> Any:
        """Call a method of the contender with the whole problem.

        Args:
            name: Name of the method, or `prepare`, which creates the contender.
            args: Arguments of the method.

        Returns:
            The result of the method.

        Raises:
            RuntimeError: The method failed, or the process died.
        """
        return self._ask(self._members[:1], name, args)[0]

    def ranks(self, name: str, *args: object) -> list[Any]:
        """Call a method of the contender of every rank at once.

        Args:
            name: Name of the method, or `prepare`, which creates the contenders.
            args: Arguments of the method.

        Returns:
            The result of each rank.

        Raises:
            RuntimeError: The method failed, or a process died.
        """
        return self._ask(self._members[1:], name, args)

    def _ask(self, members: list[tuple[Any, Connection]], name: str, args: tuple[object, ...]) -> list[Any]:
        answers: dict[Connection, Any] = {}
        connections = [connection for _, connection in members]
        for connection in connections:
            connection.send((name, args))
        while len(answers) < len(members):
            for ready in wait([c for c in connections if c not in answers]):
                try:
                    ok, answers[ready] = ready.recv()
                except EOFError:
                    raise RuntimeError("a process of the benchmark died") from None
                if not ok:
                    raise RuntimeError(answers[ready])
        return [answers[connection] for connection in connections]


def _serve(
    connection: Connection, rank: int | None, degree: int, folder: str, made: type[Contender], device: str
) -> None:
    """Run a process of a team: create contenders and call their methods, until the other end of the pipe closes."""
    if device == "cuda":
        torch.cuda.set_device(rank or 0)
    if rank is not None:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=degree)
    contender: Contender | None = None
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            break
        try:
            if name == "prepare":
                if contender is not None:
                    contender.close()
                contender, answer = None, None  # free the memory of the last contender first
                contender = made(*args)
            else:
                answer = getattr(contender, name)(*args)
            connection.send((True, answer))
        except Exception:
            connection.send((False, traceback.format_exc()))
    if rank is not None:
        dist.destroy_process_group()

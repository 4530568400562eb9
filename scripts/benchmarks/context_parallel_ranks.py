"""The processes that `context_parallel.py` compares: ranks that share a sequence, and one that has all of it."""

import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts.benchmarks.context_parallel_tiles import Problem
from trainer.distributed.context_parallel.attention import context_parallel_attention
from trainer.distributed.context_parallel.execution.kernels.base import BackwardInputs
from trainer.distributed.context_parallel.live import LivePlan, opened
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding import exchange


@dataclass(frozen=True)
class Times:
    """One forward and backward: seconds of a clock that all processes share, and CPU seconds of all threads."""

    start: float
    middle: float
    end: float
    cpu: float


# ---- the contenders


def timed(attention: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Times:
    """One forward and backward by autograd."""
    *leaves, dout = inputs
    cpu, start = time.process_time(), time.monotonic()
    out = attention(*leaves)
    middle = time.monotonic()
    torch.autograd.grad(out, leaves, dout)
    return Times(start, middle, time.monotonic(), time.process_time() - cpu)


class Whole:
    """One process that computes everything by PyTorch's own attention."""

    def __init__(self, problem: Problem, threads: int) -> None:
        torch.set_num_threads(threads)
        *leaves, dout = problem.inputs()
        self._inputs = [*(x.requires_grad_() for x in leaves), dout]

    def close(self) -> None:
        pass

    def run(self) -> Times:
        return timed(lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True), self._inputs)


class Share:
    """One rank of a group that computes it together."""

    def __init__(self, problem: Problem, threads: int, methods: Sequence[str]) -> None:
        torch.set_num_threads(threads)
        self._problem = problem
        mesh = init_device_mesh("cpu", (problem.degree,))
        indices = torch.from_numpy(problem.layout.indices(dist.get_rank()))
        *leaves, dout = (x.transpose(1, 2)[:, indices].transpose(1, 2) for x in problem.inputs())
        self._inputs = [*(x.requires_grad_() for x in leaves), dout]
        self._lives = {
            method: LivePlan(mesh, problem.layout, options=ContextParallelOptions(method, problem.load_balancer))
            for method in methods
        }
        self._open = ExitStack()
        batch = problem.batch
        self._handles = {m: self._open.enter_context(opened(live, batch)) for m, live in self._lives.items()}

    def close(self) -> None:
        self._open.close()

    def run(self, method: str) -> Times:
        plan, scale = self._handles[method], self._problem.scale
        dist.barrier()
        return timed(lambda q, k, v: context_parallel_attention(q, k, v, plan, scale)[0], self._inputs)

    def account(self, method: str) -> dict[str, dict[str, int]]:
        """Bytes sent by kind, and the peak of memory in each direction, of one call that is not timed."""
        q, k, v, dout = (x.detach() for x in self._inputs)
        run = self._lives[method].execution(q, k, v, range(self._problem.batch), is_causal=True, window=0)
        before = Counter(exchange.bytes_sent)
        peaks = {}
        with PeakBytes(q, k, v) as meter:
            out, lse = run.forward(q, k, v, self._problem.scale)
            peaks["forward"] = meter.peak
        with PeakBytes(q, k, v, dout, out, lse) as meter:
            gradients = run.backward(BackwardInputs(dout, q, k, v, out, lse), self._problem.scale)
            peaks["backward"] = meter.peak
        del gradients
        return {"bytes_sent": dict(Counter(exchange.bytes_sent) - before), "peak_bytes": peaks}


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made under it; the kernels' own scratch is not seen.

    existing: tensors whose memory does not count.
    """

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._existing = {x.untyped_storage()._cdata for x in existing}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._existing:
                storage = x.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


# ---- processes


class Team:
    """One process for the whole and one for each rank; those that are not asked sleep on their pipes."""

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def __enter__(self) -> "Team":
        self._folder = tempfile.TemporaryDirectory()
        context = torch.multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []
        for rank in (None, *range(self.degree)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.degree, self._folder.name), daemon=True)
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
        return self._ask(self._members[:1], name, args)[0]

    def ranks(self, name: str, *args: object) -> list[Any]:
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


def _serve(connection: Connection, rank: int | None, degree: int, folder: str) -> None:
    """Body of a process: prepares what it is told and then measures, until the other end hangs up."""
    if rank is not None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=degree)
    contender: Whole | Share | None = None
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            break
        try:
            if name == "prepare":
                if contender is not None:
                    contender.close()
                contender, answer = None, None  # the memory of the last one first
                contender = Whole(*args) if rank is None else Share(*args)
            else:
                answer = getattr(contender, name)(*args)
            connection.send((True, answer))
        except Exception:
            connection.send((False, traceback.format_exc()))
    if rank is not None:
        dist.destroy_process_group()

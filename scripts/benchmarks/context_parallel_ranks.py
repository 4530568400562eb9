"""What `context_parallel.py` compares: a rank that shares a sequence, and one process that has all of it."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from scripts.benchmarks.context_parallel_tiles import Problem
from scripts.benchmarks.teams import PeakBytes, Times
from trainer.distributed.context_parallel.attention import context_parallel_attention
from trainer.distributed.context_parallel.execution.kernels.base import BackwardInputs
from trainer.distributed.context_parallel.live import LivePlan, opened
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.sharding import exchange


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

"""Processes that `context_parallel.py` compares: a rank with its part of a sequence, and one process with all of it."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import experimental
from torch.nn import functional as F

from longshard.context.attention import context_parallel_attention
from longshard.context.attention_inputs import AttentionInputs, AttentionSettings
from longshard.context.execution.kernels.base import BackwardInputs, Terms
from longshard.context.live import LivePlan, opened
from longshard.context.planning.options import ContextParallelOptions
from longshard.sharding import exchange
from scripts.benchmarks.context_parallel_tiles import Problem
from scripts.benchmarks.teams import PeakBytes, Times


def timed(attention: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Times:
    """Run one forward and backward by autograd.

    Args:
        attention: Attention of q, k and v.
        inputs: q, k, v and the gradient of the output, (B, heads, S, D).

    Returns:
        The times of the run.
    """
    *leaves, dout = inputs
    done = torch.cuda.synchronize if dout.is_cuda else lambda: None
    done()
    cpu = time.process_time()
    start = time.monotonic()
    out = attention(*leaves)
    done()
    middle = time.monotonic()
    torch.autograd.grad(out, leaves, dout)
    done()
    return Times(start, middle, time.monotonic(), time.process_time() - cpu)


# PyTorch's own ring is the peer. It has no kernel on CPUs, and replaces this function inside its context.
PEER = "pytorch"
_causal = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


class Whole:
    """One process that computes the whole sequence by PyTorch's own attention.

    Args:
        problem: The attention problem.
        threads: Number of threads.
        device: `cpu` or `cuda`.
    """

    def __init__(self, problem: Problem, threads: int, device: str = "cpu") -> None:
        torch.set_num_threads(threads)
        *leaves, dout = problem.inputs(device)
        self._inputs = [*(x.requires_grad_() for x in leaves), dout]

    def close(self) -> None:
        """Close nothing: there is no context."""

    def run(self) -> Times:
        """Return the times of one forward and backward."""
        return timed(_causal, self._inputs)


class Share:
    """One rank of a group that computes the sequence together.

    Args:
        problem: The attention problem.
        threads: Number of threads.
        methods: Context-parallel methods, or `PEER`.
        device: `cpu` or `cuda`.
    """

    def __init__(self, problem: Problem, threads: int, methods: Sequence[str], device: str = "cpu") -> None:
        torch.set_num_threads(threads)
        self._problem = problem
        self._device = device
        self._mesh = mesh = init_device_mesh(device, (problem.degree,))
        indices = torch.from_numpy(problem.layout.indices(dist.get_rank()))
        *leaves, dout = (x.transpose(1, 2)[:, indices].to(device).transpose(1, 2) for x in problem.inputs())
        self._inputs = [*(x.requires_grad_() for x in leaves), dout]
        self._lives = {
            method: LivePlan(mesh, problem.layout, options=ContextParallelOptions(method, problem.load_balancer))
            for method in methods
            if method != PEER
        }
        self._open = ExitStack()
        batch = problem.batch
        self._handles = {m: self._open.enter_context(opened(live, batch)) for m, live in self._lives.items()}

    def close(self) -> None:
        """Close the contexts of all methods."""
        self._open.close()

    def run(self, method: str) -> Times:
        """Return the times of one forward and backward. A collective over the ranks.

        Args:
            method: Context-parallel method, or `PEER`.
        """
        dist.barrier()
        if method == PEER:
            return self._run_peer()
        plan = self._handles[method]
        scale = self._problem.scale
        return timed(
            lambda q, k, v: context_parallel_attention(q, k, v, plan, AttentionSettings(scale)).output, self._inputs
        )

    def _run_peer(self) -> Times:
        """Run PyTorch's ring with its own head-tail layout, which gives this rank the same rows as ours."""
        buffer = torch.zeros(1, self._problem.seq_len, device=self._device)  # the context requires a buffer
        with experimental.context_parallel(self._mesh, buffers=[buffer], buffer_seq_dims=[1]):
            # looked up by name in each call, because the context replaces it there
            return timed(lambda *qkv: F.scaled_dot_product_attention(*_repeated(*qkv), is_causal=True), self._inputs)

    def account(self, method: str) -> dict[str, dict[str, int]]:
        """Return the bytes sent by kind and the peak of memory in each direction, of one call that is not timed.

        Args:
            method: Context-parallel method. For `PEER` the result is empty.
        """
        if method == PEER:
            return {}
        q, k, v, dout = (x.detach() for x in self._inputs)
        run = self._lives[method].execution(
            AttentionInputs(q, k, v), AttentionSettings(1.0), range(self._problem.batch)
        )
        before = Counter(exchange.bytes_sent)
        terms = Terms(self._problem.scale)
        peaks = {}
        with PeakBytes(q, k, v) as meter:
            out, lse = run.forward(q, k, v, terms=terms)
            peaks["forward"] = meter.peak
        with PeakBytes(q, k, v, dout, out, lse) as meter:
            gradients = run.backward(BackwardInputs(dout, q, k, v, out, lse), terms)
            peaks["backward"] = meter.peak
        del gradients
        return {"bytes_sent": dict(Counter(exchange.bytes_sent) - before), "peak_bytes": peaks}


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, and K and V with one head for each query head, as PyTorch's ring needs them."""
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

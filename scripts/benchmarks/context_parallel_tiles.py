"""Run the tiles of every rank's plan on one device, one rank after another: `context_parallel.py --tiles`."""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from longshard.context.execution.kernels.base import BackwardInputs, Kernel
from longshard.context.execution.kernels.choose import choose_kernel
from longshard.context.execution.kernels.cpu import CpuFlash
from longshard.context.execution.kernels.cuda import CudaFlash
from longshard.context.execution.stages import Merged, add_parts, attend, pack, unpack
from longshard.context.planning.cost import AttentionShape, Cost, attention_cost
from longshard.context.planning.heads import HeadShare
from longshard.context.planning.lowering import Launch, lower
from longshard.context.planning.mask import Relation, causal
from longshard.context.planning.methods import make_plan
from longshard.context.planning.options import ContextParallelOptions
from longshard.context.planning.plan import RankPlan, Stage
from longshard.sharding.layout import AxisLayout

DIRECTIONS = ("forward", "backward")

Row = dict[str, object]


@dataclass(frozen=True)
class Problem:
    """Causal attention of one sequence, and the number of ranks that share it."""

    seq_len: int
    degree: int
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    load_balancer: str = "head_tail"

    @property
    def scale(self) -> float:
        """Factor of the scores, 1 / sqrt(head_dim)."""
        return self.head_dim**-0.5

    @cached_property
    def layout(self) -> AxisLayout:
        """The tokens of each rank."""
        return ContextParallelOptions(load_balancer=self.load_balancer).layout(self.seq_len, self.degree)

    def plans(self, method: str) -> list[RankPlan]:
        """Return the plan of every rank.

        Args:
            method: Context-parallel method.
        """
        return [make_plan(self.layout, causal(self.seq_len), method, rank) for rank in range(self.degree)]

    def costs(self, method: str) -> list[dict[str, Cost]]:
        """Return the costs of every rank, by direction.

        Args:
            method: Context-parallel method.
        """
        itemsize = getattr(torch, self.dtype).itemsize
        shape = AttentionShape(self.batch, self.heads, self.kv_heads, self.head_dim, itemsize)
        return [{name: attention_cost(plan, shape, name) for name in DIRECTIONS} for plan in self.plans(method)]

    def inputs(self, device: str = "cpu") -> list[torch.Tensor]:
        """Return q, k, v and the gradient of the output, (B, heads, S, D), in the memory layout (B, S, heads, D).

        Args:
            device: Device of the tensors.
        """
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(self.batch, self.seq_len, heads, self.head_dim, generator=generator)
            .to(device, getattr(torch, self.dtype))
            .transpose(1, 2)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]


def problems(args: argparse.Namespace, degree: int) -> Iterator[Problem]:
    """Yield the problem of each sequence length.

    Args:
        args: The command line.
        degree: Number of ranks.
    """
    names = "batch", "heads", "kv_heads", "head_dim", "dtype", "load_balancer"
    for seq_len in args.seq_len:
        yield Problem(seq_len, degree, **{name: getattr(args, name) for name in names})


# ---- tiles of every rank on one device


class Tiles:
    """The calls of one rank, forward and backward, with the K and V of every stage on the device.

    Args:
        problem: The attention problem.
        method: Context-parallel method.
        rank: The rank.
        kernel: The kernel of each tile.
        inputs: q, k, v and the gradient of the output, whole, (B, heads, S, D).
    """

    def __init__(self, problem: Problem, method: str, rank: int, kernel: Kernel, inputs: list[torch.Tensor]) -> None:
        plan = problem.plans(method)[rank]
        self.flops = sum(cost.flops for cost in problem.costs(method)[rank].values())
        if plan.inner is not None:
            share = HeadShare.passes(problem.heads, problem.kv_heads, problem.degree)[0]
            q, k, v, dout = inputs
            queries = share.queries(rank)
            first = rank * share.per_rank
            keys = [head // share.copies for head in range(first + share.start, first + share.stop)]
            self._q = q[:, queries]
            k = k[:, keys]
            v = v[:, keys]
            self._dout = dout[:, queries]
            plan = plan.inner
        else:
            q, k, v, dout = inputs
            indices = torch.from_numpy(problem.layout.indices(rank)).to(q.device)
            self._q, self._dout = (x.transpose(1, 2)[:, indices].transpose(1, 2) for x in (q, dout))
        self._kernel = kernel
        self._scale = problem.scale
        lowered = lower(plan, kernel.capabilities)
        held = {stage.held: pack(k, v, stage.held) for stage in (*plan.forward, *plan.backward)}
        self._forward = self._steps(plan.forward, lowered.forward, held)
        self._backward = self._steps(plan.backward, lowered.backward, held)

    @staticmethod
    def _steps(
        stages: tuple[Stage, ...], calls: tuple[tuple[Launch, ...], ...], held: dict[Any, torch.Tensor]
    ) -> list[tuple[torch.Tensor, tuple[Launch, ...]]]:
        """Return the K and V of each stage with the launches of the stage."""
        return [(held[stage.held], part) for stage, part in zip(stages, calls, strict=True)]

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's output, (B, heads, S / N, D), and its log-sum-exp, (B, heads, S / N)."""
        total = Merged(self._q)
        heads = slice(0, self._q.shape[1])
        for rows, launches in self._forward:
            attend(total, (self._q, *unpack(rows)), heads, launches, self._kernel, self._scale)
        out, lse = total.result
        return out.to(self._q.dtype), lse

    def backward(self, out: torch.Tensor, lse: torch.Tensor) -> list[torch.Tensor]:
        """Compute the gradients of the rank's queries and of the K and V of each stage.

        Args:
            out: Output of `forward`, (B, heads, S / N, D).
            lse: Log-sum-exp of `forward`, (B, heads, S / N).

        Returns:
            The gradient of the queries, (B, heads, S / N, D), then the gradients of K and V of each stage, (rows, 2, B,
                K, D).
        """
        dq = torch.zeros_like(self._q, dtype=lse.dtype)
        totals = []
        for rows, launches in self._backward:
            totals.append(torch.zeros_like(rows, dtype=lse.dtype))
            tensors = BackwardInputs(self._dout, self._q, *unpack(rows), out, lse)
            for launch in launches:
                parts = self._kernel.backward_many(tensors, launch, scale=self._scale)
                add_parts((dq, *unpack(totals[-1])), parts, launch)
        return [dq, *totals]


class OneCall:
    """Attention of the whole sequence by one call of a kernel.

    Args:
        problem: The attention problem.
        kernel: The kernel.
        inputs: q, k, v and the gradient of the output, (B, heads, S, D).
    """

    def __init__(self, problem: Problem, kernel: Kernel, inputs: list[torch.Tensor]) -> None:
        self._kernel = kernel
        self._inputs = inputs
        self._options = {"relation": Relation.CAUSAL, "scale": problem.scale}

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, (B, heads, S, D), and the log-sum-exp, (B, heads, S)."""
        return self._kernel.forward(*self._inputs[:3], **self._options)

    def backward(self, out: torch.Tensor, lse: torch.Tensor) -> object:
        """Return the gradients of q, k and v.

        Args:
            out: Output of `forward`, (B, heads, S, D).
            lse: Log-sum-exp of `forward`, (B, heads, S).
        """
        *qkv, dout = self._inputs
        return self._kernel.backward(BackwardInputs(dout, *qkv, out, lse), **self._options)


def seconds(work: Tiles | OneCall, device: str) -> float:
    """Return the seconds of one forward and backward; on a GPU the time between two events.

    Args:
        work: Runs the forward and the backward.
        device: `cpu` or `cuda`.
    """
    if device == "cpu":
        start = time.perf_counter()
        work.backward(*work.forward())
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work.backward(*work.forward())
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def tile_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for every length, degree, kernel and method. Kernels that fail are reported on stderr and skipped.

    Args:
        args: The command line.
    """
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    for degree in args.degrees:
        for problem in problems(args, degree):
            for name in args.kernels:
                try:
                    yield from measure_tiles(problem, choose_kernel(args.device, dtype, args.head_dim, name), args)
                except Exception as error:  # no memory, a missing operator, or a compiler error
                    said = f"{type(error).__name__}: {error}".splitlines()[0]
                    print(f"{name}, {problem.seq_len} tokens: {said}", file=sys.stderr)


def measure_tiles(problem: Problem, kernel: Kernel, args: argparse.Namespace) -> Iterator[Row]:
    """Measure in turn one call of the flash kernel, one call of this kernel, and every rank's tiles of every method.

    Args:
        problem: The attention problem.
        kernel: The kernel of the tiles.
        args: The command line.

    Yields:
        A row for each method.
    """
    inputs = problem.inputs(args.device)
    flash = CpuFlash() if args.device == "cpu" else CudaFlash()
    ours = OneCall(problem, kernel, inputs)
    comparable = args.dtype in flash.capabilities.dtypes and problem.head_dim <= flash.capabilities.max_head_dim
    theirs = ours if kernel.name == flash.name or not comparable else OneCall(problem, flash, inputs)
    ranks = {
        method: [Tiles(problem, method, rank, kernel, inputs) for rank in range(problem.degree)]
        for method in args.methods
    }
    rounds = []
    for _ in range(args.repeats + 1):
        own = seconds(ours, args.device)
        rounds.append(
            {
                "own": own,
                "flash": own if theirs is ours else seconds(theirs, args.device),
                **{method: [seconds(work, args.device) for work in works] for method, works in ranks.items()},
            }
        )
    for method, works in ranks.items():
        row = {"kernel": kernel.name, "method": method, "degree": problem.degree, "seq_len": problem.seq_len}
        yield row | compared_tiles(rounds[1:], method, [work.flops for work in works], comparable)


def compared_tiles(rounds: Sequence[dict[str, Any]], method: str, flops: Sequence[int], comparable: bool) -> Row:
    """Return the row of a method: ratios, times and TFLOP/s.

    Args:
        rounds: Seconds of each round: `own` and `flash` for one call each, and by method the seconds of every rank.
        method: Context-parallel method.
        flops: FLOPs of each rank.
        comparable: Whether there is a flash kernel to compare with.
    """
    degree = len(flops)
    slowest = [max(one[method]) for one in rounds]
    ratios = [degree * longest / one["own"] for longest, one in zip(slowest, rounds, strict=True)]
    row: Row = {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "ms": round(1e3 * statistics.median(slowest), 3),
        "whole_ms": round(1e3 * statistics.median(one["own"] for one in rounds), 3),
        "tflops": round(max(flops) / statistics.median(slowest) / 1e12, 4),
    }
    if comparable:
        against = [degree * longest / one["flash"] for longest, one in zip(slowest, rounds, strict=True)]
        row["ratio_to_flash"] = round(statistics.median(against), 4)
    return row

"""The recurrences of linear attention on one device: errors against float64, time and memory."""

import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from longshard.context.execution import linear_chunks
from longshard.context.execution.kernels.flash import is_installed
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.linear_attention import linear_attention
from scripts.benchmarks import attention_kernels
from scripts.benchmarks.linear_attention import KINDS
from scripts.gpu_blocks.block import Check, largest
from scripts.gpu_blocks.layer import memory_found, reset_memory

_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # relative errors of outputs and gradients
_GROWTH = 5.0  # largest growth of the time for four times the tokens; attention grows by 16, but is fast
_KERNELS, _NAME = 12, 90  # noted kernels of each row; letters of a name
Tensors = list[torch.Tensor | None]


def linear(check: Check) -> None:
    """Check each kind: errors of outputs and gradients, in runs of chunks and without; milliseconds and memory.

    At 8,192 and 32,768 tokens, by PyTorch, and by flash-linear-attention's kernels if fla-core is installed. The time
    of attention is noted, too.

    What must hold: outputs and gradients within 0.1 % (float32) and 2 % (bfloat16) of float64.

    Args:
        check: The run of the block.
    """
    errors: dict[str, float] = {}
    for kind, dtype, by in itertools.product(KINDS, _BOUNDS, _ways(check)):
        if by == "chunks" or dtype == torch.bfloat16:
            errors[f"{kind} {str(dtype).removeprefix('torch.')} by {by}"] = _error(check, kind, dtype, by)
            check.note(errors=errors)
    rows: list[dict[str, Any]] = []
    lengths, shape = ((256,), (2, 16)) if check.is_dry else ((8192, 32768), (32, 128))
    layers = [("attention", ""), *itertools.product(KINDS, _ways(check))]
    for length, (kind, by) in itertools.product(lengths, layers):
        same = [row["seconds"] for row in rows if (row["kind"], row["by"]) == (kind, by)]
        if same and check.left() < _GROWTH * same[-1]:
            check.note(left_out_for_time=f"{kind} {by}, {length} tokens")
            continue
        with _by(by):
            rows.append({"by": by} | _timed(check, kind, length, *shape))
        check.note(rows=rows)
    shown = {f"{row['kind']} {row['by']} {row['tokens']}": row["both_ms"] for row in rows}
    check.headline(f"largest error {largest(*errors.values()):.1e}; forward and backward, ms: {shown}")


def _ways(check: Check) -> tuple[str, ...]:
    """Return the implementations of the recurrence on this machine."""
    return ("chunks", "kernels") if check.device == "cuda" and is_installed("fla.ops") else ("chunks",)


def _by(way: str) -> AbstractContextManager[object]:
    """Return a context in which plain chunks compute the recurrence, or the operator's own choice."""
    operator = importlib.import_module("longshard.context.linear_attention")
    return mock.patch.object(operator, "runs_kernels", return_value=False) if way == "chunks" else nullcontext()


def inputs(kind: str, length: int, heads: int, dim: int, device: str) -> Tensors:
    """Return q, k, v, logarithms of decays, beta, and a cotangent, in float32, as in layers.

    Args:
        kind: The kind of linear attention.
        length: Tokens of the sequence.
        heads: Number of heads.
        dim: Size of a head.
        device: "cuda" or "cpu".
    """
    generator = torch.Generator(device).manual_seed(length)
    like = {"generator": generator, "device": device}
    q, k, v, cotangent = (torch.randn(1, length, heads, dim, **like) for _ in range(4))
    decay = -torch.rand(q.shape[: 4 if kind == "kimi_delta" else 3], **like)
    beta = None if kind == "mamba2" else torch.rand(q.shape[:3], **like)
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, decay, beta, cotangent]


def _results(tensors: Tensors, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return output and gradients. Decays and beta have at least float32."""
    precise = torch.promote_types(dtype, torch.float32)
    types = [dtype, dtype, dtype, precise, precise, dtype]
    *x, cotangent = (None if t is None else t.to(device, d) for t, d in zip(tensors, types, strict=True))
    x = [None if t is None else t.detach().requires_grad_() for t in x]
    out = linear_attention(Tokens(*x, None, 1.0), None)[0]
    return [out, *torch.autograd.grad(out, [t for t in x if t is not None], cotangent)]


def _error(check: Check, kind: str, dtype: torch.dtype, by: str) -> float:
    """Return the largest relative error of a result, against float64 on inputs with the same rounding."""
    tensors = inputs(kind, 200 if check.is_dry else 3000, 2, 16 if check.is_dry else 64, "cpu")
    precise = torch.float32 if dtype == torch.bfloat16 else dtype
    rounded = [None if t is None else t.to(precise if i in (3, 4) else dtype) for i, t in enumerate(tensors)]
    exact = _results(rounded, torch.float64, "cpu")
    worst = 0.0
    for run in (2, math.inf) if by == "chunks" else (math.inf,):
        with _by(by), mock.patch.dict(linear_chunks.LONGEST_RUN, {check.device: run}):
            results = _results(rounded, dtype, check.device)
        errors = [((a.cpu().double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]
        check.expect(
            largest(*errors) <= _BOUNDS[dtype], f"{kind}, {dtype}, {by}, runs of {run}: relative errors {errors}"
        )
        worst = largest(worst, *errors)
    return float(f"{worst:.2e}")


def _timed(check: Check, kind: str, length: int, heads: int, dim: int) -> dict[str, Any]:
    """Return a row: milliseconds of the forward, and of forward and backward; peak memory above the inputs."""
    device = check.device
    *x, cotangent = inputs(kind, length, heads, dim, device)
    dtype = torch.float32 if check.is_dry else torch.bfloat16
    x = [None if t is None else t.to(dtype if i < 3 else t.dtype).requires_grad_() for i, t in enumerate(x)]
    cotangent = cotangent.to(dtype)

    def forward() -> torch.Tensor:
        if kind == "attention":
            q, k, v = (t.transpose(1, 2) for t in x[:3])
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return linear_attention(Tokens(*x, None, 1.0), None)[0]

    leaves = [t for t in (x[:3] if kind == "attention" else x) if t is not None]
    repeats = 1 if check.is_dry else 3
    reset_memory(device)
    before = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0
    seconds = attention_kernels.seconds(forward, repeats, torch.device(device))
    both = attention_kernels.seconds(
        lambda: torch.autograd.grad(forward(), leaves, cotangent), repeats, torch.device(device)
    )
    row = {"kind": kind, "tokens": length, "heads": heads, "dim": dim, "seconds": round(5 * (seconds + both), 2)}
    row |= {"forward_ms": round(1e3 * seconds, 3), "both_ms": round(1e3 * both, 3)}
    if memory := memory_found(device):
        row["peak_gib"] = round(memory["allocated_gib"] - before, 3)
        row["kernels_ms"] = _longest_kernels(lambda: torch.autograd.grad(forward(), leaves, cotangent))
    return row


def _longest_kernels(work: Callable[[], object]) -> dict[str, float]:
    """Return the slowest kernels by name, with the milliseconds of all their calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    microseconds: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            microseconds[event.name[:_NAME]] += event.time_range.elapsed_us()
    return {name: round(us / 1e3, 2) for name, us in microseconds.most_common(_KERNELS)}

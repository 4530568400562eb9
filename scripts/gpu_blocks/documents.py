"""Attention of packed documents by each kernel: 131,072 tokens as one, four and many documents, and new lengths."""

import time
from typing import Any

import numpy as np
import torch

from longshard.context.execution.kernels.base import BackwardInputs, Terms
from longshard.context.execution.kernels.choose import KERNELS
from longshard.context.execution.ring import StagedExecution
from longshard.context.planning import mask
from longshard.context.planning.lowering import lower
from longshard.context.planning.methods import make_plan
from longshard.sharding.layout import contiguous
from scripts.gpu_blocks.block import Check

_SHAPE = (32, 8, 128)  # heads, key/value heads, head size of a layer of 8B
_BATCHES = 6  # batches of different lengths, for which cuDNN builds plans


def documents(check: Check) -> None:
    """Time attention forward and backward: the first call, which builds plans, and the faster of two later calls.

    131,072 tokens as 1, 4 and 64 documents by each kernel, and batches of new lengths. What must hold: they run.

    Args:
        check: The run of the block.
    """
    tokens = 512 if check.is_dry else 131_072
    kernels = ["math", "cpu_flash"] if check.is_dry else ["varlen", "cudnn_varlen", "cuda_flash", "cudnn"]
    lengths = {
        "1 document": [tokens],
        "4 documents": [tokens // 4] * 4,
        "4 odd documents": _lengths(tokens, 4, seed=0),
        "64 documents": _lengths(tokens, 64, seed=1),
    }
    rows: list[dict[str, Any]] = []
    for name, parts in lengths.items():
        for kernel in kernels:
            if kernel in ("cuda_flash", "cudnn") and len(parts) > 4:
                continue  # these kernels make a call for each document
            if not check.left():
                check.note(left_out_for_time=f"{name} by {kernel}")
                break
            times = [_seconds(check, kernel, parts) for _ in range(3)]
            row = {"documents": name, "kernel": kernel, "first_ms": round(1e3 * times[0], 1)}
            rows.append(row | {"ms": round(1e3 * min(times[1:]), 1)})
            check.note(rows=rows)
    check.note(batches=_batches(check, tokens, kernels[:2]))
    shown = {f"{row['documents']}, {row['kernel']}": row["ms"] for row in rows}
    check.headline(f"{tokens:,} tokens, ms: {shown}")


def _lengths(tokens: int, count: int, seed: int) -> list[int]:
    """Return lengths of documents, a few long and many short ones."""
    shares = np.random.default_rng(seed).lognormal(sigma=1.2, size=count)
    lengths = 1 + np.random.default_rng(seed).multinomial(tokens - count, shares / shares.sum())
    return lengths.tolist()


def _seconds(check: Check, kernel: str, lengths: list[int]) -> float:
    """Return the seconds of attention forward and backward of some documents on one rank."""
    heads, kv_heads, head_dim = (4, 2, 16) if check.is_dry else _SHAPE
    tokens = sum(lengths)
    dtype = torch.float32 if check.is_dry else torch.bfloat16
    generator = torch.Generator(check.device).manual_seed(tokens)

    def random(count: int) -> torch.Tensor:
        x = torch.randn(1, tokens, count, head_dim, device=check.device, dtype=dtype, generator=generator)
        return x.transpose(1, 2)

    q, k, v, dout = random(heads), random(kv_heads), random(kv_heads), random(heads)
    plan = make_plan(contiguous(tokens, 1), mask.documents(lengths, is_causal=True), "ring", 0)
    chosen = KERNELS[kernel]
    run = StagedExecution(lower(plan, chosen.capabilities), chosen, None, None)
    terms = Terms(head_dim**-0.5)
    _wait(check)
    started = time.perf_counter()
    out, lse = run.forward(q, k, v, terms=terms)
    run.backward(BackwardInputs(dout, q, k, v, out, lse), terms)
    _wait(check)
    return time.perf_counter() - started


def _batches(check: Check, tokens: int, kernels: list[str]) -> dict[str, list[float]]:
    """Return the milliseconds of batches whose documents have new lengths each time: the cost of new plans."""
    return {
        kernel: [
            round(1e3 * _seconds(check, kernel, _lengths(tokens, 8, seed=10 + batch)), 1) for batch in range(_BATCHES)
        ]
        for kernel in kernels
    }


def _wait(check: Check) -> None:
    if not check.is_dry:
        torch.cuda.synchronize()

"""Calls around 2^31 elements, at which 32-bit integers wrap: each kernel against calls of a few heads."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from longshard.context.execution import merging
from longshard.context.execution.kernels.base import BackwardInputs
from longshard.context.execution.kernels.choose import KERNELS
from longshard.context.execution.kernels.cuda import Cudnn, Varlen
from longshard.context.planning.lowering import Call, Launch
from longshard.context.planning.mask import Relation
from scripts.gpu_blocks.block import Check, largest

_BOUND = 1e-3  # relative error against calls of a few heads; they differ by the order of sums
_SCALE = 0.09
_PIECE = 65_536  # rows to compare at a time
_HEADS = 4  # query heads of a call far below 2^31 elements
Results = list[torch.Tensor]


def large(check: Check) -> None:
    """Check each kernel above 2^31 elements, rows at far offsets, and merging. At the end, run kernels without groups.

    What must hold: within 0.1 % of calls of four heads.

    Args:
        check: The run of the block.
    """
    rows, far_rows = (600, 700) if check.is_dry else (540_000, 1_300_000)
    kernels = ["math"] if check.is_dry else ["varlen", "cuda_flash", "cudnn", "efficient", "cudnn_varlen"]
    errors: dict[str, Any] = {"elements": rows * 32 * 128}

    def part(name: str, work: Callable[[], dict[str, float]], bound: float | None = _BOUND) -> None:
        try:
            errors[name] = work()
            if bound is not None:
                right = all(error <= bound for error in errors[name].values())
                check.expect(right, f"{name}: relative errors {errors[name]}")
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error)[:200]}"
            check.expect(bound is None, f"{name}: {errors[name]}")
        check.note(errors=errors)
        if not check.is_dry:
            torch.cuda.empty_cache()

    for name in kernels:
        part(name, lambda name=name: _queries(check, KERNELS[name], rows))
        part(f"{name}, far rows", lambda name=name: _far(check, KERNELS[name], far_rows))
    part("documents", lambda: _documents(check, KERNELS["math" if check.is_dry else "varlen"], rows))
    part("merging", lambda: _merging(check, rows))
    if not check.is_dry:  # no check: if both are right, this release of PyTorch needs no groups
        part("cudnn without groups", lambda: _queries(check, Cudnn(), rows), bound=None)
        part("documents by varlen without groups", lambda: _documents(check, Varlen(), rows), bound=None)
    wrong = [
        name for name, result in errors.items() if isinstance(result, dict) and not largest(*result.values()) <= _BOUND
    ]
    check.headline(f"{errors['elements'] / 2**31:.3f} x 2^31 elements; beyond the bound: {', '.join(wrong) or 'none'}")


def _random(check: Check, rows: int, heads: int, seed: int) -> torch.Tensor:
    """Return (1, heads, rows, 128), with the memory layout of a projection."""
    generator = torch.Generator(check.device).manual_seed(seed)
    size = (1, rows, heads, 8 if check.is_dry else 128)
    dtype = torch.float32 if check.is_dry else torch.bfloat16
    return torch.randn(size, generator=generator, device=check.device, dtype=dtype).transpose(1, 2)


def _error(result: torch.Tensor, right: torch.Tensor) -> float:
    """Return the relative error of (1, H, S, D) tensors, computed in pieces of rows: all in float64 would not fit."""
    wrong, norm = 0.0, 0.0
    for a, b in zip(result.split(_PIECE, 2), right.split(_PIECE, 2), strict=True):
        wrong += (a.double() - b.double()).square().sum().item()
        norm += b.double().square().sum().item()
    return float(f"{(wrong / norm) ** 0.5:.2e}")


def _worst(errors: dict[str, float], results: Results, right: Results) -> None:
    for name, result, wanted in zip(("out", "dq", "dk", "dv"), results, right, strict=True):
        errors[name] = largest(errors.get(name, 0.0), _error(result, wanted))


def _run(kernel: Any, inputs: Results, dout: torch.Tensor, relation: Relation = Relation.FULL) -> Results:
    out, lse = kernel.forward(*inputs, relation=relation, scale=_SCALE)
    return [out, *kernel.backward(BackwardInputs(dout, *inputs, out, lse), relation=relation, scale=_SCALE)]


def _copied(x: torch.Tensor, heads: slice) -> torch.Tensor:
    return x[:, heads].transpose(1, 2).contiguous().transpose(1, 2)


def _queries(check: Check, kernel: Any, rows: int) -> dict[str, float]:
    """Compare many queries of 32 heads over a few keys with the same kernel on 4 heads at a time."""
    q, dout = _random(check, rows, 32, 1), _random(check, rows, 32, 2)
    k, v = _random(check, 1024, 8, 3), _random(check, 1024, 8, 4)
    results = _run(kernel, [q, k, v], dout)
    errors: dict[str, float] = {}
    for first in range(0, 32, _HEADS):
        heads, kv_heads = slice(first, first + _HEADS), slice(first // _HEADS, first // _HEADS + 1)
        inputs = [_copied(q, heads), _copied(k, kv_heads), _copied(v, kv_heads)]
        right = _run(kernel, inputs, _copied(dout, heads))
        places = (heads, heads, kv_heads, kv_heads)
        _worst(errors, [x[:, place] for x, place in zip(results, places, strict=True)], right)
    return errors


def _far(check: Check, kernel: Any, rows: int) -> dict[str, float]:
    """Compare rows of 4 heads that lie 1,800 elements apart, as in messages of the exchange of heads, with copies."""
    head_dim = 8 if check.is_dry else 128
    wide = _random(check, rows, 1, 1).new_empty(rows, 1800)
    wide[:, : 8 * head_dim].normal_()
    q, dout = (part.view(1, rows, 4, head_dim).transpose(1, 2) for part in wide[:, : 8 * head_dim].chunk(2, 1))
    k, v = _random(check, 1024, 1, 3), _random(check, 1024, 1, 4)
    errors: dict[str, float] = {}
    everything = slice(None)
    right = _run(kernel, [_copied(q, everything), k, v], _copied(dout, everything))
    _worst(errors, _run(kernel, [q, k, v], dout), right)
    return errors


def _documents(check: Check, kernel: Any, rows: int) -> dict[str, float]:
    """Compare documents of 8,192 tokens and 32 heads in one launch with each document alone."""
    length = 100 if check.is_dry else 8192
    ends = [*range(0, rows, length), rows]
    spans = list(pairwise(ends))
    q, dout = _random(check, rows, 32, 1), _random(check, rows, 32, 2)
    k, v = _random(check, rows, 8, 3), _random(check, rows, 8, 4)
    alone = KERNELS["math" if check.is_dry else "cuda_flash"]
    if not kernel.capabilities.many:
        return {"left out, the kernel has one tile": 0.0}
    launch = Launch(tuple(Call(span, span, Relation.CAUSAL, fresh=True, fresh_keys=True) for span in spans))
    out, lse = kernel.forward_many(q, k, v, launch, scale=_SCALE)
    results = [out, *kernel.backward_many(BackwardInputs(dout, q, k, v, out, lse), launch, scale=_SCALE)]
    errors: dict[str, float] = {}
    for span in spans:
        part = slice(*span)
        inputs = [x[:, :, part].transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)]
        right = _run(alone, inputs[:3], inputs[3], Relation.CAUSAL)
        _worst(errors, [x[:, :, part] for x in results], right)
    return errors


def _merging(check: Check, rows: int) -> dict[str, float]:
    """Compare merging two results of 32 heads with merging 4 heads at a time."""
    out = _random(check, rows, 32, 1)
    total = _random(check, rows, 32, 2).float()
    lse, total_lse = (torch.randn(1, 32, rows, device=check.device) for _ in range(2))
    heads = [slice(first, first + _HEADS) for first in range(0, 32, _HEADS)]
    parts = [(_copied(total, place), total_lse[:, place].clone()) for place in heads]
    merging.merge(total, total_lse, out, lse)
    worst = 0.0
    for place, (part, part_lse) in zip(heads, parts, strict=True):
        merging.merge(part, part_lse, _copied(out, place), lse[:, place].contiguous())
        worst = largest(worst, _error(total[:, place], part))
    return {"out": worst}

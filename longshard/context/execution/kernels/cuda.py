"""Kernels of GPUs for one tile of attention or, in one launch, many tiles. Interface and shapes: see `base.py`.

All of them return the log-sum-exp in float32 and natural units. In the backward, all of them take the output and
log-sum-exp of the whole attention. Tests replace the operators, which are an argument of each kernel.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from longshard.context.execution.kernels.base import (
    QKV,
    BackwardInputs,
    Kernel,
    OutLse,
    hidden_pairs,
    repeated,
    summed,
)
from longshard.context.planning.capabilities import INDEX_LIMIT
from longshard.context.planning.lowering import Launch, is_large
from longshard.context.planning.mask import Relation
from longshard.sharding.ranges import Spans
from longshard.sharding.tensors import to_device


class _Aten(Kernel):
    """A kernel of operators of aten, or of stand-ins for them."""

    def __init__(self, ops: Any = torch.ops.aten) -> None:
        self._ops = ops


class _Flash(_Aten):
    """A kernel of FlashAttention-2's operators, for tiles or ragged batches (arXiv 2307.08691).

    lengths: cumulative lengths of queries and of keys, None for a tile, and the longest of each. kind: `Launch.kind`.
    """

    def _attend(
        self,
        qkv: Iterable[Tensor],
        lengths: tuple,
        kind: tuple[Relation, int],
        scale: float,
    ) -> OutLse:
        out, lse, *_ = self._ops._flash_attention_forward(
            *qkv,
            *lengths,
            0.0,
            kind[0] is Relation.CAUSAL,
            False,
            scale=scale,
            **_window(*kind),
        )
        return out, lse

    def _differentiate(
        self, inputs: BackwardInputs, lengths: tuple, kind: tuple[Relation, int], scale: float
    ) -> QKV:
        dout, *others = inputs
        random_state = _random_state(torch.uint64, dout.device)
        return self._ops._flash_attention_backward(
            dout,
            *others,
            *lengths,
            0.0,
            kind[0] is Relation.CAUSAL,
            *random_state,
            scale=scale,
            **_window(*kind),
        )


class CudaFlash(_Flash):
    """FlashAttention-2, with grouped heads and diagonals from the bottom right."""

    name = "cuda_flash"

    @override
    def forward(self, q, k, v, *, relation, scale):
        *_, n, size = q.shape
        m = k.shape[2]
        out, lse = self._attend(
            map(_rows, (q, k, v)), (None, None, n, m), (relation, m - n), scale
        )
        return _heads(out, size), lse

    @override
    def backward(self, inputs: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        dout, q, k, v, out, lse = inputs
        *_, n, size = q.shape
        m = k.shape[2]
        rows = map(_rows, (dout.to(q.dtype), q, k, v, out.to(q.dtype)))
        inputs = BackwardInputs(*rows, lse.contiguous())
        grads = self._differentiate(inputs, (None, None, n, m), (relation, m - n), scale)
        return tuple(_heads(x, size) for x in grads)


class Efficient(_Aten):
    """Memory-efficient attention, in float32 too, for heads of any size; it needs repeated heads (arXiv 2112.05682)."""

    name = "efficient"

    @override
    def forward(self, q, k, v, *, relation, scale):
        *_, n, size = q.shape
        m = k.shape[2]
        out, lse, *_ = self._ops._efficient_attention_forward(
            *map(_rows, (q, repeated(k, q.shape[1]), repeated(v, q.shape[1]))), self._bias(q, m, relation),
            None, None, n, m, 0.0, _mask_type(relation), True, scale=scale,
        )  # fmt: skip
        return _heads(out, size), lse[..., :n]

    @override
    def backward(self, inputs: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        dout, q, k, v, out, lse = inputs
        *_, n, size = q.shape
        m = k.shape[2]
        k_, v_ = (repeated(x, q.shape[1]) for x in (k, v))
        dout, out = (_rows(x.to(q.dtype)).contiguous() for x in (dout, out))
        # A padded row has probabilities exp(score - inf) = 0, as with the operator's own padding.
        lse = F.pad(lse, (0, -n % _LSE_MULTIPLE), value=torch.inf).contiguous()
        dq, *dkv, _ = self._ops._efficient_attention_backward(
            dout, *map(_rows, (q, k_, v_)), self._bias(q, m, relation), out, None, None, n, m, lse, 0.0,
            *_random_state(torch.int64, q.device), _mask_type(relation), False, scale=scale,
        )  # fmt: skip
        return _heads(dq, size), *(summed(_heads(x, size), k.shape[1]) for x in dkv)

    @staticmethod
    def _bias(q: Tensor, m: int, relation: Relation) -> Tensor | None:
        """Return an additive mask, (B, H, n, m), -inf for hidden pairs; None if the relation has no lower bound.

        Its rows begin at multiples of 16 elements, as the operator needs.
        """
        if not relation.lower:
            return None
        b, h, n, _ = q.shape
        bias = q.new_zeros(n, m + -m % 16)[:, :m]
        return bias.masked_fill_(hidden_pairs(relation, n, m, q.device), -torch.inf).expand(
            b, h, n, m
        )


class Cudnn(CudaFlash):
    """cuDNN's attention, with grouped heads, fastest on Hopper and later.

    It builds a plan for each new shape, and refuses single rows, which FlashAttention-2 computes.
    """

    name = "cudnn"

    @override
    def forward(self, q, k, v, *, relation, scale):
        if 1 in (q.shape[2], k.shape[2]):
            return super().forward(q, k, v, relation=relation, scale=scale)
        _check_square(relation, q.shape[2], k.shape[2])
        out, lse, *_ = self._ops._scaled_dot_product_cudnn_attention(
            *map(_aligned, (q, k, v)),
            None,
            True,
            0.0,
            relation is Relation.CAUSAL,
            False,
            scale=scale,
        )
        return out, lse.squeeze(-1) if lse.ndim == 4 else lse

    @override
    def backward(self, inputs: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        dout, q, k, v, out, lse = inputs
        if 1 in (q.shape[2], k.shape[2]):
            return super().backward(inputs, relation=relation, scale=scale)
        n = q.shape[2]
        m = k.shape[2]
        _check_square(relation, n, m)
        dout, out = _alike(*(_aligned(x.to(q.dtype)) for x in (dout, out)))
        return self._ops._scaled_dot_product_cudnn_attention_backward(
            dout, *map(_aligned, (q, k, v)), out, lse.contiguous().unsqueeze(-1), *_random_state(torch.int64, q.device),
            None, None, None, n, m, 0.0, relation is Relation.CAUSAL, scale=scale,
        )  # fmt: skip


class Varlen(_Flash):
    """FlashAttention-2 over a ragged batch: one launch for all calls of one relation, of all sequences."""

    name = "varlen"

    @override
    def forward_many(
        self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, *, scale: float
    ) -> OutLse:
        batch = q.shape[0]
        rows = _gathered(q, launch.q), _gathered(k, launch.kv), _gathered(v, launch.kv)
        lengths = _lengths(launch, batch, q.device)
        out, lse = self._attend(rows, lengths, launch.kind, scale)
        return (
            _by_sequence(out, batch, q.shape[3]),
            lse.unflatten(1, (batch, -1)).transpose(0, 1),
        )

    @override
    def backward_many(self, inputs: BackwardInputs, launch: Launch, *, scale: float) -> QKV:
        dout, q, k, v, out, lse = inputs
        batch, _, _, size = q.shape
        lengths = _lengths(launch, batch, q.device)
        dout, q, out = (_gathered(x.to(q.dtype), launch.q) for x in (dout, q, out))
        k, v = (_gathered(x, launch.kv) for x in (k, v))
        lse = _gathered_rows(lse, launch.q).t().contiguous()
        gathered = BackwardInputs(dout, q, k, v, out, lse)
        grads = self._differentiate(gathered, lengths, launch.kind, scale)
        return tuple(_by_sequence(x, batch, size) for x in grads)


class CudnnVarlen(Kernel):
    """cuDNN for large tiles, one launch each, and FlashAttention-2 in one launch for the others.

    cuDNN builds a plan for each new shape. `lowering.py` cuts large tiles to lengths that recur, and this kernel gives
    no more than `_MOST_SHAPES` shapes to cuDNN.

    Args:
        ops: The operators.
    """

    name = "cudnn_varlen"

    def __init__(self, ops: Any = torch.ops.aten) -> None:
        self._large = Cudnn(ops)
        self._others = Varlen(ops)
        self._shapes = set()

    @override
    def forward_many(
        self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, *, scale: float
    ) -> OutLse:
        return self._kernel_of(q, k, launch).forward_many(q, k, v, launch, scale=scale)

    @override
    def backward_many(self, inputs: BackwardInputs, launch: Launch, *, scale: float) -> QKV:
        kernel = self._kernel_of(inputs.q, inputs.k, launch)
        return kernel.backward_many(inputs, launch, scale=scale)

    def _kernel_of(self, q: Tensor, k: Tensor, launch: Launch) -> Kernel:
        """Return cuDNN for a launch of one large tile, and note its shape; else `Varlen`.

        After `_MOST_SHAPES` shapes a new shape gets `Varlen`, too.
        """
        if len(launch.calls) != 1 or not is_large(launch.calls[0], self.capabilities):
            return self._others
        shape = q.dtype, *q.shape[:2], k.shape[1], q.shape[3], *launch.longest, launch.kind
        if shape not in self._shapes and len(self._shapes) >= _MOST_SHAPES:
            return self._others
        self._shapes.add(shape)
        return self._large


_MOST_SHAPES = 256  # half a minute of plans, and no more, in a run
# custom_mask_type of the memory-efficient operators; 1 is from the top left
_CAUSAL_FROM_BOTTOM_RIGHT = 2
_LSE_MULTIPLE = 32  # the memory-efficient operators pad the log-sum-exp to a multiple of it


def _mask_type(relation: Relation) -> int:
    return _CAUSAL_FROM_BOTTOM_RIGHT if relation is Relation.CAUSAL else 0


def _check_square(relation: Relation, n: int, m: int) -> None:
    if relation.lower or (relation is Relation.CAUSAL and n != m):
        raise ValueError(
            f"cuDNN's attention cannot do {relation.value} of {n} queries and {m} keys, only the diagonal of a "
            "square; use another context_parallel_kernel"
        )


# ---- Layouts


def _aligned(x: Tensor) -> Tensor:
    """Return x as kernels can read it; a copy if needed.

    They read 16 bytes at once along the last dimension, and address no element at an offset of `INDEX_LIMIT` or more.
    """
    step = 16 // x.element_size()
    strides = x.stride()
    last = sum((length - 1) * stride for length, stride in zip(x.shape, strides, strict=True))
    fits = strides[-1] == 1 and x.storage_offset() % step == 0 and last < INDEX_LIMIT
    rows = zip(strides[:-1], x.shape, strict=False)
    fits = fits and not any(n > 1 and (stride % step or not stride) for stride, n in rows)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _readable(x: Tensor) -> Tensor:
    """Return x as kernels can read it, with zeros at the end of its last dimension up to a multiple of 8.

    Zeros add nothing to a score; their results are cut off.
    """
    return _aligned(F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x)


def _rows(x: Tensor) -> Tensor:
    """Return (B, H, S, D) as (B, S, H, D), with D padded to a multiple of 8."""
    return _readable(x).transpose(1, 2)


def _heads(x: Tensor, size: int) -> Tensor:
    """Undo `_rows`: return (B, H, S, D) with heads of a size."""
    return x[..., :size].transpose(1, 2)


def _window(relation: Relation, extra: int) -> dict[str, int]:
    """Return how many keys a query sees before and after the bottom-right diagonal; extra: number of keys - queries."""
    if not relation.lower:
        return {}
    return {"window_size_left": extra, "window_size_right": 0 if relation.upper else -1}


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of one shape with the same strides. If they differ, b is copied to the strides of a.

    If there are gaps between the rows of a, a is copied, too.
    """
    if a.stride() == b.stride():
        return a, b
    # b gets the strides of a, unless there are gaps between the rows of a
    b = torch.empty_like(a).copy_(b)
    return (a if a.stride() == b.stride() else torch.empty_like(b).copy_(a)), b


@lru_cache(maxsize=8)
def _random_state(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the random state that backwards require and, without dropout, do not read.

    If `dtype` is uint64, as for flash operators, the tensors have the shapes (2,) and (). Else both are scalars.
    """
    shape = (2,) if dtype == torch.uint64 else ()
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(
        (), dtype=dtype, device=device
    )


# ---- Many tiles in one launch


def _lengths(
    launch: Launch, batch: int, device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    """Return the cumulative lengths of queries and of keys, and the longest of each."""
    return _ends(launch.q, batch, device), _ends(launch.kv, batch, device), *launch.longest


def _gathered(x: Tensor, spans: Spans) -> Tensor:
    """Return (B, H, S, D) as (rows, H, D): sequence after sequence, and in each sequence span after span."""
    return _readable(_gathered_rows(x, spans))


def _gathered_rows(x: Tensor, spans: Spans) -> Tensor:
    """Return (B, H, S, ...) as (rows, H, ...); for one sequence a view if the spans are adjacent."""
    adjacent = all(a[1] == b[0] for a, b in pairwise(spans))
    rows = slice(spans[0][0], spans[-1][1]) if adjacent else _places(spans, x.device)
    return x.transpose(1, 2)[:, rows].flatten(0, 1)


def _by_sequence(x: Tensor, batch: int, size: int) -> Tensor:
    """Return (rows, H, D) as (B, H, rows of a sequence, size)."""
    return x[..., :size].unflatten(0, (batch, -1)).transpose(1, 2)


# Every layer has the same spans; without these caches, each would copy their indices to the GPU again.


@lru_cache(maxsize=64)
def _places(spans: Spans, device: torch.device) -> Tensor:
    """Return the index in its sequence of every gathered row."""
    return to_device(torch.cat([torch.arange(start, stop) for start, stop in spans]), device)


@lru_cache(maxsize=64)
def _ends(spans: Spans, batch: int, device: torch.device) -> Tensor:
    """Return cumulative lengths, with every span once for each sequence: (batch * spans + 1,) int32."""
    lengths = [stop - start for _ in range(batch) for start, stop in spans]
    return to_device(
        torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32), device
    )

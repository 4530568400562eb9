"""Rules of products. Rows stay on their rank, and a sum over a sharded index is a sum over ranks.

    result[i, k] = sum over j of a[i, j] b[j, k]        i or k sharded: the result, too
                                                        j sharded: sums of each rank, added up; the result is whole

If several indices are sharded over the same ranks, the first one of the result stays sharded, and operands are gathered
in the others. In softmax(q k^T) v, written by hand, queries stay, and keys and values are gathered.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from longshard.domain.dispatch import AnyTensor, DomainTensor, is_sharded, refuse_unless, rule
from longshard.domain.domain import Domain, shares_ranks
from longshard.domain.elementwise import own_part
from longshard.sharding.placement import added_up
from longshard.sharding.tensors import wide_type

Tensors = Sequence[AnyTensor]
_DOTS = "ΑΒΓΔΕΖΗΘΙΚΛΜ"
"""Names of the dimensions for which an equation has dots."""


def contracted(
    operands: Tensors,
    indices: Sequence[Sequence[Any]],
    result: Sequence[Any],
    compute: Callable[..., torch.Tensor],
) -> DomainTensor:
    """Return the sum of products of operands over all indices that the result lacks.

    A collective if operands move, or if a summed index is sharded.

    Args:
        operands: The operands, of any shape.
        indices: The names of the dimensions of each operand; a dimension of size 1 is broadcast.
        result: The names of the dimensions of the result.
        compute: Returns the sum of products of this rank's parts of the operands.
    """
    sizes = {}
    for x, own in zip(operands, indices, strict=True):
        for index, size in zip(own, x.shape, strict=True):
            if sizes.get(index, 1) == 1:
                sizes[index] = size
    chosen = {}

    def domain_of(names: Sequence[str]) -> Domain:
        return Domain(
            {dim: chosen[index] for dim, index in enumerate(names) if index in chosen}
        )

    for index in dict.fromkeys([*result, *chain(*indices)]):
        for x, own in zip(operands, indices, strict=True):
            axis = (
                x.domain.axes.get(own.index(index)) if is_sharded(x) and index in own else None
            )
            fits = axis is not None and axis.layout.length == sizes[index]
            if fits and not shares_ranks(axis, chosen.values()):
                chosen.setdefault(index, axis)
    out = compute(
        *(
            own_part(x, domain_of(own), tuple(sizes[index] for index in own))
            for x, own in zip(operands, indices, strict=True)
        )
    )
    for index, axis in chosen.items():
        if index not in result:
            out = added_up(out.to(wide_type(out.dtype)), axis.group).to(out.dtype)
    return DomainTensor(out, domain_of(result))


@rule("linear", first_only=True)
def _linear(function, x, weight, bias=None) -> DomainTensor:
    """Compute F.linear.

    weight: plain, or tensor parallel, cut by outputs (x whole) or by inputs (x has this rank's features).
    """
    if x.ndim - 1 in x.domain.axes:
        refuse_unless(not isinstance(weight, DTensor), "sharded features")
        out = _matmul(torch.matmul, x, weight.T)
        return out if bias is None else out + bias
    if not isinstance(weight, DTensor):
        return DomainTensor(F.linear(x.local, weight, bias), x.domain)
    is_part = x.shape[-1] != weight.shape[1]
    local = DTensor.from_local(
        x.local, weight.device_mesh, [Shard(x.ndim - 1) if is_part else Replicate()]
    )
    out = F.linear(local, weight, None if is_part else bias)
    if is_part:
        out = out.redistribute(placements=[Replicate()])
        out = out if bias is None else out + bias
    return DomainTensor(out.to_local(), x.domain)


def _batches(*operands: AnyTensor) -> list[list[str]]:
    """Return names of the dimensions before the last two of each operand."""
    return [[f"batch {dim}" for dim in range(x.ndim - 2, 0, -1)] for x in operands]


@rule("matmul", "bmm", "__matmul__", "__rmatmul__", "mm", "mv", "dot")
def _matmul(function, a, b) -> DomainTensor:
    """Compute the product. Any dimension may be sharded.

    The result has the batch dimensions, rows of a and columns of b.
    """
    if function.__name__ == "__rmatmul__":
        a, b = b, a
    before = _batches(a, b)
    rows = ["row"] * (a.ndim > 1)
    columns = ["column"] * (b.ndim > 1)
    result = [*max(before, key=len), *rows, *columns]
    indices = [*before[0], *rows, "inner"], [*before[1], "inner", *columns]
    return contracted([a, b], indices, result, torch.matmul)


@rule("cdist")
def _distances(function, a, b, *args, **kwargs) -> DomainTensor:
    """Compute the distances of a, (B, P, M), and b, (B, R, M). All dimensions except M may be sharded."""
    before = _batches(a, b)
    rows = [[*own, name, "inner"] for own, name in zip(before, ("row", "column"), strict=True)]
    inner = any(is_sharded(t) and t.ndim - 1 in t.domain.axes for t in (a, b))
    refuse_unless(not inner, "sharded coordinates")
    result = [*max(before, key=len), "row", "column"]
    return contracted([a, b], rows, result, lambda *parts: function(*parts, *args, **kwargs))


@rule("addmm", "baddbmm")
def _added_product(function, x, a, b, *, beta=1, alpha=1) -> DomainTensor:
    return beta * x + alpha * torch.matmul(a, b)


@rule("einsum")
def _einsum(function, equation, *operands) -> DomainTensor:
    """Compute the sum. Any index may be sharded that an operand has only once."""
    operands = (
        operands[0]
        if len(operands) == 1 and isinstance(operands[0], list | tuple)
        else operands
    )
    left, arrow, right = equation.replace(" ", "").partition("->")
    letters = left.split(",")
    dots = [
        x.ndim - len(own.replace("...", "")) for own, x in zip(letters, operands, strict=True)
    ]
    indices = [
        own.replace("...", _DOTS[len(_DOTS) - number :])
        for own, number in zip(letters, dots, strict=True)
    ]
    refuse_unless(
        all(len({*own}) == len(own) for own in indices),
        "an index that a tensor has twice",
    )
    if not arrow:
        right = "..." + "".join(sorted(c for c in {*left} - {*",."} if left.count(c) == 1))
    result = right.replace("...", _DOTS[len(_DOTS) - max(dots) :])
    return contracted(operands, indices, result, partial(torch.einsum, equation))

"""Rules of boolean masks: x[mask], masked_select and x[mask] = value.

Rows stay at their owners. The number of rows that the mask selects on each rank depends on data. It is summed over the
ranks, and on a GPU the host waits for it.
"""

from typing import Any

import torch

from longshard.domain.dispatch import (
    AnyTensor,
    DomainTensor,
    Unhandled,
    rule,
    unwrapped,
    wrapped,
)
from longshard.domain.domain import Axis, Domain
from longshard.domain.elementwise import merged, own_part
from longshard.sharding.exchange import all_reduce
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import union


@rule("masked_select")
def _masked_select(function, x, mask) -> DomainTensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return by_mask(x.expand(shape), mask.expand(shape))


def by_mask(x: AnyTensor, mask: AnyTensor) -> DomainTensor:
    """Return x[mask], with a mask of the first dimensions of x: rows in their order, at their owners.

    A collective, if x or the mask is sharded in a dimension of the mask: the host waits for the number of rows. The
    result is sharded like the first sharded dimension of the mask; the other dimensions of the mask are gathered.

    Args:
        x: The tensor, any shape.
        mask: The mask, bool, in the shape of the first dimensions of x.

    Raises:
        IndexError: The mask has other sizes than x.
    """
    dims = _dims_of(mask, x)
    domains = [wrapped(t).domain for t in (x, mask)]
    axes = [each.axes for each in domains if min(each.axes, default=dims) < dims]
    if not axes:
        return DomainTensor(unwrapped(x)[unwrapped(mask)], domains[0].moved(1 - dims))
    dim = min(axes[0])
    axis = axes[0][dim]
    domain = merged([{dim: axis}, domains[0].without(*range(dims)).axes])
    own = own_part(mask, Domain({dim: axis}), mask.shape)
    rows = own_part(x, domain, x.shape)[own]
    counts = own.flatten(dim + 1).sum(-1) if own.ndim > dim + 1 else own.long()
    layout = _layout_of_shown(counts.reshape(own.shape[:dim].numel(), axis.rows), axis)
    other_axes = domain.reduced(range(dims), keepdim=False).moved(1)
    return DomainTensor(rows, Domain(other_axes.axes | {0: Axis(layout, axis.group)}))


def assign_by_mask(x: DomainTensor, mask: AnyTensor, value: Any) -> None:
    """Set x[mask] = value in place; a collective if there are several rows.

    Args:
        x: The tensor, any shape.
        mask: The mask, bool, in the global shape of the first dimensions of x.
        value: A number, one row for all, or a row for each row of x[mask], over all ranks.

    Raises:
        IndexError: The mask has other sizes than x, or there are more or fewer rows.
        DomainOperatorError: There are several rows, and x is sharded in several dimensions of the mask.
    """
    dims = _dims_of(mask, x)
    own = own_part(mask, x.domain.without(*range(dims, x.ndim)), mask.shape)
    if isinstance(value, AnyTensor):
        domain = x.domain.reduced(range(dims), keepdim=False).moved(1)
        shape = 1, *x.shape[dims:]
        if value.ndim == len(shape) and value.shape[0] != 1:
            cut = [d for d in x.domain.axes if d < dims]
            if len(cut) > 1:
                raise Unhandled(
                    "rows for a mask of several sharded dimensions; use torch.where"
                )
            shown = by_mask(x.detach(), mask)
            domain = shown.domain
            shape = shown.shape
            if value.shape[0] != shape[0]:
                raise IndexError(f"a mask that shows {shape[0]} rows got {value.shape[0]} rows")
        value = own_part(value, domain, shape)
    x.local[own] = value


def _dims_of(mask: AnyTensor, x: AnyTensor) -> int:
    """Return the number of dimensions of a mask; raise an IndexError if x has other sizes in its first dimensions."""
    if tuple(mask.shape) != tuple(x.shape[: mask.ndim]):
        raise IndexError(
            f"a mask of shape {tuple(mask.shape)} does not fit the first dimensions of {tuple(x.shape)}; "
            "use a whole mask, not the mask of a shard"
        )
    return mask.ndim


def _layout_of_shown(counts: torch.Tensor, axis: Axis) -> AxisLayout:
    """Return which rank has which of the rows that a mask selects; a collective.

    counts: how many elements the mask selects in each row of this rank, (blocks, rows of this rank). A block is one
    index of all dimensions before the sharded one.
    """
    ranges = sorted(
        (start, stop, rank)
        for rank, own in enumerate(axis.layout.ranges)
        for start, stop in own
    )
    own_places = [place for place, (*_, rank) in enumerate(ranges) if rank == axis.rank]
    shown = counts.new_zeros(len(counts), len(ranges))
    sizes = [stop - start for start, stop, rank in ranges if rank == axis.rank]
    for place, part in zip(own_places, counts.split(sizes, 1), strict=True):
        shown[:, place] = part.sum(1)
    ends = all_reduce(shown, axis.group).flatten().cumsum(0).tolist()
    owners = [rank for *_, rank in ranges] * len(counts)
    parts = [*zip([0, *ends], ends, owners, strict=False)]
    shards = (
        union((start, stop) for start, stop, owner in parts if owner == rank)
        for rank in range(axis.degree)
    )
    return AxisLayout("shown", ends[-1] if ends else 0, tuple(shards))

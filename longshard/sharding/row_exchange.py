"""Exchange of rows: each rank states which rows of an axis it wants, and gets them from their owners.

A halo, a change of layout, a gather and a scatter are exchanges. The adjoint adds up the gradients of a row at its
owner.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from longshard.sharding.exchange import all_to_all
from longshard.sharding.layout import AxisLayout
from longshard.sharding.movement import Movement, plan_movement
from longshard.sharding.ranges import Range, Wanted, size
from longshard.sharding.tensors import wide_type, with_adjoint


def exchange(
    x: torch.Tensor,
    layout: AxisLayout,
    wanted: Sequence[Sequence[Range]],
    *,
    dim: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the rows that this rank wants, range after range in dimension `dim`; differentiable, a collective.

    Rows beyond the ends of the axis are zeros. The adjoint adds up the gradients of all copies of a row: first the
    copies on its owner, then the copies on other ranks, in the order of the ranks.

    Args:
        x: The shard of this rank, any shape with `layout.local_length(rank)` rows in `dim`.
        layout: Which rank owns which rows.
        wanted: The half-open ranges that each rank wants; they may overlap. The same on every rank.
        dim: The sharded dimension.
        group: The group of the ranks.

    Raises:
        ValueError: The shard has another length, the number of ranks is another, or a range is inverted.
    """
    rank = group.rank()
    wanted = tuple(map(tuple, wanted))
    _check_wanted(x.shape[dim], layout, wanted, group)
    movement = plan_movement(layout.ranges, wanted, rank)

    def fetched(x: torch.Tensor) -> torch.Tensor:
        result = _with_rows(x, movement.rows, dim)
        target = result.movedim(dim, 0)
        for start, stop in movement.outside:
            target[start:stop] = 0
        _move(x.movedim(dim, 0), target, movement, group, add=False)
        return result

    def returned(gradient: torch.Tensor) -> torch.Tensor:
        # Many ranks may have a copy of a row: add up their gradients in a wide type.
        exact = wide_type(gradient.dtype)
        result = _with_rows(gradient, layout.local_length(rank), dim, exact)
        _move(gradient.movedim(dim, 0), result.movedim(dim, 0), movement, group, add=True)
        return result.to(gradient.dtype)

    return with_adjoint(x, fetched, returned)


def _check_wanted(
    rows: int,
    layout: AxisLayout,
    wanted: Wanted,
    group: dist.ProcessGroup,
) -> None:
    rank = group.rank()
    if (
        rows != layout.local_length(rank)
        or len(wanted) != layout.degree
        or layout.degree != group.size()
    ):
        raise ValueError(
            f"exchange got {rows} rows and ranges for {len(wanted)} of {group.size()} ranks; the layout has "
            f"{layout.local_length(rank)} rows for this rank and {layout.degree} ranks"
        )
    if any(start > stop for ranges in wanted for start, stop in ranges):
        raise ValueError(
            f"exchange was asked for a range that ends before it begins, in {wanted[rank][:4]}; order its ends"
        )


def _with_rows(
    x: torch.Tensor, rows: int, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return an uninitialised tensor like `x`, (..., rows, ...), with another number of rows in `dim`."""
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_empty(shape, dtype=dtype)


def _move(
    rows: torch.Tensor,
    target: torch.Tensor,
    movement: Movement,
    group: dist.ProcessGroup,
    *,
    add: bool,
) -> None:
    """Send rows to the ranks that want them and write them; with `add`, send gradients to the owners and add them up.

    rows: The rows that this rank has, (rows, ...). target: The result, (rows, ...), uninitialised.
    """
    sent, received = (
        (movement.received, movement.sent) if add else (movement.sent, movement.received)
    )
    own = group.rank()
    shape = rows.shape[1:]
    width = shape.numel()
    parts = [
        rows[start:stop].reshape(-1)
        for r, places in enumerate(sent)
        if r != own
        for start, stop in places
    ]
    buffer = torch.cat(parts) if parts else rows.new_empty(0)
    send_sizes, counts = (
        [size(p) * width * (r != own) for r, p in enumerate(x)] for x in (sent, received)
    )
    arrived, pending = all_to_all(buffer, send_sizes, counts, group, kind="exchange")
    # The rows of this rank fill the target: write them instead of adding them to zeros.
    is_first = add and received[own] == ((0, target.shape[0]),)
    if add and not is_first:
        target.zero_()
    # Copy the rows of this rank while the other rows are sent.
    for (start, stop), place in zip(sent[own], received[own], strict=True):
        put_rows(target, [place], rows[start:stop], add=add and not is_first)
    pending.wait()
    for rank, (piece, places) in enumerate(zip(arrived.split(counts), received, strict=True)):
        if rank != own:
            put_rows(target, places, piece.view(size(places), *shape), add=add)


def put_rows(
    rows: torch.Tensor, places: Sequence[Range], piece: torch.Tensor, *, add: bool
) -> None:
    """Write, or add, rows to ranges of a tensor, in place.

    Args:
        rows: The tensor to change, (rows, ...).
        places: The ranges of `rows`.
        piece: The new rows, (rows, ...), range after range.
        add: Whether to add to the present rows.
    """
    offset = 0
    for start, stop in places:
        part = piece[offset : offset + stop - start]
        if add:
            rows[start:stop].add_(part)  # not `+=`, which also copies the rows onto themselves
        else:
            rows[start:stop] = part
        offset += stop - start

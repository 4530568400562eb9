"""A sharded axis, the rows of it that a rank wants, and their exchange.

Each rank states which rows of an axis it wants, and gets them from their owners. A halo, a change of layout, a gather
and a scatter are exchanges. The adjoint adds up the gradients of a row at its owner. Rows beyond the ends are zeros.
`fetch` exchanges rows only if some rank wants rows that it does not own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshard.sharding.exchange import all_to_all
from longshard.sharding.layout import AxisLayout, sized
from longshard.sharding.movement import Movement, plan_movement
from longshard.sharding.ranges import (
    Range,
    Ranges,
    Shards,
    Spans,
    Wanted,
    difference,
    intersection,
    size,
    union,
)
from longshard.sharding.tensors import planned, wide_type, with_adjoint


@dataclass(frozen=True)
class Axis:
    """A sharded axis.

    Attributes:
        layout: Which rank owns which rows.
        group: The group of the ranks.

    Raises:
        ValueError: The layout has another number of ranks than the group.
    """

    layout: AxisLayout
    group: ProcessGroup

    def __post_init__(self) -> None:
        if self.layout.degree != self.group.size():
            raise ValueError(
                f"a layout for {self.layout.degree} ranks does not fit a group of {self.group.size()}; give one size "
                "for each rank of the group, 0 if it has no rows"
            )

    @property
    def degree(self) -> int:
        """The number of ranks."""
        return self.layout.degree

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank()

    @property
    def rows(self) -> int:
        """The number of rows of this rank."""
        return self.layout.local_length(self.rank)


def layout_of(axis: Axis | None, length: int) -> tuple[AxisLayout, int]:
    """Return the layout of a dimension and the number of this rank in it.

    Args:
        axis: The sharded axis; None means that one rank, number 0, has all rows.
        length: Number of rows without an axis.
    """
    return (sized([length]), 0) if axis is None else (axis.layout, axis.rank)


@planned
def plan_rows(owned: Shards, length: int, wanted: Wanted, periodic: bool) -> tuple[Wanted, str]:
    """Return the rows that each rank wants, without empty ranges, and their source.

    If the axis is periodic, the rows are on the axis. The source is `own` (each rank wants exactly its own rows),
    `local` (no rank wants rows of another rank) or `ranks`. The wishes of all ranks decide it, so that either all ranks
    communicate or none does.

    Args:
        owned: For each rank, the rows that it owns.
        length: Number of rows of the whole dimension.
        wanted: For each rank, the rows that it wants. Numbers below 0 or from `length` on are beyond the ends.
        periodic: Whether rows beyond one end are the rows at the other end. Otherwise they are zeros.
    """
    if periodic:
        wanted = tuple(
            tuple(p for part in parts for p in wrapped(part, length)) for parts in wanted
        )
    wanted = tuple(tuple(part for part in parts if part[0] < part[1]) for parts in wanted)
    if wanted == owned:
        return wanted, "own"
    whole = ((0, length),)
    foreign = (
        difference(intersection(union(parts), whole), own)
        for parts, own in zip(wanted, owned, strict=True)
    )
    return wanted, "ranks" if any(foreign) else "local"


def wrapped(part: Range, length: int) -> list[Range]:
    """Return a range of a periodic axis as ranges within [0, length).

    Args:
        part: The range, which may leave the axis.
        length: Number of rows of the axis.

    Raises:
        ValueError: The axis has no rows, and the range is not empty.
    """
    start, stop = part
    if start < stop and not length:
        raise ValueError(
            "a periodic axis of length 0 has no rows; give it at least one row, or zeros as boundary"
        )
    pieces = []
    while start < stop:
        first = start % length
        step = min(stop - start, length - first)
        pieces.append((first, first + step))
        start += step
    return pieces


def fetch(
    x: Tensor, axis: Axis | None, wanted: Wanted, dim: int, *, periodic: bool = False
) -> Tensor:
    """Return the rows of dimension `dim` that this rank wants; differentiable.

    Nothing is copied if every rank wants its own rows. Nothing is sent if no rank wants rows of another rank. Otherwise
    it is one exchange.

    Args:
        x: The shard of this rank, any shape.
        axis: The sharded axis; None if every rank has the dimension whole.
        wanted: For each rank of the axis, the rows that it wants; the same on all ranks. Without an axis, one entry.
        dim: The dimension.
        periodic: Whether rows beyond one end are the rows at the other end. Otherwise they are zeros.
    """
    layout, rank = layout_of(axis, x.shape[dim])
    wanted, source = plan_rows(layout.ranges, layout.length, wanted, periodic)
    if source == "own":
        return x
    if source == "local":
        pieces = plan_pieces(layout.ranges[rank], layout.length, wanted[rank])
        return put_together(x, pieces, dim)
    return exchange(x, axis, wanted, dim)


Pieces = tuple[tuple[bool, int, int], ...]
"""Rows of a dimension, in parts: (whether they are rows of the shard, start, stop). The other parts are zeros."""


@planned
def plan_pieces(owned: Ranges, length: int, wanted: Spans) -> Pieces:
    """Return the wanted rows of an axis as pieces: rows of the shard, and zeros beyond the ends.

    Args:
        owned: The rows of this rank.
        length: Number of rows of the axis.
        wanted: The wanted rows; this rank owns all of them that are on the axis.
    """
    pieces = []
    for part in wanted:
        parts = [(*x, False) for x in difference((part,), ((0, length),))]
        parts += [(*x, True) for x in intersection((part,), owned)]
        for start, stop, is_own in sorted(parts):
            place = size(intersection(owned, ((0, start),))) if is_own else 0
            pieces.append((is_own, place, place + stop - start))
    return tuple(pieces)


@planned
def _has_copies(pieces: Pieces) -> bool:
    """Return whether a row of the shard occurs more than once: then the backward adds up its gradients."""
    taken = [(start, stop) for is_own, start, stop in pieces if is_own]
    return size(union(taken)) < size(taken)


def put_together(x: Tensor, pieces: Pieces, dim: int) -> Tensor:
    """Return the pieces of a dimension, one after another: rows of the shard, or zeros. Differentiable; sends nothing.

    Args:
        x: The shard of this rank, any shape.
        pieces: The pieces.
        dim: The dimension.
    """
    dtype = x.dtype
    if x.is_floating_point() and _has_copies(pieces):
        x = x.to(wide_type(dtype))
    # an empty part of x, so that a rank without rows joins the backward
    rows = [x.narrow(dim, 0, 0)]
    for is_own, start, stop in pieces:
        length = stop - start
        rows.append(
            x.narrow(dim, start, length) if is_own else with_rows(x, length, dim).zero_()
        )
    return torch.cat(rows, dim).to(dtype)


def connected(empty: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return an empty result that depends on the inputs, so that every rank joins the exchanges of the backward.

    The result is linear in each input, as a convolution is in rows and weights: derivatives depend on the other inputs.

    Args:
        empty: A tensor without elements, any shape.
        *inputs: The tensors that the result depends on, any shape; None is skipped.
    """
    factors = [1 + x.reshape(-1)[:0].sum() for x in inputs if x is not None]
    return empty + math.prod(factors)


# ---- Exchange


def exchange(x: Tensor, axis: Axis, wanted: Wanted, dim: int) -> Tensor:
    """Return the rows that this rank wants, range after range in dimension `dim`; differentiable, a collective.

    Rows beyond the ends of the axis are zeros. The adjoint adds up the gradients of all copies of a row: first the
    copies on its owner, then the copies on other ranks, in the order of the ranks.

    Args:
        x: The shard of this rank, any shape with `axis.rows` rows in `dim`.
        axis: The sharded axis.
        wanted: The half-open ranges that each rank wants; they may overlap. The same on every rank.
        dim: The sharded dimension.

    Raises:
        ValueError: The shard has another length, the number of ranks is another, or a range is inverted.
    """
    if x.shape[dim] != axis.rows or len(wanted) != axis.degree:
        raise ValueError(
            f"exchange got {x.shape[dim]} rows and ranges for {len(wanted)} of {axis.degree} ranks; "
            f"the layout has {axis.rows} rows for this rank"
        )
    if any(start > stop for ranges in wanted for start, stop in ranges):
        raise ValueError(
            f"exchange was asked for a range that ends before it begins, in {wanted[axis.rank][:4]}; order its ends"
        )

    def fetched(x: Tensor) -> Tensor:
        movement = plan_movement(axis.layout.ranges, wanted, axis.rank)
        result = with_rows(x, movement.rows, dim)
        target = result.movedim(dim, 0)
        for start, stop in movement.outside:
            target[start:stop] = 0
        _move(x.movedim(dim, 0), target, movement, axis.group, add=False)
        return result

    return with_adjoint(x, fetched, lambda gradient: returned_rows(gradient, axis, wanted, dim))


def returned_rows(gradient: Tensor, axis: Axis, wanted: Wanted, dim: int) -> Tensor:
    """Return the gradients of this rank's rows, (..., rows, ...): sums over the ranks that wanted them; a collective.

    It is the adjoint of `exchange`. Sums are in float32 at least.

    Args:
        gradient: The gradients of the rows that this rank wanted, (..., wanted rows, ...), range after range.
        axis: The sharded axis.
        wanted: The ranges that each rank wanted.
        dim: The sharded dimension.
    """
    exact = wide_type(gradient.dtype)
    movement = plan_movement(axis.layout.ranges, wanted, axis.rank)
    result = with_rows(gradient, axis.rows, dim, exact)
    _move(gradient.movedim(dim, 0), result.movedim(dim, 0), movement, axis.group, add=True)
    return result.to(gradient.dtype)


def with_rows(x: Tensor, rows: int, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised tensor like x, (..., rows, ...), with another number of rows in `dim`.

    Args:
        x: The tensor, any shape.
        rows: Number of rows of the result.
        dim: The dimension of the rows.
        dtype: The type of the elements; None means the type of x.
    """
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_empty(shape, dtype=dtype)


def _move(
    rows: Tensor,
    target: Tensor,
    movement: Movement,
    group: ProcessGroup,
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
    buffer = torch.cat([rows.new_empty(0), *parts])
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


def put_rows(rows: Tensor, places: Sequence[Range], piece: Tensor, *, add: bool) -> None:
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

"""A sharded axis, and rows that a rank wants of it: from other ranks only if some rank lacks them, and zeros."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from longshard.sharding.exchange import exchange
from longshard.sharding.layout import AxisLayout, sized
from longshard.sharding.ranges import (
    Range,
    Ranges,
    Wanted,
    difference,
    intersection,
    size,
    union,
)
from longshard.sharding.tensors import planned, wide_type


@dataclass(frozen=True)
class Axis:
    """A sharded axis: the ranks of `group` own its rows as `layout` says."""

    layout: AxisLayout
    group: dist.ProcessGroup

    def __post_init__(self) -> None:
        if self.layout.degree != self.group.size():
            raise ValueError(
                f"a layout for {self.layout.degree} ranks does not fit a group of {self.group.size()}; give one size "
                "for each rank of the group, 0 if it has no rows"
            )

    @property
    def degree(self) -> int:
        return self.layout.degree

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank()

    @property
    def rows(self) -> int:
        return self.layout.local_length(self.rank)


def layout_of(axis: Axis | None, length: int) -> tuple[AxisLayout, int]:
    """Return the layout of a dimension and this rank's number in it; without an axis, of one rank that has all rows."""
    return (sized([length]), 0) if axis is None else (axis.layout, axis.rank)


@planned
def plan_rows(
    owned: tuple[Ranges, ...], length: int, wanted: Wanted, periodic: bool
) -> tuple[Wanted, str]:
    """Return the rows that each rank wants, and their source.

    The source is `own` (each rank wants exactly the rows that it owns), `local` (no rank wants rows of another rank) or
    `ranks`. The wishes of all ranks decide it, so that either all ranks communicate or none does.

    Args:
        owned: the rows that each rank owns.
        length: the number of rows of the whole dimension.
        wanted: the rows that each rank wants; numbers below 0 or from `length` on are beyond the ends.
        periodic: whether rows beyond one end are the rows at the other end. Otherwise they are zeros.
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
    """Return a range of a periodic axis as ranges within [0, length)."""
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
    x: torch.Tensor, axis: Axis | None, wanted: Wanted, dim: int, *, periodic: bool = False
) -> torch.Tensor:
    """Return the rows of dimension `dim` that this rank wants, differentiable; zeros beyond the ends, unless periodic.

    axis: None if every rank has the dimension whole. wanted: of every rank of the axis, the same on all of them; of
    this rank alone without an axis. Nothing is copied if every rank wants its own rows, and nothing is sent if no rank
    wants rows of another one; else it is one exchange.
    """
    layout, rank = layout_of(axis, x.shape[dim])
    wanted, source = plan_rows(layout.ranges, layout.length, wanted, periodic)
    if source == "own":
        return x
    if source == "local":
        pieces = plan_pieces(layout.ranges[rank], layout.length, wanted[rank])
        return put_together(x, {dim: pieces})
    return exchange(x, layout, wanted, dim=dim, group=axis.group)


Pieces = tuple[tuple[bool, int, int], ...]
"""Rows of a dimension as parts (is of the shard, start, stop); rows of the other parts are zeros."""


@planned
def plan_pieces(owned: Ranges, length: int, wanted: tuple[Range, ...]) -> Pieces:
    """Return the rows wanted of an axis, which are all owned, and zeros beyond the ends."""
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
    """Return whether a row of the shard is there more than once, so that gradients are added up."""
    taken = [(start, stop) for is_own, start, stop in pieces if is_own]
    return size(union(taken)) < size(taken)


def put_together(x: torch.Tensor, pieces: dict[int, Pieces]) -> torch.Tensor:
    """Return the rows of the shard x that the pieces of each dimension name; differentiable, nothing is sent."""
    for dim, parts in pieces.items():
        dtype = x.dtype
        shape = [*x.shape]
        if x.is_floating_point() and _has_copies(parts):
            x = x.to(wide_type(dtype))
        # so that every rank joins the backward
        rows = [x.narrow(dim, 0, 0)]
        for is_own, start, stop in parts:
            shape[dim] = stop - start
            rows.append(x.narrow(dim, start, stop - start) if is_own else x.new_zeros(shape))
        x = torch.cat(rows, dim).to(dtype)
    return x


def connected(empty: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Return a result without elements that depends on the inputs: every rank joins the exchanges of the backward.

    It is linear in each input, as a convolution is in rows and weights: derivatives depend on the other inputs.
    """
    factors = [1 + x.reshape(-1)[:0].sum() for x in inputs if x is not None]
    return empty + math.prod(factors)

"""Which rows each rank sends to which, and where they stand in its result: integers, before any row moves."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshard.sharding.ranges import (
    Offsets,
    Range,
    Ranges,
    Wanted,
    difference,
    intersection,
    size,
    union,
)
from longshard.sharding.tensors import planned


@dataclass(frozen=True)
class Movement:
    """What one rank sends and receives in an exchange of rows.

    sent[r]: places in its shard that go to rank r, in order; received[r]: places in its result that come from rank r.
    rows: number of rows of the result; those at the places `outside` come from no rank.
    """

    sent: tuple[tuple[Range, ...], ...]
    received: tuple[tuple[Range, ...], ...]
    rows: int
    outside: Ranges


@planned
def plan_movement(owned: tuple[Ranges, ...], wanted: Wanted, rank: int) -> Movement:
    """Return what `rank` sends and receives when every rank r owns the ranges owned[r] and wants wanted[r]."""
    own = Offsets(owned[rank])
    sent = tuple(tuple(place for _, place in common_parts(ranges, own)) for ranges in wanted)
    received = tuple(
        tuple(place for place, _ in common_parts(wanted[rank], Offsets(ranges)))
        for ranges in owned
    )
    rows = size(wanted[rank])
    outside = difference(
        union([(0, rows)]), union(part for places in received for part in places)
    )
    return Movement(sent, received, rows, outside)


def common_parts(wanted: Sequence[Range], owned: Offsets) -> list[tuple[Range, Range]]:
    """Return the parts of `wanted` that one rank owns, in order: (place in the wanted rows, place in the shard)."""
    parts = []
    before = 0
    for start, stop in wanted:
        for first, last in intersection(union([(start, stop)]), owned.ranges):
            place = owned(first)
            parts.append(
                ((before + first - start, before + last - start), (place, place + last - first))
            )
        before += stop - start
    return parts

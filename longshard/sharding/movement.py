"""Plan which rows each rank sends to which rank, and at which places of its result they stand. No row moves here."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshard.sharding.ranges import (
    Offsets,
    Range,
    Ranges,
    Shards,
    Wanted,
    difference,
    intersection,
    size,
    union,
)
from longshard.sharding.tensors import planned


@dataclass(frozen=True)
class Movement:
    """The rows that one rank sends and receives in an exchange.

    Attributes:
        sent: For each rank r, the places in this rank's shard that go to r, in order.
        received: For each rank r, the places in this rank's result that come from r.
        rows: Number of rows of the result.
        outside: The places of the result that come from no rank.
    """

    sent: Wanted
    received: Wanted
    rows: int
    outside: Ranges


@planned
def plan_movement(owned: Shards, wanted: Wanted, rank: int) -> Movement:
    """Return the rows that a rank sends and receives.

    Args:
        owned: For each rank, the ranges that it owns.
        wanted: For each rank, the ranges that it wants.
        rank: The rank.
    """
    own = Offsets(owned[rank])
    sent = tuple(tuple(place for _, place in common_parts(ranges, own)) for ranges in wanted)
    received = tuple(
        tuple(place for place, _ in common_parts(wanted[rank], Offsets(ranges)))
        for ranges in owned
    )
    rows = size(wanted[rank])
    outside = difference(((0, rows),), union(part for places in received for part in places))
    return Movement(sent, received, rows, outside)


def common_parts(wanted: Sequence[Range], owned: Offsets) -> list[tuple[Range, Range]]:
    """Return the parts of `wanted` that one rank owns, in order.

    Args:
        wanted: The ranges that another rank wants.
        owned: The ranges that the rank owns.

    Returns:
        Pairs: the range of places in the wanted rows, and the range of places in the shard.
    """
    parts = []
    before = 0
    for start, stop in wanted:
        for first, last in intersection(((start, stop),), owned.ranges):
            place = owned(first)
            parts.append(
                ((before + first - start, before + last - start), (place, place + last - first))
            )
        before += stop - start
    return parts

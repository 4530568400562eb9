"""Windows and tiles of an axis of neighbourhood attention, in integers. Plans are constants of compiled code."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from longshard.sharding.ranges import Range, Ranges
from longshard.sharding.tensors import planned

Hood = tuple[int, int, int, bool]
"""The fields of a `Neighborhood`, as plain data."""


# of each key, for the backward; if tiles overlap more, the backward cuts them out again
_COPIES_KEPT = 8


class Neighborhood(NamedTuple):
    """The neighbourhood of one axis; stride is at most kernel, and kernel * dilation at most the axis' length."""

    kernel: int
    dilation: int = 1
    stride: int = 1
    causal: bool = False

    def window(self, place: int, length: int) -> Range:
        """Return the keys [first, stop) of the query at `place`, in places of its class, which has `length` rows."""
        group = place - place % self.stride
        if self.causal:
            leader = min(group + self.stride - 1, length - 1)
            return max(leader - self.kernel + 1, 0), place + 1
        leader = min(group + self.stride // 2, length - 1)
        first = min(max(leader - self.kernel // 2, 0), length - self.kernel)
        return first, first + self.kernel


class Segment(NamedTuple):
    """Consecutive queries of a class, and the keys that they see together: [first, stop) in places of the class."""

    remainder: int
    length: int
    queries: Range
    keys: Range

    def rows(self, places: Range, dilation: int) -> np.ndarray:
        """Return the rows of the axis at these places."""
        return np.arange(*places, dtype=np.int64) * dilation + self.remainder


def segments(ranges: Sequence[Range], length: int, hood: Neighborhood) -> Iterator[Segment]:
    """Yield the queries at rows `ranges` of an axis of `length` rows, range after range and class after class."""
    step = hood.dilation
    for start, stop in ranges:
        for remainder in sorted(row % step for row in range(start, min(stop, start + step))):
            first, end, rows = (-(-(row - remainder) // step) for row in (start, stop, length))
            # Neither end of a window moves back from query to query, and neighbouring windows leave no gap.
            keys = hood.window(first, rows)[0], hood.window(end - 1, rows)[1]
            yield Segment(remainder, rows, (first, end), keys)


@planned
def wanted_rows(owned: tuple[Ranges, ...], length: int, hood: Hood) -> tuple[Ranges, ...]:
    """Return for each rank the rows that its queries see; owned: by each rank, of an axis of `length` rows."""
    found = []
    fields = Neighborhood(*hood)
    for ranges in owned:
        seen = np.zeros(length + 2, dtype=np.int8)
        for segment in segments(ranges, length, fields):
            seen[segment.rows(segment.keys, fields.dilation) + 1] = 1
        ends = np.flatnonzero(np.diff(seen)).tolist()
        found.append(tuple(zip(ends[::2], ends[1::2], strict=True)))
    return tuple(found)


class Tiles(NamedTuple):
    """Tiles of an axis whose queries see keys in the same way, and the places of these in the rows of the rank.

    queries: (tiles, rows), among the rows that the rank has. keys: (tiles, keys), among the rows that it has fetched.
    windows: of each query of a tile the keys [first, stop) that it sees, counted from the tile's first one.
    """

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]
    windows: tuple[Range, ...]


@planned
def tiles_of(
    queries: Ranges, keys: Ranges, length: int, fields: Hood, rows: int, single: bool
) -> tuple[Tiles, ...]:
    """Cut queries into tiles of `rows`, a multiple of the stride; return those together that see keys in the same way.

    queries, keys: the rows of the axis that the rank has, and has fetched. single: return each tile alone.
    """
    hood = Neighborhood(*fields)
    found: dict[tuple[Range, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
    for segment in segments(queries, length, hood):
        start, stop = segment.queries
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            windows = [hood.window(place, segment.length) for place in range(first, last)]
            key = windows[0][0]
            end = windows[-1][1]
            tile = (
                segment.rows(places, hood.dilation) for places in ((first, last), (key, end))
            )
            found.setdefault(tuple((a - key, b - key) for a, b in windows), []).append(
                tuple(tile)
            )
    result = []
    for seen, tiles in found.items():
        asked, read = zip(*tiles, strict=True)
        tables = _places(asked, queries), _places(read, keys)
        groups = (
            [((tile,), (box,)) for tile, box in zip(*tables, strict=True)]
            if single
            else [tables]
        )
        result += [Tiles(*group, seen) for group in groups]
    return tuple(result)


def _places(rows: Iterable[np.ndarray], held: Ranges) -> tuple[tuple[int, ...], ...]:
    """Return the places of rows among those held."""
    present = np.concatenate([np.arange(*part, dtype=np.int64) for part in held])
    return tuple(tuple(np.searchsorted(present, each).tolist()) for each in rows)


@planned
def rows_of_tiles(
    fields: tuple[Hood, ...], lengths: tuple[int, ...], most: int
) -> tuple[tuple[int, ...], bool]:
    """Return for each axis the rows of a tile, about as many as its kernel, so that a tile's mask has `most` elements.

    lengths: queries of each axis on this rank. The mask is larger only if one group of queries already needs that.
    Also return whether the backward cuts keys out again, because tiles overlap.
    """
    hoods = [Neighborhood(*each) for each in fields]
    least = {1: 64, 2: 8}.get(len(hoods), 4)  # a tile with few queries wastes a kernel call
    groups = [
        -(-min(max(hood.kernel, least), -(-length // hood.dilation)) // hood.stride)
        for hood, length in zip(hoods, lengths, strict=True)
    ]

    def elements() -> int:
        return math.prod(
            group * hood.stride * (group * hood.stride + hood.kernel - 1)
            for hood, group in zip(hoods, groups, strict=True)
        )

    while elements() > most and max(groups) > 1:
        widest = groups.index(max(groups))
        groups[widest] = -(-groups[widest] // 2)
    rows = tuple(group * hood.stride for hood, group in zip(hoods, groups, strict=True))
    copies = math.prod(
        (tile + hood.kernel - 1) / tile for tile, hood in zip(rows, hoods, strict=True)
    )
    return rows, copies > _COPIES_KEPT

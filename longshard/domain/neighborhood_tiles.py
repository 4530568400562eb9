"""Windows and tiles of an axis of neighbourhood attention, in integers. Plans are constants of compiled code."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from longshard.sharding.ranges import Range, Ranges, Shards, Spans
from longshard.sharding.tensors import planned

Hood = tuple[int, int, int, bool]
"""The fields of a `Neighborhood`, as plain data."""


# Copies of each key that are kept for the backward. If tiles overlap more, the backward cuts the keys out again.
_COPIES_KEPT = 8


class Neighborhood(NamedTuple):
    """The neighbourhood of one axis.

    Attributes:
        kernel: Number of keys of a window; kernel * dilation is at most the length of the axis.
        dilation: Distance of two keys of a window.
        stride: Number of queries that share a window; at most `kernel`.
        causal: Whether later keys are hidden.
    """

    kernel: int
    dilation: int = 1
    stride: int = 1
    causal: bool = False

    def window(self, place: int, length: int) -> Range:
        """Return the keys [first, stop) of a query, in places of its class: rows of one remainder modulo `dilation`.

        Args:
            place: The place of the query in its class.
            length: Number of rows of the class.
        """
        group = place - place % self.stride
        if self.causal:
            leader = min(group + self.stride - 1, length - 1)
            return max(leader - self.kernel + 1, 0), place + 1
        leader = min(group + self.stride // 2, length - 1)
        first = min(max(leader - self.kernel // 2, 0), length - self.kernel)
        return first, first + self.kernel


class Segment(NamedTuple):
    """Consecutive queries of a class, and the keys that they see together.

    Attributes:
        remainder: The remainder of the class.
        length: Number of rows of the class.
        queries: The queries, in places of the class.
        keys: The keys [first, stop), in places of the class.
    """

    remainder: int
    length: int
    queries: Range
    keys: Range

    def rows(self, places: Range, dilation: int) -> np.ndarray:
        """Return the rows of the axis at some places, 1-D int64.

        Args:
            places: The places of the class.
            dilation: The dilation.
        """
        return np.arange(*places, dtype=np.int64) * dilation + self.remainder


def segments(ranges: Sequence[Range], length: int, hood: Neighborhood) -> Iterator[Segment]:
    """Yield the segments of queries, range after range and class after class.

    Args:
        ranges: The rows of the queries.
        length: Number of rows of the axis.
        hood: The neighbourhood.
    """
    step = hood.dilation
    for start, stop in ranges:
        for remainder in sorted(row % step for row in range(start, min(stop, start + step))):
            first, end, rows = (-(-(row - remainder) // step) for row in (start, stop, length))
            # Neither end of a window moves back from query to query, and neighbouring windows leave no gap.
            keys = hood.window(first, rows)[0], hood.window(end - 1, rows)[1]
            yield Segment(remainder, rows, (first, end), keys)


@planned
def wanted_rows(owned: Shards, length: int, hood: Hood) -> Shards:
    """Return for each rank the rows that its queries see.

    Args:
        owned: The rows of each rank.
        length: Number of rows of the axis.
        hood: The neighbourhood.
    """
    wanted = []
    fields = Neighborhood(*hood)
    for ranges in owned:
        seen = np.zeros(length + 2, dtype=np.int8)
        for segment in segments(ranges, length, fields):
            seen[segment.rows(segment.keys, fields.dilation) + 1] = 1
        ends = np.flatnonzero(np.diff(seen)).tolist()
        wanted.append(tuple(zip(ends[::2], ends[1::2], strict=True)))
    return tuple(wanted)


Table = tuple[tuple[int, ...], ...]
"""A row of places for each tile."""


class Tiles(NamedTuple):
    """Tiles of an axis whose queries see keys in the same way.

    Attributes:
        queries: (tiles, rows), places among the rows that the rank has.
        keys: (tiles, keys), places among the rows that it has fetched.
        windows: For each query of a tile the keys [first, stop) that it sees, counted from the tile's first key.
    """

    queries: Table
    keys: Table
    windows: Spans


@planned
def tiles_of(
    queries: Ranges, keys: Ranges, length: int, fields: Hood, rows: int, single: bool
) -> tuple[Tiles, ...]:
    """Return the queries cut into tiles. Tiles with the same windows, counted from their first key, are one `Tiles`.

    Args:
        queries: The rows of the axis that the rank has.
        keys: The rows of the axis that it has fetched.
        length: Number of rows of the axis.
        fields: The neighbourhood.
        rows: Number of queries of a tile, a multiple of the stride.
        single: Whether each tile is a `Tiles` of its own.

    Returns:
        The tiles.
    """
    hood = Neighborhood(*fields)
    by_windows = {}
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
            by_windows.setdefault(tuple((a - key, b - key) for a, b in windows), []).append(
                tuple(tile)
            )
    result = []
    for seen, tiles in by_windows.items():
        asked, read = zip(*tiles, strict=True)
        tables = _places(asked, queries), _places(read, keys)
        groups = (
            [((tile,), (box,)) for tile, box in zip(*tables, strict=True)]
            if single
            else [tables]
        )
        result += [Tiles(*group, seen) for group in groups]
    return tuple(result)


def _places(rows: Iterable[np.ndarray], held: Ranges) -> Table:
    """Return the places of rows among the held rows."""
    present = np.concatenate([np.arange(*part, dtype=np.int64) for part in held])
    return tuple(tuple(np.searchsorted(present, each).tolist()) for each in rows)


@planned
def rows_of_tiles(
    fields: tuple[Hood, ...], lengths: tuple[int, ...], most: int
) -> tuple[tuple[int, ...], bool]:
    """Return the rows of a tile for each axis, and whether the backward cuts keys out again.

    It does if tiles overlap so much that their keys are too large to keep. A tile has about the same number of rows as
    the kernel. If its mask would have more than `most` elements, the tile is smaller, but not below one stride.

    Args:
        fields: The neighbourhood of each axis.
        lengths: Number of queries of each axis on this rank.
        most: Number of elements of a mask.
    """
    hoods = [Neighborhood(*each) for each in fields]
    least = {1: 64, 2: 8}.get(len(hoods), 4)  # a kernel call for few queries is slow
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

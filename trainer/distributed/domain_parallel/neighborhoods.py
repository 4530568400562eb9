"""Neighbourhoods of an axis, in integers: which keys a query sees, which rows a rank wants, and its tiles. Torch-free.

The windows are NATTEN's. Rows with the same remainder modulo the dilation are a class, and queries see keys of their
class only. Places count the rows of a class. Without causality a window has exactly `kernel` keys, centred on the query
where the axis has room, and shifted inwards at its ends:

    kernel 5, 9 rows as 4 + 5:   query 0 1 2 3 | 4 5 6 7 8     rank 0 wants [0, 6), rank 1 wants [2, 9)
                          first key  0 0 0 1 | 2 3 4 4 4

With causality a window ends at its query, and is shorter at the start. Queries of a group of `stride` places share the
window of their leader: the one in the middle (the right one of two), or under causality the last one; then each query
still sees no key behind itself.

Reference: generalized neighbourhood attention, https://arxiv.org/abs/2504.16922, and NATTEN's reference kernel,
csrc/include/natten/cuda/reference/mask.hpp (`get_win_start`, `get_win_end`, `qkv_fix_dilation`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trainer.distributed.sharding.ranges import Range, Ranges, union


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


def seen_rows(ranges: Ranges, length: int, hood: Neighborhood) -> Ranges:
    """Return the rows of an axis of `length` rows that the queries at rows `ranges` see."""
    if hood.dilation == 1:
        return union(segment.keys for segment in segments(ranges, length, hood))
    seen = np.zeros(length + 2, dtype=np.int8)
    for segment in segments(ranges, length, hood):
        seen[segment.rows(segment.keys, hood.dilation) + 1] = 1
    ends = np.flatnonzero(np.diff(seen)).tolist()
    return tuple(zip(ends[::2], ends[1::2], strict=True))


class Tiles(NamedTuple):
    """Tiles of an axis whose queries see keys in the same way, and the places of these in the rows of the rank.

    queries: (tiles, rows), among the rows that the rank has. keys: (tiles, keys), among the rows that it has fetched.
    windows: of each query of a tile the keys [first, stop) that it sees, counted from the tile's first one.
    """

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]
    windows: tuple[Range, ...]

    @property
    def is_full(self) -> bool:
        """Whether every query sees all keys of its tile."""
        return all(window == (0, len(self.keys[0])) for window in self.windows)


def tile_axis(queries: Ranges, keys: Ranges, length: int, hood: Neighborhood, rows: int) -> tuple[Tiles, ...]:
    """Cut queries into tiles of `rows`, a multiple of the stride.

    queries, keys: the rows of the axis that the rank has, and has fetched.
    """
    found: dict[tuple[Range, ...], list[tuple[np.ndarray, np.ndarray]]] = {}
    for segment in segments(queries, length, hood):
        start, stop = segment.queries
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            windows = [hood.window(place, segment.length) for place in range(first, last)]
            key, end = windows[0][0], windows[-1][1]
            tile = (segment.rows(places, hood.dilation) for places in ((first, last), (key, end)))
            found.setdefault(tuple((a - key, b - key) for a, b in windows), []).append(tuple(tile))
    result = []
    for seen, tiles in found.items():
        asked, read = zip(*tiles, strict=True)
        result.append(Tiles(_places(asked, queries), _places(read, keys), seen))
    return tuple(result)


def _places(rows: Iterable[np.ndarray], held: Ranges) -> tuple[tuple[int, ...], ...]:
    """Return the places of rows among those held."""
    present = np.concatenate([np.arange(*part, dtype=np.int64) for part in held])
    return tuple(tuple(np.searchsorted(present, each).tolist()) for each in rows)


def tile_rows(hoods: Sequence[Neighborhood], lengths: Sequence[int], most: int) -> tuple[int, ...]:
    """Return for each axis the rows of a tile, about as many as its kernel, so that a tile's mask has `most` elements.

    lengths: queries of each axis on this rank. The mask is larger only if one group of queries already needs that.
    """
    least = {1: 64, 2: 8}.get(len(hoods), 4)  # a tile with few queries wastes a kernel call
    groups = [
        -(-min(max(hood.kernel, least), -(-length // hood.dilation)) // hood.stride)
        for hood, length in zip(hoods, lengths, strict=True)
    ]

    def elements() -> int:
        product = 1
        for hood, group in zip(hoods, groups, strict=True):
            product *= group * hood.stride * (group * hood.stride + hood.kernel - 1)
        return product

    while elements() > most and max(groups) > 1:
        widest = groups.index(max(groups))
        groups[widest] = -(-groups[widest] // 2)
    return tuple(group * hood.stride for hood, group in zip(hoods, groups, strict=True))

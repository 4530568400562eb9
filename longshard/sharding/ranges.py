"""Algebra of half-open integer ranges. Layouts, masks and plans consist of them. Torch-free."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

Range = tuple[int, int]
"""Half-open: (start, stop)."""

Ranges = tuple[Range, ...]
"""Ascending, disjoint, non-empty ranges; no two touch."""

Shards = tuple[Ranges, ...]
"""For each rank, the ranges of rows that it owns."""

Spans = tuple[Range, ...]
"""Ranges one after another, in any order. They may overlap."""

Wanted = tuple[Spans, ...]
"""For each rank, the ranges of rows that it wants. They may leave the axis."""


def size(ranges: Iterable[Range]) -> int:
    """Return the sum of the lengths.

    Args:
        ranges: The ranges.
    """
    return sum(stop - start for start, stop in ranges)


def aligned(length: int) -> int:
    """Return a length rounded up to 16 bytes: the space of a tensor in an all-to-all of tensors of several types.

    Args:
        length: Number of bytes.
    """
    return -(-length // 16) * 16


def union(ranges: Iterable[Range]) -> Ranges:
    """Return all numbers of some ranges, as ascending ranges that do not touch.

    Args:
        ranges: The ranges, in any order; they may overlap and be empty.
    """
    joined = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    """Return the numbers that are in both.

    Args:
        a: Ranges.
        b: Other ranges.
    """
    common = []
    i = 0
    j = 0
    if a and b:  # skip the ranges that end before the first range of the other
        i = _first_after(a, b[0][0])
        j = _first_after(b, a[0][0])
    while i < len(a) and j < len(b):
        start = max(a[i][0], b[j][0])
        stop = min(a[i][1], b[j][1])
        if start < stop:
            common.append((start, stop))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def difference(a: Ranges, b: Ranges) -> Ranges:
    """Return the numbers of `a` that are not in `b`.

    Args:
        a: The ranges.
        b: The ranges to leave out.
    """
    remaining = []
    j = 0
    for start, stop in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < stop:
            if start < b[k][0]:
                remaining.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < stop:
            remaining.append((start, stop))
    return tuple(remaining)


class Offsets:
    """The places of numbers when their ranges are laid one after another.

    Args:
        ranges: The ranges.
    """

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self._starts = [start for start, _ in ranges]
        self._before = [*accumulate((stop - start for start, stop in ranges), initial=0)]
        self._places = {}

    def __call__(self, number: int) -> int:
        """Return the number of values in the ranges that are below `number`; this is its place if a range holds it.

        Args:
            number: The number.
        """
        i = bisect_right(self._starts, number) - 1
        if i < 0:
            return 0
        return self._before[i] + min(number, self.ranges[i][1]) - self._starts[i]

    def places(self, parts: Sequence[Range]) -> Ranges:
        """Return the places of `parts`, ascending; adjacent places become one range. Results are cached.

        Args:
            parts: Ranges, none empty; each is inside one of the ranges of this object.
        """
        places = self._places.get(parts := tuple(parts))
        if places is None:
            self._places[parts] = places = union(
                (self(start), self(stop - 1) + 1) for start, stop in parts
            )
        return places

    def ranges_at(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the numbers at the places [start, stop), as ranges.

        Args:
            start: The first place.
            stop: The end of the places.
        """
        for (first, last), before in zip(self.ranges, self._before, strict=False):
            part = max(start - before, 0) + first, min(stop - before, last - first) + first
            if part[0] < part[1]:
                yield part

    def borders(self, start: int, stop: int) -> Iterable[int]:
        """Yield each number in [start, stop] that is the start or the stop of a range.

        Args:
            start: The lowest number.
            stop: The highest number.
        """
        first = max(bisect_right(self._starts, start) - 1, 0)
        for ends in self.ranges[first : bisect_right(self._starts, stop)]:
            yield from (end for end in ends if start <= end <= stop)


def _first_after(ranges: Ranges, number: int) -> int:
    """Return the index of the first range that ends after `number`, or of the range before it."""
    return max(bisect_right(ranges, (number, number)) - 1, 0)

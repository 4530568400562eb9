"""The keys that each rank needs under a mask, and the tiles of attention that it computes with them. Torch-free.

A query sees one interval of keys (`mask.py`), so it sees one interval of places in the buffer of held keys. From query
to query each end of the interval stays or moves on by one. Queries between two changes of these slopes make one tile.

    causal, queries [4, 8) of a rank that holds the keys [0, 3) and [5, 7)

    query  sees       places       tiles
    4      [0, 5)     [0, 3)  \
    5      [0, 6)     [0, 4)   >   rows 0-2: CAUSAL, 3 queries x 5 keys
    6      [0, 7)     [0, 5)  /
    7      [0, 8)     [0, 5)       row 3: FULL, 1 query x 5 keys
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from longshard.context.planning.mask import ANY, Band, Mask, Relation
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Offsets, Range, Ranges, intersection, union


@dataclass(frozen=True)
class Tile:
    """Queries times keys.

    Attributes:
        q: The places of the queries among the local queries.
        kv: The places of the keys in the buffer of held keys.
        relation: Which keys each query sees.
    """

    q: Range
    kv: Range
    relation: Relation = Relation.FULL

    @property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs."""
        return self.relation.pairs(self.q[1] - self.q[0], self.kv[1] - self.kv[0])


@dataclass(frozen=True)
class _Rows:
    """Local queries [start, start + count), and the intervals of places that the first and the last query see."""

    start: int
    count: int
    first: Range
    last: Range

    def followed_by(self, other: "_Rows") -> "_Rows | None":
        """Return both as one stretch; None if `other` does not begin at the end of `self`, or if a slope changes."""
        if other.start != self.start + self.count:
            return None
        for end in (0, 1):
            slope = other.first[end] - self.last[end]
            if slope not in (0, 1) or any(
                rows.last[end] - rows.first[end] != slope * (rows.count - 1)
                for rows in (self, other)
            ):
                return None
        return _Rows(self.start, self.count + other.count, self.first, other.last)

    def tile(self) -> Tile:
        lower, upper = (self.last[end] > self.first[end] for end in (0, 1))
        relation = next(each for each in Relation if (each.lower, each.upper) == (lower, upper))
        return Tile(
            (self.start, self.start + self.count), (self.first[0], self.last[1]), relation
        )


def _stretches(
    start: int, stop: int, place: int, band: Band, places: Offsets
) -> Iterator[_Rows]:
    """Yield the queries of a piece in stretches on which each end of their interval has one slope.

    The interval of a query is the places of the keys that it sees. Queries that see no key are left out.
    """
    cuts = {start, stop}
    for bound in (band.lower, band.upper):
        if abs(bound) < ANY:
            borders = [
                band.kv_start,
                band.kv_stop,
                *places.borders(start + bound, stop + bound),
            ]
            cuts.update(border - bound for border in borders if start < border - bound < stop)
    for first, after in pairwise(sorted(cuts)):
        ends = [tuple(map(places, band.hull(query, query + 1))) for query in (first, after - 1)]
        if ends[0][0] < ends[0][1]:
            assert ends[1][0] < ends[1][1]
            yield _Rows(place + first - start, after - first, *ends)


class Needs:
    """The keys that every rank of a layout needs under a mask, computed at first use.

    Sequences with different masks lie one after another here, as one sequence.

    Args:
        q_layout: The layout of the queries.
        kv_layout: The layout of the keys.
        mask: The mask.
    """

    def __init__(self, q_layout: AxisLayout, kv_layout: AxisLayout, mask: Mask) -> None:
        self.degree = q_layout.degree
        self.sequences = mask.sequences
        self.layouts = q_layout, kv_layout
        self.q_ranges = q_layout.repeated(mask.sequences).ranges
        self.kv_ranges = kv_layout.repeated(mask.sequences).ranges
        self._bands = mask.bands
        self._band_stops = [band.q_stop for band in mask.bands]
        self._keys = {}
        self._held = {}

    def keys(self, rank: int) -> Ranges:
        """Return the keys that some query of a rank sees.

        Args:
            rank: The rank.
        """
        if rank not in self._keys:
            self._keys[rank] = union(
                b.hull(start, stop) for start, stop, _, b in self._pieces(self.q_ranges[rank])
            )
        return self._keys[rank]

    def held(self, rank: int, owner: int) -> Ranges:
        """Return the keys of one rank that some query of another rank sees.

        Args:
            rank: The rank of the queries.
            owner: The rank of the keys.
        """
        key = rank, owner
        if key not in self._held:
            self._held[key] = intersection(self.keys(rank), self.kv_ranges[owner])
        return self._held[key]

    def tiles(self, rank: int, held: Ranges) -> tuple[Tile, ...]:
        """Return tiles that cover every visible pair of the rank's queries and the held keys once.

        Their queries are places among the rank's rows. Their keys are places among the held keys.

        Args:
            rank: The rank.
            held: The held keys.
        """
        if not held:
            return ()
        places = Offsets(held)
        tiles = []
        open_rows = None
        for piece in self._pieces(self.q_ranges[rank]):
            for rows in _stretches(*piece, places):
                joined = open_rows.followed_by(rows) if open_rows else None
                if joined is None and open_rows:
                    tiles.append(open_rows.tile())
                open_rows = joined or rows
        return (*tiles, open_rows.tile()) if open_rows else ()

    def _pieces(self, queries: Ranges) -> Iterator[tuple[int, int, int, Band]]:
        """Yield the parts of `queries` in one band: start, stop, how many queries are before it, and the band."""
        place = 0
        for start, stop in queries:
            number = bisect_right(self._band_stops, start)
            while number < len(self._bands) and self._bands[number].q_start < stop:
                band = self._bands[number]
                first = max(start, band.q_start)
                last = min(stop, band.q_stop)
                yield first, last, place + first - start, band
                number += 1
            place += stop - start

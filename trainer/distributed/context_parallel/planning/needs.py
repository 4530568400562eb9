"""The keys that each rank needs, because its queries see them under a mask."""

from bisect import bisect_right
from collections.abc import Iterator

from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.tiles import Piece, Tile, tiles_of
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.ranges import Range, Ranges, intersection, union


class Needs:
    """The needs of all ranks of a layout under a mask, computed at first use.

    Sequences with different masks lie one after another here, as one sequence.
    """

    def __init__(self, q_layout: AxisLayout, kv_layout: AxisLayout, mask: Mask) -> None:
        self.degree = q_layout.degree
        self.sequences = mask.sequences
        self.layouts = q_layout, kv_layout
        self.q_ranges = q_layout.repeated(mask.sequences).ranges
        self.kv_ranges = kv_layout.repeated(mask.sequences).ranges
        self._bands = mask.bands
        self._band_stops = [band.q_stop for band in mask.bands]
        self._keys: dict[int, Ranges] = {}
        self._held: dict[Range, Ranges] = {}

    def keys(self, rank: int) -> Ranges:
        """Return the keys that some query of `rank` sees."""
        if rank not in self._keys:
            self._keys[rank] = union(b.hull(start, stop) for start, stop, _, b in self._pieces(self.q_ranges[rank]))
        return self._keys[rank]

    def held(self, rank: int, owner: int) -> Ranges:
        """Return the keys of `owner` that some query of `rank` sees."""
        key = rank, owner
        if key not in self._held:
            self._held[key] = intersection(self.keys(rank), self.kv_ranges[owner])
        return self._held[key]

    def tiles(self, rank: int, held: Ranges) -> tuple[Tile, ...]:
        """Return the tiles of the rank's queries and the held keys."""
        return tiles_of(self._pieces(self.q_ranges[rank]), held)

    def _pieces(self, queries: Ranges) -> Iterator[Piece]:
        """Yield the parts of `queries` that lie in one band, with their place among the queries."""
        place = 0
        for start, stop in queries:
            number = bisect_right(self._band_stops, start)
            while number < len(self._bands) and self._bands[number].q_start < stop:
                band = self._bands[number]
                first, last = max(start, band.q_start), min(stop, band.q_stop)
                yield first, last, place + first - start, band
                number += 1
            place += stop - start

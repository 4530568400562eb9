"""Layouts: which rank owns which rows of an axis, such as the tokens of a sequence. Torch-free.

A layout lists for each rank, in order, the half-open ranges of the global axis that it owns. The same permutation cuts
tokens, labels, positions and rotary tables, and undoes the cut. Shards may be uneven, and empty.

    head_tail, 16 tokens on 2 ranks:   rank 0: [0, 4) [12, 16)     rank 1: [4, 12)
    contiguous:                        rank 0: [0, 8)              rank 1: [8, 16)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from longshard.sharding.ranges import Offsets, Ranges, size, union


@dataclass(frozen=True)
class AxisLayout:
    """A layout. ranges[r]: the ascending, disjoint, non-empty ranges of rank r; all ranks together own [0, length)."""

    name: str
    length: int
    ranges: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        everything = sum(self.ranges, ())
        whole = ((0, self.length),) if self.length else ()
        if (
            any(union(r) != r for r in self.ranges)
            or union(everything) != whole
            or size(everything) != self.length
        ):
            raise ValueError(
                f"the ranges of layout {self.name!r} do not give each of {self.length} tokens to one rank, in "
                "ascending ranges that neither touch nor are empty; sort and merge a rank's ranges with `union`"
            )

    @property
    def degree(self) -> int:
        return len(self.ranges)

    def local_length(self, rank: int) -> int:
        """Return the number of tokens that `rank` owns."""
        return size(self.ranges[rank])

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each rank."""
        return [size(ranges) for ranges in self.ranges]

    def indices(self, rank: int) -> np.ndarray:
        """Return the global positions of the tokens of `rank`, in its order: (local length,) int64."""
        parts = [np.arange(start, stop, dtype=np.int64) for start, stop in self.ranges[rank]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def order(self) -> np.ndarray:
        """Return the global positions of all shards, one after another: (length,) int64; its argsort undoes the cut."""
        return np.concatenate([self.indices(rank) for rank in range(self.degree)])

    def cut(self, pieces: int, *, multiple_of: int = 1) -> "AxisLayout":
        """Return the layout with each shard cut into `pieces`; rank r's become ranks r * pieces and following."""
        shards = []
        for rank, ranges in enumerate(self.ranges):
            places = Offsets(ranges)
            for start, stop in pairwise(_cuts(self.local_length(rank), pieces, multiple_of)):
                shards.append(tuple(places.ranges_at(start, stop)))
        return AxisLayout(self.name, self.length, tuple(shards))

    def rounded(self, unit: int) -> "AxisLayout":
        """Return the layout with ends at the nearest multiples of `unit`, but for the end of the axis."""

        def end(row: int) -> int:
            return row if row == self.length else min(round(row / unit) * unit, self.length)

        return AxisLayout(
            self.name,
            self.length,
            tuple(union((end(a), end(b)) for a, b in own) for own in self.ranges),
        )

    def repeated(self, sequences: int) -> "AxisLayout":
        """Return the layout of several sequences laid one after another, each cut like this one."""
        if sequences == 1:
            return self
        offsets = [number * self.length for number in range(sequences)]
        shards = (
            union((start + x, stop + x) for x in offsets for start, stop in shard)
            for shard in self.ranges
        )
        return AxisLayout(self.name, self.length * sequences, tuple(shards))


def contiguous(seq_len: int, degree: int, *, multiple_of: int = 1) -> AxisLayout:
    """Give rank r the r-th piece. Under a causal mask the last rank computes almost twice the mean."""
    cuts = _cuts(seq_len, degree, multiple_of)
    return AxisLayout("contiguous", seq_len, tuple(union([piece]) for piece in pairwise(cuts)))


def sized(sizes: Sequence[int]) -> AxisLayout:
    """Return the layout in which rank r owns the next sizes[r] rows; any may be 0 or 1."""
    ends = accumulate((int(size) for size in sizes), initial=0)
    return AxisLayout("sized", sum(sizes), tuple(union([piece]) for piece in pairwise(ends)))


def head_tail(seq_len: int, degree: int, *, multiple_of: int = 1) -> AxisLayout:
    """Cut 2 * degree pieces, and give rank r number r and number 2 * degree - 1 - r (round robin, zigzag).

    Under a causal mask all ranks compute the same if 2 * degree divides the length; otherwise the first pieces are
    longer by `multiple_of` tokens.
    """
    pieces = list(pairwise(_cuts(seq_len, 2 * degree, multiple_of)))
    ranges = (union([pieces[rank], pieces[-1 - rank]]) for rank in range(degree))
    return AxisLayout("head_tail", seq_len, tuple(ranges))


LAYOUTS = {"head_tail": head_tail, "contiguous": contiguous}
"""Layouts that depend only on the length."""


def _cuts(seq_len: int, pieces: int, multiple_of: int) -> list[int]:
    """Return the ends of pieces of almost equal length, all multiples of `multiple_of`, the longer ones first."""
    if seq_len < 0 or pieces < 1 or multiple_of < 1 or seq_len % multiple_of:
        raise ValueError(
            f"a sequence of {seq_len} tokens cannot be cut into {pieces} pieces whose lengths are multiples of "
            f"{multiple_of}: both must be at least 1, and {multiple_of} must divide the length"
        )
    units, longer = divmod(seq_len // multiple_of, pieces)
    lengths = [(units + (piece < longer)) * multiple_of for piece in range(pieces)]
    return list(accumulate(lengths, initial=0))

"""Layouts: which rank owns which rows of an axis, such as the tokens of a sequence. Torch-free.

For each rank, a layout lists the half-open ranges of the global axis that the rank owns, in order. Tokens, labels,
positions and rotary tables are cut by the same permutation, which also undoes the cut. Shards may be uneven or empty.

    head_tail, 16 tokens on 2 ranks:   rank 0: [0, 4) [12, 16)     rank 1: [4, 12)
    contiguous:                        rank 0: [0, 8)              rank 1: [8, 16)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from longshard.sharding.ranges import Offsets, Shards, size, union


@dataclass(frozen=True)
class AxisLayout:
    """Which rank owns which rows of an axis.

    Attributes:
        name: The name of the load balancer, for messages and logs.
        length: Number of rows of the axis.
        ranges: For each rank, its ascending, disjoint, non-empty ranges. All ranks together own [0, length).

    Raises:
        ValueError: The ranges break one of these rules.
    """

    name: str
    length: int
    ranges: Shards

    def __post_init__(self) -> None:
        everything = sum(self.ranges, ())
        whole = ((0, self.length),) if self.length else ()
        if (
            any(union(r) != r for r in self.ranges)
            or union(everything) != whole
            or size(everything) != self.length
        ):
            raise ValueError(
                f"the ranges of layout {self.name!r} do not give each of {self.length} tokens to one rank; ranges "
                "must ascend, and neither touch nor be empty. Sort and merge the ranges of a rank with `union`"
            )

    @property
    def degree(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    def local_length(self, rank: int) -> int:
        """Return the number of rows that a rank owns.

        Args:
            rank: The rank.
        """
        return size(self.ranges[rank])

    @property
    def lengths(self) -> list[int]:
        """The number of rows of each rank."""
        return [size(ranges) for ranges in self.ranges]

    def indices(self, rank: int) -> np.ndarray:
        """Return the global positions of the rows of a rank, in the rank's order: (local length,) int64.

        Args:
            rank: The rank.
        """
        parts = [np.arange(start, stop, dtype=np.int64) for start, stop in self.ranges[rank]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def order(self) -> np.ndarray:
        """Return the global positions of all shards, one after another: (length,) int64. Its argsort undoes the cut."""
        return np.concatenate([self.indices(rank) for rank in range(self.degree)])

    def cut(self, pieces: int, *, multiple_of: int = 1) -> "AxisLayout":
        """Return the layout in which each shard is cut into pieces, over `pieces` times the ranks.

        Rank r becomes the ranks from r * pieces to (r + 1) * pieces - 1.

        Args:
            pieces: Number of pieces of each shard.
            multiple_of: Each piece has a multiple of this number of rows.

        Raises:
            ValueError: `multiple_of` does not divide the length of a shard.
        """
        shards = (
            tuple(places.ranges_at(start, stop))
            for places in map(Offsets, self.ranges)
            for start, stop in pairwise(_cuts(size(places.ranges), pieces, multiple_of))
        )
        return AxisLayout(self.name, self.length, tuple(shards))

    def rounded(self, unit: int) -> "AxisLayout":
        """Return the layout whose ends are at the nearest multiples of `unit`. The end of the axis stays.

        Args:
            unit: Number of rows.
        """

        def end(row: int) -> int:
            return row if row == self.length else min(round(row / unit) * unit, self.length)

        return AxisLayout(
            self.name,
            self.length,
            tuple(union((end(a), end(b)) for a, b in own) for own in self.ranges),
        )

    def repeated(self, sequences: int) -> "AxisLayout":
        """Return the layout of several sequences laid one after another, each cut like this one.

        Args:
            sequences: Number of sequences.
        """
        if sequences == 1:
            return self
        offsets = [number * self.length for number in range(sequences)]
        shards = (
            union((start + x, stop + x) for x in offsets for start, stop in shard)
            for shard in self.ranges
        )
        return AxisLayout(self.name, self.length * sequences, tuple(shards))


def contiguous(seq_len: int, degree: int, *, multiple_of: int = 1) -> AxisLayout:
    """Return the layout in which rank r owns the r-th piece.

    With a causal mask, the last rank computes almost twice the mean.

    Args:
        seq_len: Number of tokens.
        degree: Number of ranks.
        multiple_of: Each piece has a multiple of this number of tokens.

    Raises:
        ValueError: `multiple_of` does not divide the length.
    """
    cuts = _cuts(seq_len, degree, multiple_of)
    return AxisLayout("contiguous", seq_len, tuple(union([piece]) for piece in pairwise(cuts)))


def sized(sizes: Sequence[int]) -> AxisLayout:
    """Return the layout in which rank r owns the next sizes[r] rows.

    Args:
        sizes: Number of rows of each rank; may be 0.
    """
    ends = accumulate((int(size) for size in sizes), initial=0)
    return AxisLayout("sized", sum(sizes), tuple(union([piece]) for piece in pairwise(ends)))


def head_tail(seq_len: int, degree: int, *, multiple_of: int = 1) -> AxisLayout:
    """Cut the sequence into 2 * degree pieces; rank r owns the pieces r and 2 * degree - 1 - r (round robin, zigzag).

    With a causal mask, all ranks compute the same if 2 * degree divides the length. Otherwise the first pieces are
    longer by `multiple_of` tokens.

    Args:
        seq_len: Number of tokens.
        degree: Number of ranks.
        multiple_of: Each piece has a multiple of this number of tokens.

    Returns:
        The layout.

    Raises:
        ValueError: `multiple_of` does not divide the length.
    """
    pieces = list(pairwise(_cuts(seq_len, 2 * degree, multiple_of)))
    ranges = (union([pieces[rank], pieces[-1 - rank]]) for rank in range(degree))
    return AxisLayout("head_tail", seq_len, tuple(ranges))


LAYOUTS = {"head_tail": head_tail, "contiguous": contiguous}
"""Layouts that depend only on the length."""


def _cuts(seq_len: int, pieces: int, multiple_of: int) -> list[int]:
    """Return the borders of pieces of almost equal length, from 0 to `seq_len`: pieces + 1 numbers.

    Lengths are multiples of `multiple_of`, the longer ones first.

    Raises:
        ValueError: `multiple_of` does not divide the length, the length is negative, or a number is below 1.
    """
    if seq_len < 0 or pieces < 1 or multiple_of < 1 or seq_len % multiple_of:
        raise ValueError(
            f"a sequence of {seq_len} tokens cannot be cut into {pieces} pieces whose lengths are multiples of "
            f"{multiple_of}; use a length that {multiple_of} divides, and at least 1 piece"
        )
    units, longer = divmod(seq_len // multiple_of, pieces)
    lengths = [(units + (piece < longer)) * multiple_of for piece in range(pieces)]
    return list(accumulate(lengths, initial=0))

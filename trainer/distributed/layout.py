"""Who owns which tokens of a sequence: pure data, no torch.

A layout lists for each rank the half-open ranges of the global sequence that it holds, in order. The one permutation
that follows serves tokens, labels, positions, rotary tables and the way back. Shards may be uneven, and empty.

    head_tail, 16 tokens on 2 ranks:   rank 0: [0, 4) [12, 16)     rank 1: [4, 12)
    contiguous:                        rank 0: [0, 8)              rank 1: [8, 16)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

Range = tuple[int, int]
"""Half-open: (start, stop)."""


@dataclass(frozen=True)
class SequenceLayout:
    """ranges[r]: what rank r holds of [0, seq_len), ascending, disjoint, none empty, together everything."""

    name: str
    seq_len: int
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    def length(self, rank: int) -> int:
        """Number of tokens that `rank` holds."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def indices(self, rank: int) -> np.ndarray:
        """Global positions of the tokens of `rank`, in its order: (length,) int64."""
        parts = [np.arange(start, stop, dtype=np.int64) for start, stop in self.ranges[rank]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def order(self) -> np.ndarray:
        """Global positions of the shards laid one after another: (seq_len,) int64; its argsort undoes the cut."""
        return np.concatenate([self.indices(rank) for rank in range(self.degree)])


def contiguous(seq_len: int, degree: int, *, multiple_of: int = 1) -> SequenceLayout:
    """Rank r holds the r-th piece. Under a causal mask the last rank computes almost twice the mean."""
    cuts = _cuts(seq_len, degree, multiple_of)
    return SequenceLayout("contiguous", seq_len, tuple(_joined([piece]) for piece in pairwise(cuts)))


def head_tail(seq_len: int, degree: int, *, multiple_of: int = 1) -> SequenceLayout:
    """2 * degree pieces, of which rank r holds number r and number 2 * degree - 1 - r (round robin, zigzag).

    Under a causal mask every rank computes the same when 2 * degree pieces divide the sequence; otherwise the first
    pieces are longer by `multiple_of` tokens.
    """
    pieces = list(pairwise(_cuts(seq_len, 2 * degree, multiple_of)))
    ranges = (_joined([pieces[rank], pieces[-1 - rank]]) for rank in range(degree))
    return SequenceLayout("head_tail", seq_len, tuple(ranges))


LAYOUTS = {"head_tail": head_tail, "contiguous": contiguous}


def _cuts(seq_len: int, pieces: int, multiple_of: int) -> list[int]:
    """Ends of `pieces` pieces as equal as multiples of `multiple_of` can be, the longer ones first."""
    if seq_len < 0 or pieces < 1 or multiple_of < 1 or seq_len % multiple_of:
        raise ValueError(
            f"a sequence of {seq_len} tokens cannot be cut into {pieces} pieces whose lengths are multiples of "
            f"{multiple_of}: both must be at least 1, and {multiple_of} must divide the length"
        )
    units, longer = divmod(seq_len // multiple_of, pieces)
    lengths = [(units + (piece < longer)) * multiple_of for piece in range(pieces)]
    return list(accumulate(lengths, initial=0))


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Without empty ranges, neighbours as one."""
    joined: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)

"""Layouts: which rank owns which rows of an axis, such as the tokens of a sequence. Torch-free.

A layout lists for each rank, in order, the half-open ranges of the global axis that it owns. The same permutation cuts
tokens, labels, positions and rotary tables, and undoes the cut. Shards may be uneven, and empty.

    head_tail, 16 tokens on 2 ranks:   rank 0: [0, 4) [12, 16)     rank 1: [4, 12)
    contiguous:                        rank 0: [0, 8)              rank 1: [8, 16)
    balanced:                          blocks dealt by their cost under the batch's mask
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from trainer.distributed.sharding.ranges import Offsets, Range, Ranges, size, union


@dataclass(frozen=True)
class AxisLayout:
    """A layout. ranges[r]: the ascending, disjoint, non-empty ranges of rank r; all ranks together own [0, length)."""

    name: str
    length: int
    ranges: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        everything = sum(self.ranges, ())
        whole = ((0, self.length),) if self.length else ()
        if any(union(r) != r for r in self.ranges) or union(everything) != whole or size(everything) != self.length:
            raise ValueError(
                f"the ranges of layout {self.name!r} do not give each of {self.length} tokens to one rank, in "
                "ascending ranges that neither touch nor are empty; sort and merge a rank's ranges with `union`"
            )

    @property
    def degree(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    def local_length(self, rank: int) -> int:
        """Return the number of tokens that `rank` owns."""
        return size(self.ranges[rank])

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

    def repeated(self, sequences: int) -> "AxisLayout":
        """Return the layout of several sequences laid one after another, each cut like this one."""
        if sequences == 1:
            return self
        offsets = [number * self.length for number in range(sequences)]
        shards = (union((start + x, stop + x) for x in offsets for start, stop in shard) for shard in self.ranges)
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


def balanced(work: np.ndarray, degree: int, *, multiple_of: int = 1) -> AxisLayout:
    """Deal blocks by their cost, so that every rank has as many tokens as the others and about as much attention.

    work: (seq_len,) visible keys of each token (`Mask.work`). The block size is `multiple_of` times the largest power
    of two that leaves 32 blocks a rank. Blocks are dealt from the most expensive on, each to the rank with the least
    work so far that still lacks a block. The last tokens, too few for a round of blocks, are cut into one piece a rank.
    """
    seq_len = len(work)
    _cuts(seq_len, degree, multiple_of)  # raises if it cannot be cut
    units = seq_len // multiple_of // (_BLOCKS_PER_RANK * degree)
    block = multiple_of * (1 << max(units.bit_length() - 1, 0))
    rounds = seq_len // (block * degree)
    dealt = rounds * degree * block
    pieces = [*zip(range(0, dealt, block), range(block, dealt + 1, block), strict=True)]
    rest = [(start + dealt, stop + dealt) for start, stop in pairwise(_cuts(seq_len - dealt, degree, multiple_of))]
    total = np.concatenate([[0], np.cumsum(work, dtype=np.int64)])
    shards: list[list[Range]] = [[piece] for piece in rest]
    heap = [(int(total[stop] - total[start]), rank) for rank, (start, stop) in enumerate(rest)]
    heapq.heapify(heap)
    for start, stop in sorted(pieces, key=lambda p: (total[p[0]] - total[p[1]], p)):
        load, rank = heapq.heappop(heap)
        shards[rank].append((start, stop))
        if len(shards[rank]) <= rounds:
            heapq.heappush(heap, (load + int(total[stop] - total[start]), rank))
    return AxisLayout("balanced", seq_len, tuple(union(shard) for shard in shards))


LAYOUTS = {"head_tail": head_tail, "contiguous": contiguous}
"""Layouts that depend only on the length."""

LOAD_BALANCERS = (*LAYOUTS, "balanced")

_BLOCKS_PER_RANK = 32


def build_layout(
    name: str, seq_len: int, degree: int, *, multiple_of: int = 1, work: np.ndarray | None = None
) -> AxisLayout:
    """Return the layout of that name; `balanced` deals by `work` (seq_len,), or None for a causal mask's work."""
    if name == "balanced":
        work = np.arange(1, seq_len + 1) if work is None else work
        return balanced(work, degree, multiple_of=multiple_of)
    return LAYOUTS[name](seq_len, degree, multiple_of=multiple_of)


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

"""`balanced`: every rank gets the same number of tokens, about the same work, and few keys of other ranks. Torch-free.

The ranks are halved again and again, and their tokens with them. The documents of a group of ranks stand on a circle.
One half of the group gets an arc of it:

    documents a, b, c; 2 ranks     a a a a a a a a a a|b b b c c c c c c|c     rank 0 has the arc between the cuts

The arc has the half's number of tokens. While it moves round the circle, its mean work is the half's share of all work.
So somewhere it has exactly this share. An arc has two cuts: N ranks need 2 N - 2, whatever the number of documents,
and a document without a cut stays whole. A single document is cut as `head_tail` cuts it.

Two kinds of arcs are tried, with the documents in three orders. An arc of the first kind begins or ends at a border of
a document or of a block. An arc of the second kind has exactly the share of work. The best arc is the one that has the
busier side finish first. A side takes its work, in whole tiles as kernels compute them, plus SHORT_SHARD pairs for
each key that is sent because of the cuts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longshard.context.planning.cost import SHORT_SHARD
from longshard.context.planning.mask import Mask, causal, counted
from longshard.sharding.layout import LAYOUTS, AxisLayout, contiguous

LOAD_BALANCERS = (*LAYOUTS, "balanced")

TOLERANCE = 0.03
"""How much more than the mean a rank may compute, as a fraction, if less communication makes up for it."""

_BLOCK, _TILE = 256, 128
_FEWEST_BLOCKS = 4
_REFINEMENTS = 2


def build_layout(
    name: str, seq_len: int, degree: int, *, multiple_of: int = 1, mask: Mask | None = None
) -> AxisLayout:
    """Return a layout by the name of its load balancer.

    Args:
        name: A name of `LOAD_BALANCERS`.
        seq_len: Number of tokens.
        degree: Number of ranks.
        multiple_of: Each rank has a multiple of this number of tokens.
        mask: The mask by which `balanced` counts work; None means a causal mask. Other balancers do not use it.

    Raises:
        KeyError: The name is unknown.
        ValueError: `multiple_of` does not divide the length.
    """
    if name == "balanced":
        return balanced(
            causal(seq_len) if mask is None else mask, degree, multiple_of=multiple_of
        )
    return LAYOUTS[name](seq_len, degree, multiple_of=multiple_of)


def balanced(mask: Mask, degree: int, *, multiple_of: int = 1) -> AxisLayout:
    """Return a layout in which all ranks have the same number of tokens and about the same work, and few keys are sent.

    A part of a document has at least 256 tokens (a block), or starts within the document's first 256 tokens. Only if
    nothing else balances, other parts are shorter. Blocks are smaller if a rank has fewer than 1,024 tokens.

    Args:
        mask: The mask of the batch; all its sequences have the same layout.
        degree: Number of ranks.
        multiple_of: Each rank has a multiple of this number of tokens.

    Raises:
        ValueError: `multiple_of` does not divide the length.
    """
    even = contiguous(mask.q_len, degree, multiple_of=multiple_of)
    rows = np.array(even.lengths)
    block = min(_BLOCK, max(mask.q_len // degree // _FEWEST_BLOCKS, 1))
    work = Work(mask, max(block * _TILE // _BLOCK, 1))
    everything = np.array([[0, mask.q_len]])[: mask.q_len]
    halving = _Halving(work, block, rows, work.of(everything).sum() / degree)
    parts = halving.assign(everything, 0, degree)
    return AxisLayout(
        "balanced", mask.q_len, tuple(tuple(map(tuple, part.tolist())) for part in parts)
    )


class Work:
    """The work of tokens under a mask: whole tiles, each divided evenly among the tile's tokens.

    Work is counted in integers, so that all ranks get the same result.

    Args:
        mask: The mask.
        tile: Number of queries, and of keys, of a tile.
    """

    def __init__(self, mask: Mask, tile: int) -> None:
        self._starts = np.arange(mask.sequences)[:, None] * mask.q_len
        self._bands = np.array(mask.bands, dtype=np.int64).reshape(-1, 6)
        self.borders = np.unique(self._bands[:, :2] % max(mask.q_len, 1))
        numbers, band = counted(-(-(self._bands[:, 1] - self._bands[:, 0]) // tile))
        _, q_stop, kv_start, kv_stop, lower, upper = self._bands[band].T
        first = self._bands[band, 0] + numbers * tile
        last = np.minimum(first + tile, q_stop)
        keys = np.maximum(
            np.minimum(kv_stop, last + upper) - np.maximum(kv_start, first + lower), 0
        )
        work = -(-keys // tile) * tile * tile
        # Entry 0 stands for the tokens before all tiles.
        self._tiles = np.zeros((4, len(work) + 1), dtype=np.int64)
        self._tiles[:, 1:] = first, last - first, work, np.cumsum(work) - work
        self._tiles[1, 0] = 1

    def before(self, tokens: np.ndarray) -> np.ndarray:
        """Return the work of all tokens before each token, in pairs of all sequences: (n,) int64.

        Args:
            tokens: The tokens, (n,), int64.
        """
        queries = tokens + self._starts
        first, length, work, total = self._tiles[
            :, np.searchsorted(self._tiles[0], queries, side="right") - 1
        ]
        return (total + work * np.minimum(queries - first, length) // length).sum(axis=0)

    def of(self, parts: np.ndarray) -> np.ndarray:
        """Return the work of ranges of tokens, (n,) int64.

        Args:
            parts: The ranges, (n, 2), int64.
        """
        return self.before(parts[:, 1]) - self.before(parts[:, 0])

    def first_seen(self, tokens: np.ndarray) -> np.ndarray:
        """Return the first key that each token sees in each sequence: (sequences, n) int64.

        If the token sees no earlier key, it is the token itself.

        Args:
            tokens: The tokens, (n,), int64.
        """
        queries = tokens + self._starts
        if not len(self._bands):
            return queries - self._starts
        band = np.minimum(
            np.searchsorted(self._bands[:, 1], queries, side="right"), len(self._bands) - 1
        )
        q_start, kv_start, lower = (self._bands[:, column][band] for column in (0, 2, 4))
        seen = np.where(q_start <= queries, np.maximum(kv_start, queries + lower), queries)
        return np.minimum(seen, queries) - self._starts


class _Arcs(NamedTuple):
    """Arcs of a circle, (n,) each: their starts, their work, the keys to send, and whether they leave a short part."""

    starts: np.ndarray
    work: np.ndarray
    keys: np.ndarray
    short: np.ndarray


class _Circle:
    """Parts of the sequence on a circle, (n, 2) int64. Places are counted from the start of the first part."""

    def __init__(self, work: Work, parts: np.ndarray, block: int) -> None:
        self._work, self._parts, self._block = work, parts, block
        starts, stops = parts.T
        self.places = np.concatenate([[0], np.cumsum(stops - starts)])
        self.length = int(self.places[-1])
        start = work.before(starts)
        before = np.concatenate([[0], np.cumsum(work.before(stops) - start)])
        self.all_work = int(before[-1])
        # Added to the work before a token of the sequence, it gives the work before the token's place.
        self._shift = before[:-1] - start
        self._keys_of_parts = (starts - work.first_seen(starts)).sum(axis=0)

    @cached_property
    def stops(self) -> np.ndarray:
        """The places where whole blocks of each part begin, counted from its start; in a short part only the start."""
        numbers, part = counted(
            np.maximum((self._parts[:, 1] - self._parts[:, 0]) // self._block, 1)
        )
        return self.places[part] + numbers * self._block

    def arcs(self, starts: np.ndarray, length: int) -> _Arcs:
        """Return arcs that start at `starts`, (n,), and have `length` tokens."""
        cuts = self._cuts(np.concatenate([starts, starts + length]) % self.length)
        work, first, keys, short = (np.split(x, 2, axis=-1) for x in cuts)
        inside = work[1] - work[0] + np.where(starts + length >= self.length, self.all_work, 0)
        # If both cuts are in one document, the side without the document's last token needs only the keys before
        # the second cut.
        sent = np.where(first[0] == first[1], np.maximum(*keys), sum(keys))
        return _Arcs(starts, inside, sent.sum(axis=0), short[0] | short[1])

    def _cuts(
        self, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the cost of cuts at `places`, (n,) in [0, length).

        * The work before each cut, (n,).
        * The first key that the token after the cut sees, (sequences, n).
        * The number of tokens before the cut that this token sees, (sequences, n).
        * Whether the cut leaves a part that is too short, (n,).
        """
        part = np.searchsorted(self.places, places, side="right") - 1
        inside = places - self.places[part]
        token = self._parts[part, 0] + inside
        work = self._shift[part] + self._work.before(token)
        first = self._work.first_seen(token)
        previous = np.where(inside, token, self._parts[part - 1, 1])
        keys = np.where(previous <= token, np.maximum(previous - first, 0), 0)
        left = inside < self._block
        right = self._parts[part, 1] - token < self._block
        is_deep = (token - first).sum(axis=0) >= self._block
        short = (inside > 0) & (
            left & (self._keys_of_parts[part] >= self._block) | right & is_deep
        )
        return work, first, keys, short

    def arc(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ranges inside an arc and outside it, (n, 2) each, ascending and merged."""
        beyond = max(start + length - self.length, 0)
        borders = np.unique(
            np.concatenate([self.places, [beyond, start, min(start + length, self.length)]])
        )[:-1]
        stops = np.concatenate([borders[1:], [self.length]])
        part = np.searchsorted(self.places, borders, side="right") - 1
        shift = self._parts[part, 0] - self.places[part]
        pieces = np.stack([borders + shift, stops + shift], axis=1)
        inside = (borders - start) % self.length < length
        return _merged(pieces[inside]), _merged(pieces[~inside])


@dataclass(frozen=True, eq=False)
class _Halving:
    """Assigns tokens to ranks. rows: number of tokens of each rank; share: the mean work of a rank."""

    work: Work
    block: int
    rows: np.ndarray
    share: float

    def assign(self, parts: np.ndarray, first: int, last: int) -> Iterator[np.ndarray]:
        """Yield the parts, (n, 2), of each rank of [first, last); together these ranks own `parts`."""
        if last - first == 1 or not len(parts):
            yield from [parts] * (last - first)
            return
        middle = (first + last + 1) // 2
        # Each halving may use the same part of the tolerance.
        later_halvings = (last - first - 1).bit_length() - 1
        limit = 1 + TOLERANCE * (1 - later_halvings / (len(self.rows) - 1).bit_length())
        ranks = middle - first, last - middle
        halves = self._halves(
            self._at_borders(parts),
            int(self.rows[first:middle].sum()),
            ranks,
            limit * self.share,
        )
        yield from self.assign(halves[0], first, middle)
        yield from self.assign(halves[1], middle, last)

    def _at_borders(self, parts: np.ndarray) -> np.ndarray:
        """Return `parts` cut at the borders of documents."""
        cuts = np.unique(np.concatenate([parts.ravel(), self.work.borders]))
        part = np.searchsorted(parts[:, 0], cuts, side="right") - 1
        kept = np.flatnonzero((part >= 0) & (cuts < parts[part, 1]))
        return np.stack([cuts[kept], cuts[kept + 1]], axis=1)

    def _halves(
        self, parts: np.ndarray, rows: int, ranks: tuple[int, int], limit: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `parts` as two halves; ranks[0] ranks get the first, which has `rows` tokens, and ranks[1] the second.

        limit: the work that a rank may have on average.
        """
        best = None
        for order in self._orders(parts):
            circle = _Circle(self.work, parts[order], self.block)
            for arcs in self._arcs(circle, rows, ranks[0] / sum(ranks)):
                busier = np.maximum(
                    arcs.work / ranks[0], (circle.all_work - arcs.work) / ranks[1]
                )
                is_over = busier > limit
                cost = busier + np.where(is_over, 0, SHORT_SHARD * arcs.keys)
                worst = np.where(is_over, 2, arcs.short)
                number = np.lexsort((cost, worst))[0]
                candidate = (worst[number], cost[number]), circle, int(arcs.starts[number])
                best = candidate if best is None or candidate[0] < best[0] else best
        _, circle, start = best
        return circle.arc(start, rows)

    def _orders(self, parts: np.ndarray) -> Iterator[np.ndarray]:
        """Yield orders of the parts in which documents stay together: the given order, and two by length.

        An order is an array of the numbers of the parts, (n,).
        """
        yield np.arange(len(parts))
        apart = (parts[:-1, 1] <= self.work.first_seen(parts[1:, 0])).all(axis=0)
        document = np.concatenate([[0], np.cumsum(apart)])
        falling = np.argsort(-np.bincount(document, parts[:, 1] - parts[:, 0]), kind="stable")
        if len(falling) > 2:
            for order in (falling, np.concatenate([falling[::2], falling[1::2][::-1]])):
                yield np.argsort(np.argsort(order)[document], kind="stable")

    def _arcs(self, circle: _Circle, rows: int, share: float) -> Iterator[_Arcs]:
        """Yield batches of arcs of `rows` tokens.

        The arcs of the first batch start or end at stops. Later batches interpolate between an arc with less than the
        share and an arc with more.

        Args:
            circle: The circle.
            rows: Tokens of each arc.
            share: The fraction of the work of the whole circle that an arc should have.
        """
        starts = np.unique(
            np.concatenate([circle.stops, (circle.stops - rows) % circle.length])
        )
        arcs = circle.arcs(starts, rows)
        yield arcs
        over = arcs.work - share * circle.all_work
        low, high = (np.stack([starts, over])[:, part] for part in (slice(-1), slice(1, None)))
        for _ in range(_REFINEMENTS):
            crossing = np.flatnonzero((low[1] < 0) != (high[1] < 0))
            if not len(crossing):
                return
            low = low[:, crossing]
            high = high[:, crossing]
            starts = np.round(low[0] + (high[0] - low[0]) * low[1] / (low[1] - high[1])).astype(
                np.int64
            )
            arcs = circle.arcs(starts, rows)
            yield arcs
            middle = np.stack([starts, arcs.work - share * circle.all_work])
            low = np.concatenate([low, middle], axis=1)
            high = np.concatenate([middle, high], axis=1)


def _merged(parts: np.ndarray) -> np.ndarray:
    """Return disjoint ranges, (n, 2), in ascending order; ranges that touch become one."""
    parts = parts[np.argsort(parts[:, 0])]
    apart = parts[1:, 0] != parts[:-1, 1]
    starts, stops = (np.ones(len(parts), dtype=bool) for _ in range(2))
    starts[1:] = stops[:-1] = apart
    return np.stack([parts[starts, 0], parts[stops, 1]], axis=1)

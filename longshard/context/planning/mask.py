"""Masks as ranges of queries and keys, never as a dense (S, S) tensor. Torch-free.

A mask is a list of bands. A band holds the pairs of a range of queries and a range of keys with lower <= key - query
<= upper; a bound may be absent. No two bands share a query, so that each query sees one interval of keys. Therefore
the intersection of two masks is again a mask, with intersected ranges and the stricter bounds.

    causal, 4 queries          documents of 2 and 3 tokens, causal        sliding window 2
    q [0, 4) kv [0, 4) <= 0    q [0, 2) kv [0, 2) <= 0                    q [0, 4) kv [0, 4) -1 <= . <= 0
                               q [2, 5) kv [2, 5) <= 0

If there are more or fewer keys than queries, the last query stands at the last key (bottom-right alignment).
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from longshard.sharding.ranges import Range

ANY = 1 << 60
"""A bound that hides nothing."""


class Relation(Enum):
    """Which of the keys j = 0 ... m - 1 each query i = 0 ... n - 1 sees."""

    FULL = "full"
    CAUSAL = "causal"
    """Query i sees the keys j <= i + m - n."""
    BI_CAUSAL = "bi_causal"
    """Query i sees the keys i <= j <= i + m - n."""
    INV_CAUSAL = "inv_causal"
    """Query i sees the keys j >= i."""

    @property
    def upper(self) -> bool:
        """Whether late keys are hidden."""
        return self in (Relation.CAUSAL, Relation.BI_CAUSAL)

    @property
    def lower(self) -> bool:
        """Whether early keys are hidden."""
        return self in (Relation.BI_CAUSAL, Relation.INV_CAUSAL)

    def pairs(self, n: int, m: int) -> int:
        """Return the number of visible pairs of n queries and m keys.

        Args:
            n: Number of queries.
            m: Number of keys; at least n, unless the relation is FULL.
        """
        return n * m - (n * (n - 1) // 2) * (self.upper + self.lower)


class Band(NamedTuple):
    """Queries [q_start, q_stop) see the keys of [kv_start, kv_stop) with lower <= key - query <= upper.

    Attributes:
        q_start: The first query.
        q_stop: The end of the queries.
        kv_start: The first key.
        kv_stop: The end of the keys.
        lower: The least key - query; -ANY if absent.
        upper: The greatest key - query; ANY if absent.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    lower: int = -ANY
    upper: int = ANY

    def hull(self, start: int, stop: int) -> Range:
        """Return the keys that some query of [start, stop) sees; they are one range, (x, x) without keys.

        Args:
            start: The first query.
            stop: The end of the queries; this band has all of them.
        """
        first = max(self.kv_start, start + self.lower)
        return first, max(first, min(self.kv_stop, stop + self.upper))

    def shifted(self, queries: int, keys: int) -> "Band":
        """Return the band moved along both axes: a pair (q, k) becomes (q + queries, k + keys).

        Args:
            queries: Is added to each query index.
            keys: Is added to each key index.
        """
        moved = (
            self.q_start + queries,
            self.q_stop + queries,
            self.kv_start + keys,
            self.kv_stop + keys,
        )
        lower, upper = (
            b if abs(b) >= ANY else b + keys - queries for b in (self.lower, self.upper)
        )
        return Band(*moved, lower, upper)


@dataclass(frozen=True)
class Mask:
    """The visible pairs of queries and keys, for each sequence of a batch.

    With `sequences` = 1 the bands hold for every sequence of any batch. Otherwise the sequences lie one after another:
    sequence b has the queries b * q_len + i and the keys b * kv_len + j.

    Attributes:
        q_len: Number of queries of a sequence.
        kv_len: Number of keys of a sequence.
        bands: The bands, ascending; no query is in two of them.
        sequences: Number of sequences with masks of their own.
    """

    q_len: int
    kv_len: int
    bands: tuple[Band, ...]
    sequences: int = 1

    def __post_init__(self) -> None:
        """Check the bands.

        Raises:
            ValueError: A length is negative, or a band descends, shares a query, is empty or leaves its sequence.
        """
        if min(self.q_len, self.kv_len) < 0 or self.sequences < 1:
            raise ValueError(
                f"a mask of {self.sequences} sequences of {self.q_len} queries and {self.kv_len} keys "
                "cannot be: there must be at least one sequence, and no length may be negative"
            )
        q_end = 0
        for band in self.bands:
            number = band.q_start // self.q_len if self.q_len else self.sequences
            if not (
                q_end <= band.q_start < band.q_stop <= (number + 1) * self.q_len
                and number * self.kv_len
                <= band.kv_start
                < band.kv_stop
                <= (number + 1) * self.kv_len
                and number < self.sequences
                and band.lower <= band.upper
            ):
                raise ValueError(
                    f"{band} does not fit into a mask of {self.sequences} sequence(s) of {self.q_len} "
                    f"queries and {self.kv_len} keys: the band before it ends at query {q_end}. Bands "
                    "must ascend, share no query, not be empty, and lie within one sequence; combine "
                    "masks by `&` or `by_sequence`"
                )
            q_end = band.q_stop

    def __and__(self, other: "Mask") -> "Mask":
        """Return the mask of the pairs that both masks show.

        Args:
            other: A mask of the same lengths.

        Raises:
            ValueError: The masks have different lengths or numbers of sequences (1 goes with any number).
        """
        if (self.q_len, self.kv_len) != (other.q_len, other.kv_len) or (
            self.sequences != other.sequences and 1 not in (self.sequences, other.sequences)
        ):
            raise ValueError(
                f"masks of {self.sequences} x {self.q_len} queries, {self.kv_len} keys and of "
                f"{other.sequences} x {other.q_len} queries, {other.kv_len} keys cannot be "
                "intersected; both must be for the same sequences"
            )
        sequences = max(self.sequences, other.sequences)
        bands = _overlay(self.repeated(sequences).bands, other.repeated(sequences).bands)
        return Mask(self.q_len, self.kv_len, tuple(bands), sequences)

    def repeated(self, sequences: int) -> "Mask":
        """Return the mask for a number of sequences; a mask for one sequence is repeated.

        Args:
            sequences: Number of sequences.
        """
        return self if self.sequences == sequences else by_sequence([self] * sequences)

    def sequence(self, number: int) -> "Mask":
        """Return the mask of one sequence. If this mask is for one sequence, it is returned for every number.

        Args:
            number: The number of the sequence.

        Raises:
            IndexError: The mask is for several sequences, and `number` is not one of them.
        """
        if self.sequences == 1:
            return self
        if not 0 <= number < self.sequences:
            raise IndexError(f"sequence {number} of a mask of {self.sequences}")
        first = number * self.q_len
        last = (number + 1) * self.q_len
        bands = (
            b.shifted(-first, -number * self.kv_len)
            for b in self.bands
            if first <= b.q_start < last
        )
        return Mask(self.q_len, self.kv_len, tuple(bands))

    @property
    def has_windows(self) -> bool:
        """Whether some band has a lower bound."""
        return any(band.lower > -ANY for band in self.bands)

    def intervals(self) -> np.ndarray:
        """Return the first visible key of each query and the end of its keys: (sequences, q_len, 2) int64.

        Keys are counted within their sequence. A query that sees no key has two equal numbers.
        """
        table = np.array(self.bands, dtype=np.int64).reshape(-1, 6)
        numbers, band = counted(table[:, 1] - table[:, 0])
        queries = table[band, 0] + numbers
        kv_start, kv_stop, lower, upper = table[band, 2:].T
        start = np.maximum(kv_start, queries + lower)
        stop = np.maximum(np.minimum(kv_stop, queries + upper + 1), start)
        intervals = np.zeros((self.sequences * self.q_len, 2), dtype=np.int64)
        intervals[queries] = np.stack((start, stop), -1)
        intervals = intervals.reshape(self.sequences, self.q_len, 2)
        seen = intervals[..., 1:] > intervals[..., :1]
        return intervals - seen * np.arange(self.sequences)[:, None, None] * self.kv_len

    def work(self) -> np.ndarray:
        """Return the number of visible keys of each query, summed over the sequences: (q_len,) int64."""
        return np.diff(self.intervals())[..., 0].sum(0)

    def area(self) -> int:
        """Return the number of visible pairs of all sequences."""
        return int(self.work().sum())


def counted(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers 0 ... length - 1 for each length, one after another, and the index of the length of each.

    Args:
        lengths: The lengths, (n,) int64.
    """
    index = np.repeat(np.arange(len(lengths)), lengths)
    return np.arange(len(index)) - np.repeat(np.cumsum(lengths) - lengths, lengths), index


def full(q_len: int, kv_len: int | None = None) -> Mask:
    """Return the mask in which every query sees every key.

    Args:
        q_len: Number of queries.
        kv_len: Number of keys; None means `q_len`.
    """
    kv_len = q_len if kv_len is None else kv_len
    return Mask(q_len, kv_len, (Band(0, q_len, 0, kv_len),) if q_len and kv_len else ())


def causal(q_len: int, kv_len: int | None = None) -> Mask:
    """Return the mask in which a query sees the keys up to its own position. The last query stands at the last key.

    Args:
        q_len: Number of queries.
        kv_len: Number of keys; None means `q_len`.
    """
    whole = full(q_len, kv_len)
    return Mask(
        q_len, whole.kv_len, tuple(b._replace(upper=whole.kv_len - q_len) for b in whole.bands)
    )


def sliding_window(
    q_len: int, window: int, kv_len: int | None = None, *, is_causal: bool = True
) -> Mask:
    """Return the mask in which a query sees the last `window` keys, its own position included.

    The last query stands at the last key.

    Args:
        q_len: Number of queries.
        window: Number of keys.
        kv_len: Number of keys of a sequence; None means `q_len`.
        is_causal: If false, a query also sees `window` - 1 keys after its position.

    Raises:
        ValueError: The window is below 1.
    """
    if window < 1:
        raise ValueError(
            f"a sliding window of {window} tokens shows nothing; use at least 1, the token itself"
        )
    whole = full(q_len, kv_len)
    place = whole.kv_len - q_len
    upper = place if is_causal else place + window - 1
    return Mask(
        q_len,
        whole.kv_len,
        tuple(b._replace(lower=place - window + 1, upper=upper) for b in whole.bands),
    )


def documents(
    lengths: Sequence[int], kv_lengths: Sequence[int] | None = None, *, is_causal: bool = False
) -> Mask:
    """Return the mask of documents packed into one sequence: a token sees only its own document.

    Args:
        lengths: Number of tokens of each document, in order.
        kv_lengths: Number of keys of each document; None means `lengths`.
        is_causal: Whether a token sees only keys up to its position; a document's last query stands at its last key.

    Raises:
        ValueError: A length is negative, or there are key lengths for another number of documents.
        TypeError: A length is not an integer.
    """
    kv_lengths = lengths if kv_lengths is None else kv_lengths
    lengths, kv_lengths = (
        [operator.index(length) for length in x] for x in (lengths, kv_lengths)
    )
    if len(lengths) != len(kv_lengths) or min((*lengths, *kv_lengths), default=0) < 0:
        raise ValueError(
            f"{len(lengths)} documents of queries and {len(kv_lengths)} of keys: there must be as "
            "many of both, and no length may be negative"
        )
    q_ends, kv_ends = (list(accumulate(x, initial=0)) for x in (lengths, kv_lengths))
    bands = []
    for q, kv in zip(pairwise(q_ends), pairwise(kv_ends), strict=True):
        if q[0] < q[1] and kv[0] < kv[1]:
            bands.append(Band(*q, *kv, upper=kv[1] - q[1] if is_causal else ANY))
    return Mask(q_ends[-1], kv_ends[-1], tuple(bands))


def documents_of(ids: np.ndarray, *, is_causal: bool = False) -> Mask:
    """Return the mask of documents, from the document number of each token.

    Args:
        ids: The numbers, (S,) for all sequences, or (B, S).
        is_causal: Whether a token sees only keys up to its position.

    Raises:
        ValueError: A number comes back after another one, so that its document is not in one piece.
    """
    if ids.ndim == 2:
        return by_sequence([documents_of(row, is_causal=is_causal) for row in ids])
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
    if len(np.unique(ids[starts])) < len(starts):
        numbers, counts = np.unique(ids[starts], return_counts=True)
        raise ValueError(
            f"document number {numbers[counts > 1][0]} comes back after another one; a document must lie in one piece"
        )
    return documents(np.diff(starts, append=len(ids)).tolist(), is_causal=is_causal)


def by_sequence(masks: Sequence[Mask]) -> Mask:
    """Return the mask of a batch.

    Args:
        masks: One mask for each sequence.

    Raises:
        ValueError: There are no masks, masks of different lengths, or a mask of several sequences.
    """
    shapes = {(mask.q_len, mask.kv_len, mask.sequences) for mask in masks}
    if len(shapes) != 1 or next(iter(shapes))[2] != 1:
        raise ValueError(
            f"masks of {sorted(shapes)} (queries, keys, sequences): there must be one, of the same lengths, a sequence"
        )
    q_len, kv_len, _ = next(iter(shapes))
    bands = (
        band.shifted(b * q_len, b * kv_len)
        for b, mask in enumerate(masks)
        for band in mask.bands
    )
    return Mask(q_len, kv_len, tuple(bands), len(masks))


def _overlay(a: Iterable[Band], b: Iterable[Band]) -> Iterator[Band]:
    """Yield the bands of the pairs that both lists show. Each list ascends, and no two of its bands share a query."""
    left = iter(a)
    right = iter(b)
    x = next(left, None)
    y = next(right, None)
    while x is not None and y is not None:
        q = max(x.q_start, y.q_start), min(x.q_stop, y.q_stop)
        kv = max(x.kv_start, y.kv_start), min(x.kv_stop, y.kv_stop)
        bounds = max(x.lower, y.lower), min(x.upper, y.upper)
        if q[0] < q[1] and kv[0] < kv[1] and bounds[0] <= bounds[1]:
            yield Band(*q, *kv, *bounds)
        if x.q_stop <= y.q_stop:
            x = next(left, None)
        else:
            y = next(right, None)

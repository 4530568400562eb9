"""Numbered, endless streams over the items of a data set, in an order that does not depend on how many ranks read them.

The items (documents, pairs of frames) are shuffled by the seed and assigned to n = `data_streams` streams. Each stream
shuffles its items again in every epoch, makes samples of them and numbers these, without end. Global sample i is number
i // n of stream i % n. Data-parallel rank r of D reads samples r, r + D, r + 2D, ...

            stream:   0  1  2  3           D = 2: rank 0 reads 0 2 4 6 8 10, rank 1 reads 1 3 5 7 9 11
    samples number 0: 0  1  2  3           D = 1: all of them in order
            number 1: 4  5  6  7           D = 3: rank 0 reads 0 3 6 9, of all streams
            number 2: 8  9 10 11

If D divides n, rank r makes the samples of the streams s with s % D == r, and no others. Else ranks share streams: each
makes all samples of its streams, those with s % gcd(n, D) == r % gcd(n, D), and skips the samples of other ranks.

The state is one small entry per stream, as it is when all ranks have read equally many samples. The states of all ranks
merge into one dict, from which any number of ranks can resume.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

import numpy as np

from trainer.data.order.shuffled import shuffled

StreamState = dict[str, Any]
DEFAULT_STREAMS, ITEMS_PER_STREAM = 64, 8
_ASSIGN, _EPOCH = 0, 1  # purposes of a shuffle


def assigned(
    n: int, data_streams: int, seed: int, dp_rank: int, dp_degree: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each stream that a data-parallel rank reads, and its share of the items in shuffled order.

    Args:
        n: Number of items.
        data_streams: Number of streams.
        seed: Seed of the order.
        dp_rank: The data-parallel rank.
        dp_degree: The number of data-parallel ranks.
    """
    items = shuffled(n, seed, _ASSIGN)
    for stream in streams_of_rank(data_streams, dp_rank, dp_degree):
        yield stream, items[stream::data_streams]


def streams_of_rank(data_streams: int, dp_rank: int, dp_degree: int) -> range:
    """Return the numbers of the streams that a data-parallel rank reads.

    Args:
        data_streams: Number of streams.
        dp_rank: The data-parallel rank.
        dp_degree: The number of data-parallel ranks.
    """
    apart = gcd(data_streams, dp_degree)
    return range(dp_rank % apart, data_streams, apart)


def streams_that_fit(items: int, dp_degree: int) -> int:
    """Return the default number of streams, the same for up to 64 data-parallel ranks.

    Each stream has several items, because some may be empty.

    Args:
        items: Number of items; 0 if unknown, for one stream a rank.
        dp_degree: The number of data-parallel ranks.
    """
    if not items:
        return dp_degree
    return min(max(items // ITEMS_PER_STREAM, 1), max(DEFAULT_STREAMS, dp_degree))


def streams_with_text(has_text: np.ndarray, data_streams: int, seed: int) -> int:
    """Return the largest of data_streams, data_streams // 2, ... for which each stream has a document with text.

    The documents are assigned to the streams as in `assigned`.

    Args:
        has_text: Whether each document has text, (n,) bool.
        data_streams: Number of streams.
        seed: Seed of the order.

    Returns:
        The number of streams; 0 if no document has text.
    """
    in_order = has_text[shuffled(len(has_text), seed, _ASSIGN)]
    while data_streams and not all(
        in_order[stream::data_streams].any() for stream in range(data_streams)
    ):
        data_streams //= 2
    return data_streams


class Shuffled:
    """Items in an order that depends on seed, stream and epoch.

    Args:
        items: Their numbers in the data set, in the order of their assignment.
        stream: The number of the stream.
        seed: Seed of the order.
    """

    def __init__(self, items: Sequence[int], *, stream: int, seed: int) -> None:
        self.stream = stream
        self._items = items
        self._seed = seed
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._items)

    def item(self, epoch: int, place: int) -> int:
        """Return the number in the data set, from 0, of the item at a place. A new epoch is shuffled and kept.

        Args:
            epoch: The number of the epoch, from 0.
            place: The place in the order of the epoch, from 0 to `len(self)` - 1.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = shuffled(len(self), self._seed, _EPOCH, self.stream, epoch)
        return int(self._items[self._order[place]])

    def passes(self, epoch: int, place: int) -> float:
        """Return the passes over the items before a place; the item at the place does not count.

        Args:
            epoch: The number of the epoch.
            place: The place in its order.
        """
        return epoch + place / len(self)

    def restart(self, epoch: int, state: StreamState) -> None:
        """Do nothing: the order of every epoch is known.

        Args:
            epoch: The number of the epoch.
            state: The state of the stream.
        """

    def state(self, epoch: int, oldest: int) -> StreamState:
        """Return the entries that `restart` needs in addition to the place: none.

        Args:
            epoch: The number of the epoch.
            oldest: The lowest place that is still to be read.
        """
        return {}


Order = Any
"""The items of one stream, in the order of each epoch: `Shuffled`, or `IterableDocuments` with the same methods."""


class ItemStream:
    """One stream: goes through its items, in another order in each epoch.

    Args:
        order: The items, in the order of each epoch.
    """

    ITEM = "item"
    """Key of the state whose value is the place in the epoch's order."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.restart({})

    @property
    def state(self) -> StreamState:
        """The position: epoch, place of the item in its order, samples so far, entries of the order."""
        place = {"epoch": self._epoch, self.ITEM: self._place, "samples": self.samples}
        return place | self.order.state(self._epoch, self.oldest)

    @property
    def passes(self) -> float:
        """Passes over the items of this stream so far, without the current item."""
        return self.order.passes(self._epoch, self._place)

    def restart(self, state: StreamState) -> None:
        """Resume from a position. Epoch, place and number of samples are set without a check.

        Args:
            state: The position, as in `state`; empty for the beginning.
        """
        self._epoch, self._place, self.samples = (
            int(state.get(key, 0)) for key in ("epoch", self.ITEM, "samples")
        )
        self.order.restart(self._epoch, state)

    @property
    def oldest(self) -> int:
        """The lowest place in the epoch's order that is still to be read, also after a restart."""
        return self._place

    def next_sample(self) -> Any:
        """Return the next item as the next sample, count it, and advance. The stream never ends."""
        item = self.order.item(self._epoch, self._place)
        self.advance()
        self.samples += 1
        return item

    def advance(self) -> None:
        """Go to the next item without reading it; after the last item, to the first item of the next epoch."""
        self._place += 1
        if self._place == len(self.order):
            self._place = 0
            self._epoch += 1

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

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any, Protocol

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.order.shuffled import ORDER, SORTED, shuffled
from trainer.observer import Positions
from trainer.runtime.console import logger

StreamState = dict[str, Any]
DEFAULT_STREAMS, ITEMS_PER_STREAM = 64, 8
_ASSIGN, _EPOCH = 0, 1  # what a shuffle is for
IDENTITY = {
    "tokenizer": "the tokenizer (model.tokenizer_path) is another one than that of the checkpoint",
    "text_field": "training.dataset_text_field is another one than in the checkpoint",
    "template": "the chat template (model.chat_template) is another one than that of the checkpoint",
    "seq_len": "training.seq_len = {now} is not the {saved} of the checkpoint, and its training.packing counts pieces "
    "of documents of that length",
    "content": "the content of the data set has changed since the checkpoint",
    "numbers": "the numbers of the fields, or their order, have changed since the checkpoint",
}
"""What decides the data behind a position: entry of a state -> what is said if it differs. Older states lack some."""
# a hash of sizes, heads and tails of files, which was in the place of "content"
_OLDER = ("data",)
AGAIN = 'or read the data from its start with checkpoint.load_step and checkpoint.exclude_from_loading = ["dataloader"]'
"""What the message of a state says that does not fit the data."""
_NAMES = {
    "order": "version of the order",
    "data_streams": "training.data_streams",
    "seed": "training.seed",
    "documents": "number of documents",
}


def assigned(
    n: int, data_streams: int, seed: int, dp_rank: int, dp_degree: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the number of each stream that a data-parallel rank reads, and its share of n items in shuffled order."""
    items = shuffled(n, seed, _ASSIGN)
    for stream in streams_of_rank(data_streams, dp_rank, dp_degree):
        yield stream, items[stream::data_streams]


def streams_of_rank(data_streams: int, dp_rank: int, dp_degree: int) -> range:
    """Return the numbers of the streams that a data-parallel rank reads."""
    apart = gcd(data_streams, dp_degree)
    return range(dp_rank % apart, data_streams, apart)


def streams_that_fit(items: int, dp_degree: int) -> int:
    """Return the number of streams of a run that does not name it: the same for up to 64 data-parallel ranks.

    Several items for each, because some may be empty. With 0 items, a number that is not known, one a rank.
    """
    if not items:
        return dp_degree
    return min(max(items // ITEMS_PER_STREAM, 1), max(DEFAULT_STREAMS, dp_degree))


def streams_with_text(has_text: np.ndarray, data_streams: int, seed: int) -> int:
    """Return the largest of data_streams, data_streams // 2, ... for which each stream has a document with text.

    has_text: (n,) bool, of each document; 0 is returned if no document has text.
    """
    in_order = has_text[shuffled(len(has_text), seed, _ASSIGN)]
    while data_streams and not all(
        in_order[stream::data_streams].any() for stream in range(data_streams)
    ):
        data_streams //= 2
    return data_streams


class Order(Protocol):
    """The items of one stream, in the order of each epoch. stream: its number."""

    stream: int

    def __len__(self) -> int: ...

    def item(self, epoch: int, place: int) -> Any:
        """Return the item at a place in the order of an epoch."""

    def passes(self, epoch: int, place: int) -> float:
        """Return the passes over the items before a place; the item there does not count."""

    def restart(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Go to the position of a stream's state, in this epoch; empty: the beginning."""

    def state(self, epoch: int, oldest: int) -> StreamState:
        """Return what `restart` needs besides the place. oldest: the first place that is still to be read."""


class Shuffled:
    """Items in an order that seed, stream and epoch decide.

    items: their numbers in the data set, in the order in which they were assigned.
    """

    def __init__(self, items: Sequence[int], *, stream: int, seed: int) -> None:
        self.stream = stream
        self._items = items
        self._seed = seed
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._items)

    def item(self, epoch: int, place: int) -> int:
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = shuffled(len(self), self._seed, _EPOCH, self.stream, epoch)
        return int(self._items[self._order[place]])

    def passes(self, epoch: int, place: int) -> float:
        return epoch + place / len(self)

    def restart(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Do nothing: the order of every epoch is known."""

    def state(self, epoch: int, oldest: int) -> StreamState:
        return {}


class ItemStream:
    """One stream: goes through its items, in another order in each epoch."""

    ITEM = "item"
    """The name of the place in the epoch's order, in the state."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.restart({})

    @property
    def state(self) -> StreamState:
        """The position: epoch, place of the item in the epoch's order, samples given so far, what the order adds."""
        place = {"epoch": self._epoch, self.ITEM: self._place, "samples": self.samples}
        return place | self.order.state(self._epoch, self.oldest)

    @property
    def passes(self) -> float:
        """Passes over the items of this stream so far; the current item counts when it is used up."""
        return self.order.passes(self._epoch, self._place)

    def restart(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""
        self._epoch, self._place, self.samples = (
            int(state.get(key, 0)) for key in ("epoch", self.ITEM, "samples")
        )
        self.order.restart(self._epoch, state)

    @property
    def oldest(self) -> int:
        """The lowest place in the epoch's order that is still to be read, also after a restart."""
        return self._place

    def next_sample(self) -> Any:
        """Return the next sample: the next item."""
        item = self.order.item(self._epoch, self._place)
        self.advance()
        self.samples += 1
        return item

    def advance(self) -> None:
        """Go to the next item, of the next epoch after the last one."""
        self._place += 1
        if self._place == len(self.order):
            self._place = 0
            self._epoch += 1


class StreamLoader:
    """What loaders of all kinds of data share: the streams that one data-parallel rank reads, and their state.

    items: of the data set, a number or one for each of its sources; data_streams: None: as many as fit, or those of
    the state that is loaded.
    """

    def __init__(
        self, items: Any, *, data_streams: int | None, seed: int, dp_rank: int, dp_degree: int
    ) -> None:
        self._chooses = data_streams is None
        self._seed = seed
        self._rank = dp_rank
        self._degree = dp_degree
        fewest = min(items) if isinstance(items, tuple) else items
        self._items = items
        self._n = data_streams or self.fitting(streams_that_fit(fewest, dp_degree))
        self._streams = self.streams_of(items, self._n)
        self._fixed = self._fixed_by(items, self._n)
        self._given = 0
        """Samples that all ranks have read."""

    def fitting(self, data_streams: int) -> int:
        """Return the number of streams of a run that does not name it, from the number that fits `items`."""
        return data_streams

    @abstractmethod
    def streams_of(self, items: Any, data_streams: int) -> dict[int, Any]:
        """Return the streams of this rank by number, at their beginning: of `ItemStream`, or like it."""

    @abstractmethod
    def describe(self, items: Any) -> dict[str, int]:
        """Return what else the meaning of a position depends on, if `items` of the data set are read."""

    def items_of(self, saved: Mapping[str, Any]) -> Any:
        """Return how many items a run reads that resumes from an entry of a state."""
        return self._items

    def _fixed_by(self, items: Any, data_streams: int) -> dict[str, int]:
        most = max(items) if isinstance(items, tuple) else items
        order = {"order": ORDER} if most > SORTED else {}
        return {"data_streams": data_streams, "seed": self._seed} | order | self.describe(items)

    def _next_samples(self, number: int) -> Iterator[tuple[int, Any]]:
        """Yield this rank's next samples i: global sample i is of rank i % degree, and of stream i % data_streams.

        Samples of other ranks in the streams of this rank are made and left out, also at the end.
        """
        first = self._given + (self._rank - self._given) % self._degree
        for sample in range(first, first + number * self._degree, self._degree):
            stream = self._streams[sample % self._n]
            _skip_to(stream, sample // self._n)
            yield sample, stream.next_sample()
        self._given += number * self._degree
        for s, stream in self._streams.items():
            _skip_to(stream, -(-(self._given - s) // self._n))

    @property
    def epoch(self) -> float:
        """Passes over the data so far, mean over the streams of this rank."""
        return sum(stream.passes for stream in self._streams.values()) / len(self._streams)

    def state_dict(self) -> dict[int, StreamState]:
        """Return the position of each stream of this rank; those of all ranks, merged, are the state of the data."""
        return {s: stream.state | self._fixed for s, stream in self._streams.items()}

    def load_state_dict(self, states: Positions) -> None:
        """Resume from the merged states of any number of ranks; an iterator that is in use does so as well.

        Raises:
            ConfigError: a stream is missing, or the entries are of another data set, seed or number of streams.
        """
        saved = next(iter(states.values()), {})
        items = self.items_of(saved)
        n = saved.get("data_streams", self._n) if self._chooses else self._n
        streams = self._streams
        fixed = self._fixed
        if (items, n) != (self._items, self._n):
            streams = self.streams_of(items, n)
            fixed = self._fixed_by(items, n)
        shared = n % self._degree != 0
        for s in range(n) if shared else streams:
            if s not in states:
                raise ConfigError(
                    f"the saved data state lacks stream {s}; it must hold the streams of all ranks, merged"
                )
        for s, stream in streams.items():
            _check(states[s], fixed, stream.state)
        if lacking := sorted(
            {_plain(key) for key in fixed if _is_identity(key) and key not in saved}
        ):
            logger.info(
                f"note: an older version wrote the checkpoint, which does not record {', '.join(lacking)} of its data: "
                "make sure that they are the same"
            )
        self._streams = streams
        self._fixed = fixed
        self._items = items
        self._n = n
        for s, stream in streams.items():
            stream.restart(states[s])
        # If no stream is shared, the state may have those of this rank only: the next of them is this rank's next.
        self._given = min(stream.samples * n + s for s, stream in streams.items())
        if shared:
            self._given = sum(states[s]["samples"] for s in range(n))


def _check(
    saved: Mapping[str, Any], fixed: Mapping[str, Any], position: Mapping[str, Any]
) -> None:
    """Check that the saved state of a stream means the same data as `fixed`, and has the entries of a position.

    An entry of `IDENTITY` that an older state lacks is left out.
    """
    if "order" in fixed and "order" not in saved:
        raise ConfigError(
            f"the checkpoint is of an older version, which had another order of more than {SORTED:,} documents, so "
            f"that its positions would mean other data; resume with that version, {AGAIN}"
        )
    if any(_plain(key) == "waiting" and isinstance(x, int) for key, x in saved.items()):
        raise ConfigError(
            "the checkpoint is of an older version, which had bits in the place of the documents that wait for a "
            f"sequence; resume with that version, {AGAIN}"
        )
    entries = (
        {key for key in keys if not _is_identity(key)} for keys in (saved, {*fixed, *position})
    )
    if next(entries) != next(entries):
        raise ConfigError(
            "the saved data state is of another kind of data, or of a training.packing that cuts documents where this "
            f"one does not; resume with what it was saved with, {AGAIN}"
        )
    for key, now in fixed.items():
        source, _, name = key.rpartition("/")
        if (before := saved.get(key, now)) == now:
            continue
        problem = IDENTITY.get(
            name,
            f"{_NAMES.get(name, name)} = {{now}} is not the {{saved}} of the saved data state",
        )
        resume = f"resume with {before}" if name not in IDENTITY else "resume with that one"
        if name == "content":
            resume = "restore the files (new ones may be added behind the last one)"
        elif name == "numbers":
            resume = "restore the file"
        raise ConfigError(
            f"{f'of the source {source!r}, ' if source else ''}{problem.format(now=now, saved=before)}, so that its "
            f"positions would mean other data; {resume}, {AGAIN}"
        )


def _plain(key: str) -> str:
    """Return the name of an entry without that of a mixture's source."""
    return key.rpartition("/")[2]


def _is_identity(key: str) -> bool:
    return _plain(key) in IDENTITY or _plain(key) in _OLDER


def _skip_to(stream: Any, samples: int) -> None:
    while stream.samples < samples:
        stream.next_sample()

"""The loader of numbered streams: the streams of one data-parallel rank, and their state.

`trainer/data/loader.py` makes batches of its samples. It never mixes streams: the state has one entry for each.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.order.shuffled import ORDER, SORTED
from trainer.data.order.streams import StreamState, streams_that_fit
from trainer.observer import Positions
from trainer.runtime.console import logger

IDENTITY = {
    "tokenizer": "the tokenizer (model.tokenizer_path) is not the tokenizer of the checkpoint",
    "text_field": "training.dataset_text_field is another one than in the checkpoint",
    "template": "the chat template (model.chat_template) is not the template of the checkpoint",
    "seq_len": "training.seq_len = {now} is not the {saved} of the checkpoint, and its training.packing counts pieces "
    "of documents of that length",
    "content": "the content of the data set has changed since the checkpoint",
    "numbers": "the numbers of the fields, or their order, have changed since the checkpoint",
}
"""Entries of a state that decide its data, with the message for a difference. Older states lack some entries."""
# a hash of sizes, heads and tails of files, which older states have instead of "content"
_OLDER = ("data",)
AGAIN = 'or read the data from its start with checkpoint.load_step and checkpoint.exclude_from_loading = ["dataloader"]'
"""End of the message of a state that does not fit the data."""
_NAMES = {
    "order": "version of the order",
    "data_streams": "training.data_streams",
    "seed": "training.seed",
    "documents": "number of documents",
}


class StreamLoader:
    """The common part of all loaders: the streams that one data-parallel rank reads, and their state.

    Args:
        items: Number of items of the data set, or one number for each of its sources.
        data_streams: Number of streams; None for the default, or for the number in a loaded state.
        seed: Seed of the order.
        dp_rank: The data-parallel rank.
        dp_degree: The number of data-parallel ranks.
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
        self._samples = 0
        """Samples that all ranks have read."""

    def fitting(self, data_streams: int) -> int:
        """Return the number of streams if `training.data_streams` is not set.

        Args:
            data_streams: The number of streams that fits the number of items.
        """
        return data_streams

    @abstractmethod
    def streams_of(self, items: Any, data_streams: int) -> dict[int, Any]:
        """Return the streams of this rank by number, at their beginning: each an `ItemStream`, or like one.

        Args:
            items: Number of items that are read.
            data_streams: Number of streams.
        """

    @abstractmethod
    def describe(self, items: Any) -> dict[str, int]:
        """Return everything that the meaning of a position depends on, except seed and number of streams, by name.

        Args:
            items: Number of items that are read.
        """

    def items_of(self, saved: StreamState) -> Any:
        """Return how many items a resumed run reads.

        Args:
            saved: The saved state of one stream; empty if there is none.
        """
        return self._items

    def _fixed_by(self, items: Any, data_streams: int) -> dict[str, int]:
        most = max(items) if isinstance(items, tuple) else items
        order = {"order": ORDER} if most > SORTED else {}
        return {"data_streams": data_streams, "seed": self._seed} | order | self.describe(items)

    def _next_samples(self, number: int) -> Iterator[tuple[int, Any]]:
        """Yield the next `number` samples of this rank, each with its global number.

        Sample i is for rank i % degree, from stream i % data_streams. If a stream has samples of several ranks, each of
        these ranks makes all of them. It drops the samples of other ranks, also samples after its own last one.
        """
        first = self._samples + (self._rank - self._samples) % self._degree
        for sample in range(first, first + number * self._degree, self._degree):
            stream = self._streams[sample % self._n]
            _skip_to(stream, sample // self._n)
            yield sample, stream.next_sample()
        self._samples += number * self._degree
        for s, stream in self._streams.items():
            _skip_to(stream, -(-(self._samples - s) // self._n))

    @property
    def epoch(self) -> float:
        """Passes over the data so far, mean over the streams of this rank."""
        return sum(stream.passes for stream in self._streams.values()) / len(self._streams)

    def state_dict(self) -> dict[int, StreamState]:
        """Return the position of each stream of this rank. The merged positions of all ranks are the state."""
        return {s: stream.state | self._fixed for s, stream in self._streams.items()}

    def load_state_dict(self, states: Positions) -> None:
        """Resume from the merged states of any number of ranks. An iterator in use resumes, too.

        Args:
            states: The state of each stream.

        Raises:
            ConfigError: A stream is missing, or the entries are of another data set, seed or number of streams.
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
        # If ranks share no stream, the state may hold this rank's streams only. The lowest next sample is this rank's.
        self._samples = min(stream.samples * n + s for s, stream in streams.items())
        if shared:
            self._samples = sum(states[s]["samples"] for s in range(n))


def _check(saved: StreamState, fixed: StreamState, position: StreamState) -> None:
    """Raise a ConfigError unless a stream's state is of the same data as `fixed`, and has the entries of a position.

    An entry of `IDENTITY` that an older state lacks is not compared.
    """
    if "order" in fixed and "order" not in saved:
        raise ConfigError(
            f"the checkpoint is of an older version, which had another order of more than {SORTED:,} documents, so "
            f"that its positions would mean other data; resume with that version, {AGAIN}"
        )
    if any(_plain(key) == "waiting" and isinstance(x, int) for key, x in saved.items()):
        raise ConfigError(
            "the checkpoint is of an older version, which had bits instead of the documents that wait for a "
            f"sequence; resume with that version, {AGAIN}"
        )
    if not all(map(_is_identity, saved.keys() ^ {*fixed, *position})):
        raise ConfigError(
            "the saved position in the data belongs to another training.dataset or training.packing; "
            f"resume with the settings of the run that saved it, {AGAIN}"
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
    """Return the name of an entry without the name of a mixture's source."""
    return key.rpartition("/")[2]


def _is_identity(key: str) -> bool:
    return _plain(key) in IDENTITY or _plain(key) in _OLDER


def _skip_to(stream: Any, samples: int) -> None:
    while stream.samples < samples:
        stream.next_sample()

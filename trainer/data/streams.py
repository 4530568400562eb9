"""Numbered, endless streams over the items of a data set, in an order that does not depend on how many ranks read them.

The items (documents, pairs of frames) are shuffled by the seed and dealt to n = `data_streams` streams. Each stream
shuffles its items anew in every epoch, makes samples of them and numbers these, without end. Global sample i is number
i // n of stream i % n. Data-parallel rank r of D owns the streams s with s % D == r, and so reads samples r, r + D,
r + 2D, ...

            stream:   0  1  2  3           D = 2: rank 0 reads 0 2 4 6 8 10, rank 1 reads 1 3 5 7 9 11
    samples number 0: 0  1  2  3           D = 1: all of them in order
            number 1: 4  5  6  7
            number 2: 8  9 10 11

The state is one small entry per stream. The states of all ranks merge into one dict, from which any number of ranks
can resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np

from trainer.config.errors import ConfigError

StreamState = dict[str, int]
_DEAL, _EPOCH = 0, 1  # what a shuffle is for
_NAMES = {
    "data_streams": "training.data_streams",
    "seed": "training.seed",
    "documents": "number of documents",
    "trajectories": "number of trajectories for training",
    "times": "number of times of a trajectory",
    "lead": "lead",
}


def shuffled(n: int, seed: int, *purpose: int) -> np.ndarray:
    """Return a permutation (n,) of range(n), fixed by its arguments on every machine.

    It sorts raw bits: numpy keeps a bit generator's stream from version to version, but not `permutation`.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed % 2**64, spawn_key=purpose))
    return np.argsort(bits.random_raw(n), kind="stable").astype(np.uint32 if n < 2**32 else np.int64)


def dealt(n: int, data_streams: int, seed: int, dp_rank: int, dp_degree: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of each stream of a data-parallel rank, and its share of n items in the order of dealing."""
    items = shuffled(n, seed, _DEAL)
    for stream in range(dp_rank, data_streams, dp_degree):
        yield stream, items[stream::data_streams].copy()


class ItemStream:
    """One stream: goes through its items, in another order in each epoch.

    items: (n,) their numbers in the data set, in the order in which they were dealt.
    """

    ITEM = "item"
    """The name of the place in the epoch's order, in the state."""

    def __init__(self, items: np.ndarray, *, stream: int, seed: int) -> None:
        self._items, self._stream, self._seed = items, stream, seed
        self.restart({})

    @property
    def state(self) -> StreamState:
        """The position: epoch, place of the item in the epoch's order, samples given so far."""
        return {"epoch": self._epoch, self.ITEM: self._place, "samples": self.samples}

    @property
    def passes(self) -> float:
        """Passes over the items of this stream so far; the current item counts when it is used up."""
        return self._epoch + self._place / len(self._items)

    def restart(self, state: Mapping[str, int]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""
        self._epoch, self._place, self.samples = (int(state.get(key, 0)) for key in ("epoch", self.ITEM, "samples"))
        self._order: np.ndarray | None = None

    def next_item(self) -> int:
        """Return the next item, which is a sample by itself."""
        item = self._current_item()
        self.advance()
        self.samples += 1
        return item

    def _current_item(self) -> int:
        return self._item_at(self._place)

    def _item_at(self, place: int) -> int:
        if self._order is None:
            self._order = shuffled(len(self._items), self._seed, _EPOCH, self._stream, self._epoch)
        return int(self._items[self._order[place]])

    def advance(self) -> None:
        """Go to the next item, of the next epoch after the last one."""
        self._place += 1
        if self._place == len(self._items):
            self._place, self._order = 0, None
            self._epoch += 1


S = TypeVar("S", bound=ItemStream)


class StreamLoader(Generic[S]):
    """What loaders of all kinds of data share: the streams of one data-parallel rank, and their state.

    fixed: what the meaning of a position depends on. It is saved with it, so that no run resumes on other data.
    """

    def __init__(self, streams: Mapping[int, S], fixed: Mapping[str, int]) -> None:
        self._streams, self._fixed = dict(streams), dict(fixed)

    def _next_stream(self) -> S:
        # The fewest samples so far, then the lowest number: the next of the global order, also after re-sharding.
        return min(self._streams.values(), key=lambda stream: stream.samples)

    @property
    def epoch(self) -> float:
        """Passes over the data so far, mean over the streams of this rank."""
        return sum(stream.passes for stream in self._streams.values()) / len(self._streams)

    def state_dict(self) -> dict[int, StreamState]:
        """Return the position of each stream of this rank; those of all ranks, merged, are the state of the data."""
        return {s: stream.state | self._fixed for s, stream in self._streams.items()}

    def load_state_dict(self, states: Mapping[int, Mapping[str, int]]) -> None:
        """Resume from the merged states of any number of ranks; an iterator that is in use does so as well.

        Raises:
            ConfigError: a stream is missing, or the entries are of another data set, seed or number of streams.
        """
        for s, stream in self._streams.items():
            if s not in states:
                raise ConfigError(
                    f"the saved data state lacks stream {s}; it must hold the streams of all ranks, merged"
                )
            for key, now in self._fixed.items():
                self._check_same(key, now, states[s])
            if states[s].keys() != stream.state.keys() | self._fixed.keys():
                raise ConfigError(
                    "the saved data state is of another kind of data; resume with the kind of data that it was saved "
                    "with, or start the data anew"
                )
        for s, stream in self._streams.items():
            stream.restart(states[s])

    def _check_same(self, key: str, now: int, state: Mapping[str, int]) -> None:
        if key not in state:
            raise ConfigError(
                f"the saved data state has no {_NAMES[key]}, because it is of another kind of data; "
                "resume with the kind of data that it was saved with, or start the data anew"
            )
        if (saved := state[key]) != now:
            raise ConfigError(
                f"{_NAMES[key]} = {now} is not the {saved} of the saved data state, whose positions would mean "
                f"other data; resume with {saved}, or start the data anew"
            )

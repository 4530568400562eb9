"""What a loader of text asks of a data set: token files (`TextData`), an iterable (`IterableData`) or a `Mixture`."""

from collections.abc import Mapping
from typing import Any, Protocol

from trainer.data.contents import Contents
from trainer.data.order.streams import StreamState
from trainer.data.packing import PackedSequence

Items = int | tuple[int, ...]
"""Number of documents, of each source of a mixture; 0 if nobody knows it."""


class SampleStream(Protocol):
    """One numbered, endless stream of packed sequences. samples: how many it has given."""

    samples: int

    @property
    def state(self) -> StreamState:
        """The position."""

    @property
    def passes(self) -> float:
        """Passes over the documents so far."""

    def restart(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""

    def next_sample(self) -> PackedSequence:
        """Return the next packed sequence; ConfigError if the documents have none."""


class DataSet(Protocol):
    """Documents, and how they become streams of packed sequences."""

    @property
    def items(self) -> Items:
        """Number of documents."""

    def check(self, data_streams: int | None, seed: int = 0) -> None:
        """Check that every stream has a document with text, as far as it is known; ConfigError otherwise."""

    def streams_with_text(self, data_streams: int, seed: int) -> int:
        """Return `data_streams`, or fewer if a stream had no text."""

    def streams(
        self,
        items: Items,
        seq_len: int,
        data_streams: int,
        seed: int,
        dp_rank: int,
        dp_degree: int,
    ) -> Mapping[int, SampleStream]:
        """Return the streams that a data-parallel rank reads, by number. items: how many documents are read."""

    def describe(self, items: Items, seq_len: int) -> dict[str, int]:
        """Return what the meaning of a position depends on, besides seed and number of streams."""

    def items_of(self, saved: Mapping[str, Any]) -> Items:
        """Return how many documents a run reads that resumes from an entry of a state.

        Raises:
            ConfigError: the data set is not the one of the state.
        """

    def contents(self) -> dict[str, Contents]:
        """Return the content of each source by name, "" if there is one; none of an iterable, which has no files."""

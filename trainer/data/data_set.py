"""The interface of a data set for a loader of text. `TextData`, `IterableData` and `Mixture` have it."""

from collections.abc import Mapping
from typing import Any, Protocol

from trainer.data.contents import Contents
from trainer.data.order.streams import StreamState
from trainer.data.packing import PackedSequence

Items = int | tuple[int, ...]
"""Number of documents, or one number for each source of a mixture; 0 if unknown."""


class SampleStream(Protocol):
    """One numbered, endless stream of packed sequences.

    Attributes:
        samples: Number of samples that it has returned.
    """

    samples: int

    @property
    def state(self) -> StreamState:
        """The position."""

    @property
    def passes(self) -> float:
        """Passes over the documents so far."""

    def restart(self, state: Mapping[str, Any]) -> None:
        """Resume from a position.

        Args:
            state: The position; empty for the beginning.
        """

    def next_sample(self) -> PackedSequence:
        """Return the next packed sequence.

        Raises:
            ConfigError: The documents have none.
        """


class DataSet(Protocol):
    """Documents, and how streams pack them into sequences."""

    @property
    def items(self) -> Items:
        """Number of documents."""

    def check(self, data_streams: int | None, seed: int = 0) -> None:
        """Check that every stream has a document with text, as far as this is known.

        Args:
            data_streams: The configured number of streams, None for the default.
            seed: Seed of the order.

        Raises:
            ConfigError: A stream has none.
        """

    def streams_with_text(self, data_streams: int, seed: int) -> int:
        """Return `data_streams`, or fewer if a stream had no text.

        Args:
            data_streams: Number of streams.
            seed: Seed of the order.
        """

    def streams(
        self,
        items: Items,
        seq_len: int,
        data_streams: int,
        seed: int,
        dp_rank: int,
        dp_degree: int,
    ) -> Mapping[int, SampleStream]:
        """Return the streams that a data-parallel rank reads, by number.

        Args:
            items: Number of documents that are read.
            seq_len: Tokens of a sequence.
            data_streams: Number of streams.
            seed: Seed of the order.
            dp_rank: The data-parallel rank.
            dp_degree: The number of data-parallel ranks.
        """

    def describe(self, items: Items, seq_len: int) -> dict[str, int]:
        """Return everything that the meaning of a position depends on, except seed and number of streams.

        Args:
            items: Number of documents that are read.
            seq_len: Tokens of a sequence.
        """

    def items_of(self, saved: Mapping[str, Any]) -> Items:
        """Return how many documents a resumed run reads.

        Args:
            saved: An entry of the saved state.

        Raises:
            ConfigError: The state is of another data set.
        """

    def contents(self) -> dict[str, Contents]:
        """Return the counts of each source by name, "" for a single source; empty for an iterable."""

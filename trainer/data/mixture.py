"""A mixture: several data sets by weights, read as one. Torch-free.

The source of global sample i follows from the number i x golden ratio (mod 1): [0, 1) is divided into a part for each
source, as long as its weight. So each source has its share of any stretch of samples, up to a few, on any number of
ranks, and only i must be known. Each data stream has a stream of every source, and takes the next sequence of the
source of its next sample.

    weights 0.75, 0.25   samples 0 1 2 3 4 5 6 7 8 9 ...
                         source  a a a b a a a b b a ...

Counting what each source lacks would be exact to one sample. But with two sources of equal weight and an even number of
streams, half of the streams would never read one of the sources.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Union

from trainer.config.errors import ConfigError
from trainer.data.contents import Contents
from trainer.data.order.stream_loader import AGAIN
from trainer.data.order.streams import ItemStream, StreamState
from trainer.data.packing import PackedSequence
from trainer.data.text_data import TextData
from trainer.observer import Positions

if TYPE_CHECKING:
    from trainer.data.iterable_data import IterableData

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd


def ends_of(weights: Sequence[float]) -> list[int]:
    """Return where the part of each source ends, in units of 2**-64.

    Args:
        weights: The weight of each source.
    """
    parts = [Fraction(weight) for weight in weights]
    return [int(end * 2**64 / sum(parts)) for end in accumulate(parts)]


def source_of_sample(sample: int, ends: Sequence[int]) -> int:
    """Return the number of the source of a global sample.

    Args:
        sample: The number of the sample.
        ends: The ends of the parts, as of `ends_of`.
    """
    return bisect_right(ends, sample * _GOLDEN % 2**64)


def _part(state: StreamState, name: str) -> StreamState:
    """Return the entries of the source `name` in the state of a mixture's stream, without the name in their keys."""
    return {
        key.removeprefix(f"{name}/"): value
        for key, value in state.items()
        if key.startswith(f"{name}/")
    }


@dataclass
class MixtureStream:
    """One numbered, endless stream of packed sequences of several sources.

    Attributes:
        parts: A stream of each source, by name.
        ends: The ends of the parts, as of `ends_of`.
        stream: The number of the stream.
        data_streams: The number of streams.
        samples: Number of samples that it has returned.
    """

    parts: Mapping[str, ItemStream]
    ends: Sequence[int]
    stream: int
    data_streams: int
    samples: int = 0

    @property
    def state(self) -> StreamState:
        """The number of samples given so far, and the state of each source's stream under "name/key"."""
        return {"samples": self.samples} | {
            f"{name}/{key}": x
            for name, part in self.parts.items()
            for key, x in part.state.items()
        }

    @property
    def passes(self) -> float:
        """Passes over the documents of all sources together."""
        parts = self.parts.values()
        return sum(len(part.order) * part.passes for part in parts) / sum(
            len(part.order) for part in parts
        )

    def restart(self, state: StreamState) -> None:
        """Resume from a position.

        Args:
            state: The position; empty for the beginning.
        """
        self.samples = int(state.get("samples", 0))
        for name, part in self.parts.items():
            part.restart(_part(state, name))

    def next_sample(self) -> PackedSequence:
        """Return the next packed sequence, with the number of its source.

        Raises:
            ConfigError: As the streams of the sources.
        """
        source = source_of_sample(self.samples * self.data_streams + self.stream, self.ends)
        sequence = list(self.parts.values())[source].next_sample()
        self.samples += 1
        return replace(sequence, source=source)


@dataclass(frozen=True)
class Mixture:
    """Data sets by name, and the weight of each; see `TextData`."""

    parts: Mapping[str, TextData]
    weights: Sequence[float]

    @property
    def items(self) -> tuple[int, ...]:
        """Documents of each source."""
        return tuple(part.items for part in self.parts.values())

    def check(self, data_streams: int | None, seed: int) -> None:
        """Check that every stream has a document of every source; see `TextData.check`.

        Args:
            data_streams: The configured number of streams, None for the default.
            seed: Seed of the order.

        Raises:
            ConfigError: A stream has no document of one of the sources.
        """
        for part in self.parts.values():
            part.check(data_streams, seed)

    def streams_with_text(self, data_streams: int, seed: int) -> int:
        """Return a number of streams, at most `data_streams`, for which every stream of every source has text.

        It is 0 if a source has no text.

        Args:
            data_streams: Number of streams.
            seed: Seed of the order.
        """
        fitting = 0
        while fitting != data_streams:
            fitting = data_streams
            data_streams = min(
                part.streams_with_text(data_streams, seed) for part in self.parts.values()
            )
        return data_streams

    def streams(
        self, items: tuple[int, ...], seq_len: int, data_streams: int, *how: int
    ) -> dict[int, MixtureStream]:
        """Return the streams that a data-parallel rank reads, by number; see `TextData.streams`.

        Args:
            items: Number of documents of each source.
            seq_len: Tokens of a sequence.
            data_streams: Number of streams.
            *how: Seed, data-parallel rank and degree.
        """
        streams = {
            name: part.streams(number, seq_len, data_streams, *how)
            for (name, part), number in zip(self.parts.items(), items, strict=True)
        }
        ends = ends_of(self.weights)
        return {
            s: MixtureStream(
                {name: own[s] for name, own in streams.items()}, ends, s, data_streams
            )
            for s in next(iter(streams.values()))
        }

    def describe(self, items: tuple[int, ...], seq_len: int) -> dict[str, int]:
        """Return everything that the meaning of a position depends on, of each source.

        Args:
            items: Number of documents of each source.
            seq_len: Tokens of a sequence.
        """
        return {
            f"{name}/{key}": x
            for (name, part), number in zip(self.parts.items(), items, strict=True)
            for key, x in part.describe(number, seq_len).items()
        }

    def items_of(self, saved: StreamState) -> tuple[int, ...]:
        """Return how many documents of each source a resumed run reads.

        Args:
            saved: An entry of the saved state.

        Raises:
            ConfigError: The saved state has other sources, or the documents of a source have changed.
        """
        before = {key.partition("/")[0] for key in saved if "/" in key}
        if saved and before != set(self.parts):
            raise ConfigError(
                f"mixture.names = {sorted(self.parts)} are not the sources of the checkpoint, {sorted(before)}; keep "
                f"them all (a weight of 0 leaves a source out), {AGAIN}"
            )
        return tuple(part.items_of(_part(saved, name)) for name, part in self.parts.items())

    def contents(self) -> dict[str, Contents]:
        """Return the counts of each source by name."""
        return {
            name: content
            for name, part in self.parts.items()
            for content in part.contents().values()
        }


DataSet = Union[TextData, Mixture, "IterableData"]
"""Documents, and how streams pack them into sequences. All kinds have the same methods."""


def positions_of(states: Positions, names: Sequence[str]) -> list[tuple[float, float]]:
    """Return (samples, passes) of each source. Documents that wait for a sequence count as read.

    Samples are a sum over streams. Passes are a sum of the passes of each stream over its own share of the documents.

    Args:
        states: The states of streams.
        names: The names of the sources.
    """
    positions = []
    for name in names:
        parts = [_part(state, name) | {"n": state["data_streams"]} for state in states.values()]
        passes = (
            part["epoch"] + part["document"] * part["n"] / part["documents"] for part in parts
        )
        positions.append((float(sum(part["samples"] for part in parts)), sum(passes)))
    return positions

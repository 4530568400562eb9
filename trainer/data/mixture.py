"""Several data sets by weights. Torch-free.

Global sample i is of the source in whose part of [0, 1) the number i x golden ratio (mod 1) lies; the parts are as long
as the weights. So each source has its share of any stretch of samples, up to a few, on any number of ranks, and nothing
but i must be known. Each data stream has a stream of every source, and takes the next sequence of the one whose turn it
is. (To count what each source lacks would bring every source to within one sample, but with two sources of equal weight
and an even number of streams, half of the streams would never read one of them.)

    weights 0.75, 0.25   samples 0 1 2 3 4 5 6 7 8 9 ...
                         source  a a a b a a a b b a ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.order.streams import ANEW, StreamState
from trainer.data.packing.sequence import PackedSequence
from trainer.data.settings import training_data
from trainer.data.text_data import TextData, TextStream, open_text

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd


def ends_of(weights: Sequence[float]) -> list[int]:
    """Return where the part of each source ends, in units of 2**-64."""
    parts = [Fraction(weight) for weight in weights]
    return [int(end * 2**64 / sum(parts)) for end in accumulate(parts)]


def source_of(sample: int, ends: Sequence[int]) -> int:
    """Return the number of the source of a global sample."""
    return bisect_right(ends, sample * _GOLDEN % 2**64)


def _part(state: Mapping[str, int], name: str) -> StreamState:
    """Return the entries of one source in the state of a stream of a mixture."""
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}


class MixtureStream:
    """One numbered, endless stream of packed sequences of several sources.

    items: the documents of each source that this stream has; parts: name -> what makes a stream of these.
    """

    def __init__(
        self,
        items: Sequence[Sequence[int]],
        *,
        parts: Mapping[str, Callable[..., TextStream]],
        ends: Sequence[int],
        stream: int,
        data_streams: int,
    ) -> None:
        self._numbers, self.samples = [len(own) for own in items], 0
        self._ends, self._stream, self._n = ends, stream, data_streams
        self._parts = {name: build(own, stream=stream) for (name, build), own in zip(parts.items(), items, strict=True)}

    @property
    def state(self) -> StreamState:
        """The number of samples given so far, and the state of each source's stream under "name/key"."""
        parts = ((name, part.state) for name, part in self._parts.items())
        return {"samples": self.samples} | {f"{name}/{key}": x for name, state in parts for key, x in state.items()}

    @property
    def passes(self) -> float:
        """Passes over the documents of all sources together."""
        numbers = self._numbers
        done = [n * part.passes for n, part in zip(numbers, self._parts.values(), strict=True)]
        return sum(done) / sum(numbers)

    def restart(self, state: Mapping[str, int]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""
        self.samples = int(state.get("samples", 0))
        for name, part in self._parts.items():
            part.restart(_part(state, name))

    def next_sequence(self) -> PackedSequence:
        """Return the next packed sequence, with the number of its source.

        Raises:
            ConfigError: see the streams of the sources.
        """
        source = source_of(self.samples * self._n + self._stream, self._ends)
        sequence = list(self._parts.values())[source].next_sequence()
        self.samples += 1
        return replace(sequence, source=source)

    def pass_over(self) -> None:
        self.next_sequence()


@dataclass(frozen=True)
class Mixture:
    """Data sets by name, and the weight of each; it is used as one `TextData` is."""

    parts: Mapping[str, TextData]
    weights: Sequence[float]

    @property
    def items(self) -> tuple[int, ...]:
        """Documents of each source."""
        return tuple(part.items for part in self.parts.values())

    def check(self, data_streams: int | None) -> None:
        """Check that every stream has a document of every source; ConfigError otherwise."""
        for part in self.parts.values():
            part.check(data_streams)

    def builder(self, seq_len: int, seed: int, data_streams: int) -> Callable[..., MixtureStream]:
        """Return what makes a stream of (items, stream=its number)."""
        parts = {name: part.builder(seq_len, seed, data_streams) for name, part in self.parts.items()}
        return partial(MixtureStream, parts=parts, ends=ends_of(self.weights), data_streams=data_streams)

    def dealt(self, items: tuple[int, ...], *how: int) -> Iterator[tuple[int, list[Sequence[int]]]]:
        """Yield the number of each stream of a rank, and its documents of each source; see `streams.dealt`."""
        shares = [part.dealt(number, *how) for part, number in zip(self.parts.values(), items, strict=True)]
        for of_sources in zip(*shares, strict=True):
            yield of_sources[0][0], [own for _, own in of_sources]

    def describe(self, items: tuple[int, ...], seq_len: int) -> dict[str, int]:
        """Return what the meaning of a position depends on, besides seed and number of streams."""
        parts = zip(self.parts.items(), items, strict=True)
        return {
            f"{name}/{key}": x for (name, part), number in parts for key, x in part.describe(number, seq_len).items()
        }

    def items_of(self, saved: Mapping[str, int]) -> tuple[int, ...]:
        """Return how many documents of each source to read.

        Raises:
            ConfigError: the sources are others, or one has changed, see `TextData.items_of`.
        """
        before = {key.partition("/")[0] for key in saved if "/" in key}
        if saved and before != set(self.parts):
            raise ConfigError(
                f"mixture.names = {sorted(self.parts)} are not the sources of the checkpoint, {sorted(before)}; keep "
                f"them all (a weight of 0 leaves a source out), {ANEW}"
            )
        return tuple(part.items_of(_part(saved, name)) for name, part in self.parts.items())


def positions_of(states: Mapping[int, Mapping[str, int]], names: Sequence[str]) -> list[tuple[float, float]]:
    """Return (samples, passes) of each source, summed over the given states of streams.

    Of whole documents, those that wait count as read.
    """
    found = []
    for name in names:
        parts = [_part(state, name) | {"n": state["data_streams"]} for state in states.values()]
        passes = (part["epoch"] + part["document"] * part["n"] / part["documents"] for part in parts)
        found.append((float(sum(part["samples"] for part in parts)), sum(passes)))
    return found


def open_training_data(config: JobConfig, catalogs: Sequence[str | None] | None = None) -> TextData | Mixture:
    """Return the data that a job trains on. catalogs: see `open_text`, one for each of `training_data`.

    Raises:
        ConfigError: see `open_text`.
    """
    settings = training_data(config)
    given = zip(settings, catalogs or [None] * len(settings), strict=True)
    parts = [open_text(one, config.training.packing, catalog) for one, catalog in given]
    names = config.mixture.names
    return Mixture(dict(zip(names, parts, strict=True)), config.mixture.weights) if names else parts[0]

"""The data sets of a job: one, or several by weights; their documents, what they hold, and how streams pack them.

Global sample i is of the source in whose part of [0, 1) the number i x golden ratio (mod 1) lies; the parts are as long
as the weights. So each source has its share of any stretch of samples, up to a few, on any number of ranks, and nothing
but i must be known. Each data stream has a stream of every source, and takes the next sequence of the one whose turn it
is. (To count what each source lacks would bring every source to within one sample, but with two sources of equal weight
and an even number of streams, half of the streams would never read one of them.)

    weights 0.75, 0.25   samples 0 1 2 3 4 5 6 7 8 9 ...
                         source  a a a b a a a b b a ...

Torch-free.
"""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.order.streams import AGAIN, SORTED, StreamState, assigned, streams_with_text
from trainer.data.packing import DocumentStream, PackedSequence, TooLong, WholeStream
from trainer.data.sources.files import DataKeys, cache_folder
from trainer.data.sources.registry import DataSettings, check_streams, files_of, source_of
from trainer.data.token_files.catalog import open_documents
from trainer.data.token_files.format import TokenFiles
from trainer.data.token_files.made import described
from trainer.data.tokenizers import chat_notes
from trainer.runtime.console import logger


def training_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job trains on: one, or the sources of a mixture."""
    training = config.training
    paths = (training.dataset_path,)
    keys = DataKeys()
    if config.mixture.names:
        paths = config.mixture.paths
        keys = DataKeys(path="mixture.paths")
    return [
        DataSettings.of(
            training.dataset, path, config.model, training, chat=config.chat, keys=keys
        )
        for path in paths
    ]


def validation_data(config: JobConfig) -> DataSettings:
    """Return the data set that the loss is validated on."""
    keys = DataKeys("validation.dataset", "validation.dataset_path")
    source = config.validation.source(config.training)
    chat = config.chat
    return DataSettings.of(*source, config.model, config.training, chat=chat, keys=keys)


def all_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job reads."""
    if config.task != "tokens":
        return []
    return [
        *training_data(config),
        *([validation_data(config)] if config.validation.enable else []),
    ]


def first_start(config: JobConfig) -> list[str]:
    """Return for each data set of text on this machine what its first start makes, and where."""
    found = []
    for settings in all_data(config):
        with suppress(MissingFile):
            source = source_of(settings)
            if not (source.token_files or source.iterable):
                what = described(settings, sum(map(os.path.getsize, files_of(settings))))
                found.append(
                    f"the first start makes token files of {what} in {cache_folder()}; later ones read them"
                )
    return list(dict.fromkeys(found))


TextStream: TypeAlias = DocumentStream | WholeStream


@dataclass(frozen=True)
class TextData:
    """The documents of a data set, and how they are packed, see `training.packing`.

    conversations: what is used of documents that are longer than a sequence; None: they are texts, cut into pieces.
    """

    source: TokenFiles
    packing: str = "concatenate"
    conversations: TooLong | None = field(default=None, compare=False)

    @property
    def items(self) -> int:
        """Number of documents."""
        return len(self.source)

    def check(self, data_streams: int | None, seed: int = 0) -> None:
        """Check that every stream has a document, of up to SORTED one with text; ConfigError otherwise."""
        check_streams("the data set", len(self.source), data_streams)
        if not (most := self.streams_with_text(data_streams or 1, seed)):
            raise ConfigError(
                f"none of the {len(self.source)} documents of the data set holds text; give a document with text"
            )
        if data_streams is not None and most < data_streams:
            raise ConfigError(
                f"training.data_streams = {data_streams} leaves a stream without text, because many of the "
                f"{len(self.source)} documents are empty; use {most}, leave it out, or leave out documents without text"
            )

    def streams_with_text(self, data_streams: int, seed: int) -> int:
        """Return `data_streams`, or fewer if a stream had no text; more than SORTED documents are not counted."""
        if len(self.source) > SORTED:
            return data_streams
        return streams_with_text(self.source.lengths() > 0, data_streams, seed)

    def stream(
        self, items: Sequence[int], *, stream: int, seq_len: int, seed: int
    ) -> TextStream:
        """Return a stream of some of the documents. stream: its number."""
        how = {"stream": stream, "seq_len": seq_len, "seed": seed}
        if self.packing == "concatenate":
            return DocumentStream(self.source, items, **how)
        return WholeStream(
            self.source,
            items,
            **how,
            alone=self.packing == "pad",
            conversations=self.conversations,
        )

    def streams(
        self,
        items: int,
        seq_len: int,
        data_streams: int,
        seed: int,
        dp_rank: int,
        dp_degree: int,
    ) -> dict[int, TextStream]:
        """Return the streams that a data-parallel rank reads, by number. items: how many documents are read."""
        shares = assigned(items, data_streams, seed, dp_rank, dp_degree)
        return {s: self.stream(own, stream=s, seq_len=seq_len, seed=seed) for s, own in shares}

    def describe(self, items: int, seq_len: int) -> dict[str, int]:
        """Return what the meaning of a position depends on, besides seed and number of streams."""
        counts_pieces = self.packing != "concatenate" and not self.conversations
        pieces = {"seq_len": seq_len} if counts_pieces else {}
        return {
            "documents": items,
            "content": self.source.fingerprint(items),
            **self.source.made_by,
            **pieces,
        }

    def items_of(self, saved: Mapping[str, Any]) -> int:
        """Return how many documents to read: files that were added behind the others wait for another run.

        Raises:
            ConfigError: documents are missing, or were added at another place.
        """
        now = len(self.source)
        before = saved.get("documents", len(self.source))
        if (
            now > before
            and "content" in saved
            and self.source.fingerprint(before) == saved["content"]
        ):
            logger.info(
                f"the data set has {now - before:,} more documents than at the start of this run, which continues "
                f"with its {before:,}; a new run reads all (checkpoint.initial_load_path takes the weights there)"
            )
            return before
        if now != before:
            raise ConfigError(
                f"the data set has {now:,} documents, and had {before:,} when the checkpoint was saved, so that its "
                "positions would mean other data; restore the files (new ones may be added behind the last one), "
                + AGAIN
            )
        return now


def open_text(
    settings: DataSettings, packing: str | None = None, catalog: str | None = None
) -> TextData:
    """Return a data set. packing: None: that of its kind; catalog: as of `open_documents`, and what is raised, too."""
    if source_of(settings).iterable:
        from trainer.data.iterable_data import IterableData

        return IterableData(settings, packing or "concatenate")
    chats = None
    source = open_documents(settings, catalog)
    if settings.dataset == "preferences":
        chats = TooLong(drops=True, what="pairs longer than a sequence")
    elif settings.dataset in CONVERSATIONS:
        chats = TooLong(drops=settings.chat.too_long == "drop")
    return TextData(source, packing or ("best_fit" if chats else "concatenate"), chats)


_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd


def ends_of(weights: Sequence[float]) -> list[int]:
    """Return where the part of each source ends, in units of 2**-64."""
    parts = [Fraction(weight) for weight in weights]
    return [int(end * 2**64 / sum(parts)) for end in accumulate(parts)]


def source_of_sample(sample: int, ends: Sequence[int]) -> int:
    """Return the number of the source of a global sample."""
    return bisect_right(ends, sample * _GOLDEN % 2**64)


def _part(state: Mapping[str, Any], name: str) -> StreamState:
    """Return the entries of one source in the state of a stream of a mixture."""
    return {
        key.removeprefix(f"{name}/"): value
        for key, value in state.items()
        if key.startswith(f"{name}/")
    }


class MixtureStream:
    """One numbered, endless stream of packed sequences of several sources. parts: a stream of each source, by name."""

    def __init__(
        self,
        parts: Mapping[str, TextStream],
        ends: Sequence[int],
        *,
        stream: int,
        data_streams: int,
    ) -> None:
        self._parts = parts
        self._ends = ends
        self._stream = stream
        self._n = data_streams
        self.samples = 0

    @property
    def state(self) -> StreamState:
        """The number of samples given so far, and the state of each source's stream under "name/key"."""
        parts = ((name, part.state) for name, part in self._parts.items())
        return {"samples": self.samples} | {
            f"{name}/{key}": x for name, state in parts for key, x in state.items()
        }

    @property
    def passes(self) -> float:
        """Passes over the documents of all sources together."""
        parts = self._parts.values()
        return sum(len(part.items) * part.passes for part in parts) / sum(
            len(part.items) for part in parts
        )

    def restart(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""
        self.samples = int(state.get("samples", 0))
        for name, part in self._parts.items():
            part.restart(_part(state, name))

    def next_sample(self) -> PackedSequence:
        """Return the next packed sequence, with the number of its source; it raises as the streams of the sources."""
        source = source_of_sample(self.samples * self._n + self._stream, self._ends)
        sequence = list(self._parts.values())[source].next_sample()
        self.samples += 1
        return replace(sequence, source=source)


@dataclass(frozen=True)
class Mixture:
    """Data sets by name, and the weight of each; it is used as one `TextData` is."""

    parts: Mapping[str, TextData]
    weights: Sequence[float]

    @property
    def items(self) -> tuple[int, ...]:
        """Documents of each source."""
        return tuple(part.items for part in self.parts.values())

    def check(self, data_streams: int | None, seed: int = 0) -> None:
        """Check that every stream has a document of every source, see `TextData.check`; ConfigError otherwise."""
        for part in self.parts.values():
            part.check(data_streams, seed)

    def streams_with_text(self, data_streams: int, seed: int) -> int:
        """Return `data_streams`, or fewer if a stream of a source of them had no text."""
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
        """Return the streams that a data-parallel rank reads, by number; see `TextData.streams`."""
        parts = zip(self.parts.items(), items, strict=True)
        found = {
            name: part.streams(number, seq_len, data_streams, *how)
            for (name, part), number in parts
        }
        ends = ends_of(self.weights)
        numbers = next(iter(found.values()))
        return {
            s: MixtureStream(
                {name: own[s] for name, own in found.items()},
                ends,
                stream=s,
                data_streams=data_streams,
            )
            for s in numbers
        }

    def describe(self, items: tuple[int, ...], seq_len: int) -> dict[str, int]:
        parts = zip(self.parts.items(), items, strict=True)
        return {
            f"{name}/{key}": x
            for (name, part), number in parts
            for key, x in part.describe(number, seq_len).items()
        }

    def items_of(self, saved: Mapping[str, Any]) -> tuple[int, ...]:
        """Return how many documents of each source to read.

        Raises:
            ConfigError: the sources are others, or one has changed, see `TextData.items_of`.
        """
        before = {key.partition("/")[0] for key in saved if "/" in key}
        if saved and before != set(self.parts):
            raise ConfigError(
                f"mixture.names = {sorted(self.parts)} are not the sources of the checkpoint, {sorted(before)}; keep "
                f"them all (a weight of 0 leaves a source out), {AGAIN}"
            )
        return tuple(part.items_of(_part(saved, name)) for name, part in self.parts.items())


def positions_of(
    states: Mapping[int, Mapping[str, Any]], names: Sequence[str]
) -> list[tuple[float, float]]:
    """Return (samples, passes) of each source, summed over the given states of streams.

    Of whole documents, those that wait count as read.
    """
    found = []
    for name in names:
        parts = [_part(state, name) | {"n": state["data_streams"]} for state in states.values()]
        passes = (
            part["epoch"] + part["document"] * part["n"] / part["documents"] for part in parts
        )
        found.append((float(sum(part["samples"] for part in parts)), sum(passes)))
    return found


def open_training_data(
    config: JobConfig, catalogs: Sequence[str | None] | None = None
) -> TextData | Mixture:
    """Return the data that a job trains on. catalogs: one for each of `training_data`; it raises as `open_text`."""
    settings = training_data(config)
    given = zip(settings, catalogs or [None] * len(settings), strict=True)
    parts = [open_text(one, config.training.packing, catalog) for one, catalog in given]
    names = config.mixture.names
    return (
        Mixture(dict(zip(names, parts, strict=True)), config.mixture.weights)
        if names
        else parts[0]
    )


# ---- what data sets hold

LENGTHS = tuple(2**n for n in range(14, 19))
"""Lengths of sequences of the retention curve: 16k .. 256k tokens."""
QUICK = 10**7
"""Documents that are counted at the start of a run: 80 MB of lengths, and a second."""


@dataclass(frozen=True)
class Contents:
    """lengths: (n,) tokens of each document that has some; learned: tokens with a label; notes: see `TokenFiles`."""

    lengths: np.ndarray
    learned: int
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.lengths.sum(dtype=np.int64))

    def whole(self, length: int) -> float:
        """Return the share of documents of at most `length` tokens: the retention."""
        return float((self.lengths <= length).mean()) if len(self.lengths) else 1.0


def contents_of(data: TextData | Mixture) -> dict[str, Contents]:
    """Return the content of each source by name, "" if there is one; none of an iterable, which has no files."""
    parts = data.parts if isinstance(data, Mixture) else {"": data}
    return {
        name: _contents(part.source)
        for name, part in parts.items()
        if isinstance(part, TextData)
    }


def _contents(source: TokenFiles) -> Contents:
    lengths = source.lengths()
    lengths = lengths[lengths > 0]
    learned = source.answers()
    return Contents(
        lengths, int((lengths - 1).sum()) if learned is None else learned, source.notes()
    )


def what_is_lacking(found: Mapping[str, Contents]) -> list[str]:
    """Return a sentence for each thing that conversations of the sources have and their text has not."""
    return chat_notes.sentences(chat_notes.sum_of([one.notes for one in found.values()]))


def summary(found: Mapping[str, Contents], seq_len: int) -> str:
    """Return the sums of all sources in a line, and below it the table if there are several."""
    lengths = np.concatenate([one.lengths for one in found.values()])
    learned = sum(one.learned for one in found.values())
    total = Contents(lengths, 0)
    line = (
        f"{len(lengths):,} documents, {total.tokens:,} tokens, {learned / max(total.tokens, 1):.1%} learned; "
        f"{total.whole(seq_len):.1%} of the documents have at most {seq_len:,} tokens"
    )
    return line if len(found) < 2 else f"{line}\n{table(found, seq_len)}"


def table(found: Mapping[str, Contents], seq_len: int) -> str:
    """Return a table, a row each source: counts, and the share of documents that are whole by length of a sequence."""
    lengths = sorted({*LENGTHS, seq_len})
    names = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths]
    rows = [["source", "documents", "tokens", "learned", "median", "longest", *names]]
    for name, one in found.items():
        median, longest = (
            (int(np.median(one.lengths)), int(one.lengths.max()))
            if len(one.lengths)
            else (0, 0)
        )
        counts = (f"{n:,}" for n in (len(one.lengths), one.tokens))
        shares = (f"{one.whole(n):.1%}" for n in lengths)
        learned = f"{one.learned / max(one.tokens, 1):.1%}"
        rows.append([name or "all", *counts, learned, f"{median:,}", f"{longest:,}", *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(
        ["share of documents that are whole, by length of a sequence, on the right", *lines]
    )


def runs_of(marks: np.ndarray) -> list[tuple[int, int, bool]]:
    """Return [start, stop) and value of each run of equal marks. marks: (n,) bool."""
    edges: Sequence[int] = [
        0,
        *(np.flatnonzero(marks[1:] != marks[:-1]) + 1).tolist(),
        len(marks),
    ]
    return [
        (start, stop, bool(marks[start])) for start, stop in pairwise(edges) if stop > start
    ]

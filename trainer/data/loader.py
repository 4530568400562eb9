"""Packed batches in an order that does not depend on how many ranks read them.

The documents are shuffled by the seed and dealt to n = `data_streams` streams. Each stream shuffles its documents anew
every epoch, tokenises, packs and numbers its own sequences, without end. Global sample i is number i // n of stream
i % n. Data-parallel rank r of D owns the streams s with s % D == r, so that it reads the samples r, r + D, r + 2D, ...

            stream:   0  1  2  3           D = 2: rank 0 reads 0 2 4 6 8 10, rank 1 reads 1 3 5 7 9 11
    samples number 0: 0  1  2  3           D = 1: all of them in order
            number 1: 4  5  6  7
            number 2: 8  9 10 11

State is one small entry per stream, so the states of D ranks merge into one dict, and any D' ranks go on from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.config.errors import ConfigError
from trainer.data.datasets import DocumentSource
from trainer.data.packing import Row, RowBuilder
from trainer.data.tokenizer import Tokenizer
from trainer.runtime.agreement import content_hash

StreamState = dict[str, int]
_DEAL, _EPOCH = 0, 1  # what a shuffle is for
_POSITION = ("epoch", "document", "token", "samples")


def shuffled(n: int, seed: int, *purpose: int) -> np.ndarray:
    """A permutation (n,) of range(n), fixed by its arguments on every machine.

    By sorting raw bits: numpy keeps a bit generator's stream from version to version, but not `permutation`.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed % 2**64, spawn_key=purpose))
    return np.argsort(bits.random_raw(n), kind="stable").astype(np.uint32 if n < 2**32 else np.int64)


class Stream:
    """One numbered, endless stream of packed rows over some of the documents.

    Args:
        documents: (n,) numbers of its documents in the source, in the order in which they were dealt.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        documents: np.ndarray,
        *,
        stream: int,
        seq_len: int,
        seed: int,
    ) -> None:
        self._source, self._tokenizer, self._documents = source, tokenizer, documents
        self._stream, self._seed = stream, seed
        self._seq_len = seq_len
        self.restart({})

    @property
    def state(self) -> StreamState:
        """Where it is: epoch, document in the epoch's order, tokens of that document already used, rows given."""
        return {"epoch": self._epoch, "document": self._document, "token": self._token, "samples": self.samples}

    def restart(self, state: Mapping[str, int]) -> None:
        """Go on from `state`; from the beginning when it is empty."""
        self._epoch, self._document, self._token, self.samples = (int(state.get(key, 0)) for key in _POSITION)
        self._builder = RowBuilder(self._seq_len)
        self._order: np.ndarray | None = None
        self._ids: np.ndarray | None = None  # tokens of the current document, made when they are needed

    def next_row(self) -> Row:
        """The next packed sequence.

        Raises:
            ConfigError: no document of this stream holds a token.
        """
        barren = 0
        while self._builder.missing:
            taken = self._builder.add(self._current(), self._token)
            self._token += taken
            barren = 0 if taken else barren + 1
            if barren == 2 * len(self._documents):  # an epoch may end, and the next begin, with all the empty ones
                raise ConfigError(
                    f"the {len(self._documents)} documents of data stream {self._stream} hold no text;"
                    " give more data or fewer training.data_streams"
                )
            if self._token >= len(self._current()):
                self._advance()
        self.samples += 1
        return self._builder.finish()

    def _current(self) -> np.ndarray:
        """Begin of text, the tokens, end of text of the current document; nothing at all if it has no text."""
        if self._ids is None:
            if self._order is None:
                self._order = shuffled(len(self._documents), self._seed, _EPOCH, self._stream, self._epoch)
            text = self._source[int(self._documents[self._order[self._document]])]
            self._ids = self._tokenizer.encode_to_numpy(text, bos=bool(text), eos=bool(text))
        return self._ids

    def _advance(self) -> None:
        self._ids, self._token = None, 0
        self._document += 1
        if self._document == len(self._documents):
            self._document, self._order = 0, None
            self._epoch += 1


class StreamDataset(IterableDataset):
    """The rows of the streams that one data-parallel rank owns, in global order, without end.

    Its iterators share the position: a new one goes on where the last one stopped.

    Raises:
        ConfigError: `dp_degree` does not divide `data_streams`, or there are fewer documents than streams.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        data_streams: int,
        seed: int,
        dp_rank: int,
        dp_degree: int,
    ) -> None:
        if data_streams % dp_degree:
            raise ConfigError(
                f"training.data_streams = {data_streams} must be a multiple of the {dp_degree} data-parallel ranks;"
                f" {_nearest_multiple(data_streams, dp_degree)} works"
            )
        if len(source) < data_streams:
            most = len(source) // dp_degree * dp_degree
            raise ConfigError(
                f"training.data_streams = {data_streams} needs as many documents and the data set has {len(source)}; "
                + (
                    f"the largest that works is {most}"
                    if most
                    else f"give one for each of the {dp_degree} ranks at least"
                )
            )
        # What a position means depends on these; they are saved with it, so that no run resumes on other data.
        self._fixed = {"data_streams": data_streams, "documents": len(source), "seed": seed}
        dealt = shuffled(len(source), seed, _DEAL)
        self._streams = {
            s: Stream(source, tokenizer, dealt[s::data_streams].copy(), stream=s, seq_len=seq_len, seed=seed)
            for s in range(dp_rank, data_streams, dp_degree)
        }

    def __iter__(self) -> Iterator[Row]:
        while True:
            # The fewest samples so far, then the lowest number: the next of the global order, also after re-sharding.
            yield min(self._streams.values(), key=lambda stream: stream.samples).next_row()

    def state_dict(self) -> dict[str, Any]:
        """`{"streams": {stream: entry}}` of this rank's streams; an entry is a dict of a few ints."""
        return {"streams": {s: stream.state | self._fixed for s, stream in self._streams.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, which may hold the streams of other ranks too.

        Raises:
            ConfigError: a stream is missing, or the entries are of another data set, seed or number of streams.
        """
        entries = {int(s): entry for s, entry in state["streams"].items()}
        for s in self._streams:
            if s not in entries:
                raise ConfigError(
                    f"the saved data state lacks stream {s}; it must hold the streams of all ranks, merged"
                )
            self._check_fixed(entries[s])
        for s, stream in self._streams.items():
            stream.restart(entries[s])

    def _check_fixed(self, entry: Mapping[str, int]) -> None:
        names = {"data_streams": "training.data_streams", "seed": "training.seed", "documents": "number of documents"}
        for key, now in self._fixed.items():
            saved = int(entry[key])
            if saved != now:
                raise ConfigError(
                    f"{names[key]} = {now} is not the {saved} of the saved data state, whose positions would mean"
                    f" other data; resume with {saved}, or start the data anew"
                )


def build_loader(
    source: DocumentSource,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    local_batch_size: int,
    data_streams: int,
    seed: int,
    dp_rank: int,
    dp_degree: int,
    plan: Callable[[Mapping[str, np.ndarray]], object] | None = None,
) -> StatefulDataLoader:
    """Endless batches of one data-parallel rank: dicts of int64 tensors (local_batch_size, seq_len).

    Keys: tokens, labels (shifted by one, IGNORE_INDEX where nothing follows), positions, document_ids; see
    `packing.py`. Every rank of one `dp_rank` (tensor, context parallel) gets the same batches.

    plan: what to work out for each batch, from the same arrays, where the batch is made; it is then under "plan".

    Raises:
        ConfigError: as `StreamDataset`.
    """
    dataset = StreamDataset(
        source,
        tokenizer,
        seq_len=seq_len,
        data_streams=data_streams,
        seed=seed,
        dp_rank=dp_rank,
        dp_degree=dp_degree,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11's own, on every rank
        return StatefulDataLoader(
            dataset,
            batch_size=local_batch_size,
            num_workers=0,
            collate_fn=partial(stack_rows, plan=plan),
            generator=torch.Generator(),  # its iterators draw a number: not from the global generator, others use it
        )


def stack_rows(
    rows: Sequence[Row], *, plan: Callable[[Mapping[str, np.ndarray]], object] | None = None
) -> dict[str, Any]:
    """Rows (S,) -> tensors (B, S), each in a storage of its own that torch may resize, and their `plan`."""
    names = ("tokens", "labels", "positions", "document_ids")
    arrays = {name: np.stack([getattr(row, name) for row in rows]) for name in names}
    # Cloned, because torch never resizes memory that numpy has seen.
    batch: dict[str, Any] = {name: torch.from_numpy(array).clone() for name, array in arrays.items()}
    return batch | ({} if plan is None else {"plan": plan(arrays)})


def stream_states(loader: StatefulDataLoader) -> dict[int, StreamState]:
    """Position of each stream that this rank owns. The dicts of all ranks, merged, are the state of the data."""
    return loader.dataset.state_dict()["streams"]


def load_stream_states(loader: StatefulDataLoader, states: Mapping[int, Mapping[str, int]]) -> None:
    """Go on from the merged `states` of any number of ranks; an iterator in use goes on from there as well.

    Raises:
        ConfigError: as `StreamDataset.load_state_dict`.
    """
    loader.dataset.load_state_dict({"streams": states})


def batch_hash(batch: Mapping[str, Any]) -> int:
    """63-bit hash of names, shapes and bytes of a batch's tensors: the same in every process, for equal ones only."""
    return content_hash({name: x for name, x in batch.items() if isinstance(x, torch.Tensor)})


def _nearest_multiple(value: int, of: int) -> int:
    return max(of, round(value / of) * of)

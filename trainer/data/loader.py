"""Packed batches in an order that does not depend on how many ranks read them.

The documents are shuffled by the seed and dealt to n = `data_streams` streams. Each stream shuffles its documents anew
in every epoch, tokenizes and packs them, and numbers its sequences, without end. Global sample i is number i // n of
stream i % n. Data-parallel rank r of D owns the streams s with s % D == r, and so reads samples r, r + D, r + 2D, ...

            stream:   0  1  2  3           D = 2: rank 0 reads 0 2 4 6 8 10, rank 1 reads 1 3 5 7 9 11
    samples number 0: 0  1  2  3           D = 1: all of them in order
            number 1: 4  5  6  7
            number 2: 8  9 10 11

The state is one small entry per stream. The states of all ranks merge into one dict, from which any number of ranks
can resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trainer.config.errors import ConfigError
from trainer.data.datasets import DocumentSource, check_streams
from trainer.data.packing import PackedSequence, SequenceBuilder
from trainer.data.tokenizer import Tokenizer
from trainer.runtime.agreement import content_hash

StreamState = dict[str, int]
_DEAL, _EPOCH = 0, 1  # what a shuffle is for
_POSITION = ("epoch", "document", "token", "samples")


def shuffled(n: int, seed: int, *purpose: int) -> np.ndarray:
    """Return a permutation (n,) of range(n), fixed by its arguments on every machine.

    It sorts raw bits: numpy keeps a bit generator's stream from version to version, but not `permutation`.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed % 2**64, spawn_key=purpose))
    return np.argsort(bits.random_raw(n), kind="stable").astype(np.uint32 if n < 2**32 else np.int64)


class Stream:
    """One numbered, endless stream of packed sequences over some of the documents.

    documents: (n,) their numbers in the source, in the order in which they were dealt.
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
        self._stream, self._seed, self._seq_len = stream, seed, seq_len
        self.restart({})

    @property
    def state(self) -> StreamState:
        """The position: epoch, document in the epoch's order, tokens already used of it, sequences given so far."""
        return {"epoch": self._epoch, "document": self._document, "token": self._token, "samples": self.samples}

    @property
    def passes(self) -> float:
        """Passes over the documents of this stream so far; the current document counts when it is used up."""
        return self._epoch + self._document / len(self._documents)

    def restart(self, state: Mapping[str, int]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""
        self._epoch, self._document, self._token, self.samples = (int(state.get(key, 0)) for key in _POSITION)
        self._builder = SequenceBuilder(self._seq_len)
        self._order: np.ndarray | None = None
        self._ids: np.ndarray | None = None  # tokens of the current document, made when they are needed

    def next_sequence(self) -> PackedSequence:
        """Return the next packed sequence.

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
                    f"the {len(self._documents)} documents of data stream {self._stream} hold no text; "
                    "give more data or fewer training.data_streams"
                )
            if self._token >= len(self._current()):
                self._advance()
        self.samples += 1
        return self._builder.finish()

    def _current(self) -> np.ndarray:
        """Return the current document's tokens between begin and end of text; none at all if it has no text."""
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


class BatchLoader:
    """Endless batches of the streams that one data-parallel rank owns, in global order.

    A batch is a dict of int64 tensors (local_batch_size, seq_len), each in a storage of its own that torch may resize:
    tokens, labels (shifted by one, IGNORE_INDEX where nothing follows), positions and document_ids, see `packing.py`.
    The ranks of one `dp_rank` get the same batches. All iterators share the position: a new one goes on where the last
    one stopped.

    plan: computes from the arrays of a batch what stands under "plan" in it.

    Raises:
        ConfigError: `dp_degree` does not divide `data_streams`, or there are fewer documents than streams.
    """

    def __init__(
        self,
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
    ) -> None:
        check_streams("the data set", len(source), data_streams, dp_degree)
        self._batch_size, self._plan = local_batch_size, plan
        # The meaning of a position depends on these. They are saved with it, so that no run resumes on other data.
        self._fixed = {"data_streams": data_streams, "documents": len(source), "seed": seed}
        dealt = shuffled(len(source), seed, _DEAL)
        self._streams = {
            s: Stream(source, tokenizer, dealt[s::data_streams].copy(), stream=s, seq_len=seq_len, seed=seed)
            for s in range(dp_rank, data_streams, dp_degree)
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            sequences = [self._next_sequence() for _ in range(self._batch_size)]
            names = ("tokens", "labels", "positions", "document_ids")
            arrays = {name: np.stack([getattr(sequence, name) for sequence in sequences]) for name in names}
            # Cloned, because torch never resizes memory that numpy has seen.
            batch = {name: torch.from_numpy(array).clone() for name, array in arrays.items()}
            yield batch if self._plan is None else batch | {"plan": self._plan(arrays)}

    def _next_sequence(self) -> PackedSequence:
        # The fewest sequences so far, then the lowest number: the next of the global order, also after re-sharding.
        return min(self._streams.values(), key=lambda stream: stream.samples).next_sequence()

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
        names = {"data_streams": "training.data_streams", "seed": "training.seed", "documents": "number of documents"}
        for s in self._streams:
            if s not in states:
                raise ConfigError(
                    f"the saved data state lacks stream {s}; it must hold the streams of all ranks, merged"
                )
            for key, now in self._fixed.items():
                if (saved := states[s][key]) != now:
                    raise ConfigError(
                        f"{names[key]} = {now} is not the {saved} of the saved data state, whose positions would mean "
                        f"other data; resume with {saved}, or start the data anew"
                    )
        for s, stream in self._streams.items():
            stream.restart(states[s])


def batch_hash(batch: Mapping[str, Any]) -> int:
    """Return a 63-bit hash of a batch's tensors, the same in every process: equal ones only have the same."""
    return content_hash({name: x for name, x in batch.items() if isinstance(x, torch.Tensor)})

"""Packed batches of numbered streams of documents, see `streams.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.config.errors import ConfigError
from trainer.config.schema import Model, Training
from trainer.data.best_fit import ConversationStream
from trainer.data.chat import ConversationEncoder
from trainer.data.chat_template import find_template
from trainer.data.datasets import DocumentSource, Reading, check_streams, fingerprint, ids_of_document, open_source
from trainer.data.packing import PackedSequence, SequenceBuilder
from trainer.data.streams import ItemStream, StreamLoader, StreamState
from trainer.data.tokenizer import Tokenizer, open_tokenizer
from trainer.runtime.agreement import content_hash

_DEFAULTS = Training()
logger = logging.getLogger("trainer")


class DocumentStream(ItemStream):
    """One numbered, endless stream of packed sequences over some of the documents.

    documents: (n,) their numbers in the source, in the order in which they were dealt.
    """

    ITEM = "document"

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
        self._source, self._tokenizer, self._seq_len = source, tokenizer, seq_len
        super().__init__(documents, stream=stream, seed=seed)

    @property
    def state(self) -> StreamState:
        """The position: epoch, document in the epoch's order, tokens already used of it, sequences given so far."""
        return {"epoch": self._epoch, "document": self._place, "token": self._token, "samples": self.samples}

    def restart(self, state: Mapping[str, int]) -> None:
        """Resume from `state`, or from the beginning if it is empty."""
        super().restart(state)
        self._token = int(state.get("token", 0))
        self._builder = SequenceBuilder(self._seq_len)
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
            if barren == 2 * len(self._items):  # an epoch may end, and the next begin, with all the empty ones
                raise ConfigError(
                    f"none of the {len(self._items)} documents of data stream {self._stream} holds text; leave out "
                    "documents without text"
                )
            if self._token >= len(self._current()):
                self.advance()
        self.samples += 1
        return self._builder.finish()

    def pass_over(self) -> None:
        self.next_sequence()

    def _current(self) -> np.ndarray:
        """Return the current document's tokens between begin and end of text; none at all if it has no text."""
        if self._ids is None:
            self._ids = ids_of_document(self._source[self._current_item()], self._tokenizer)
        return self._ids

    def advance(self) -> None:
        """Go to the first token of the next document."""
        self._ids, self._token = None, 0
        super().advance()


class BatchLoader(StreamLoader[DocumentStream | ConversationStream]):
    """Endless batches of the streams that one data-parallel rank owns, in global order.

    A batch is a dict of int64 tensors (local_batch_size, seq_len), each in a storage of its own that torch may resize:
    tokens, labels (shifted by one, IGNORE_INDEX where nothing follows), positions and document_ids, see `packing.py`.
    The ranks of one `dp_rank` get the same batches. All iterators share the position: a new one goes on where the last
    one stopped.

    stream: packs what `tokenizer` makes of documents; plan: computes from the arrays of a batch what stands under
    "plan" in it.

    Raises:
        ConfigError: there is no document, or there are fewer than streams.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer | ConversationEncoder,
        stream: type[DocumentStream | ConversationStream] = DocumentStream,
        *,
        seq_len: int,
        local_batch_size: int,
        data_streams: int | None,
        seed: int,
        dp_rank: int,
        dp_degree: int,
        plan: Callable[[Mapping[str, np.ndarray]], object] | None = None,
    ) -> None:
        check_streams("the data set", len(source), data_streams)
        self._source, self._batch_size, self._plan = source, local_batch_size, plan
        self._build = partial(stream, source, tokenizer, seq_len=seq_len, seed=seed)
        super().__init__(len(source), data_streams=data_streams, seed=seed, dp_rank=dp_rank, dp_degree=dp_degree)

    def build_stream(self, items: np.ndarray, stream: int) -> DocumentStream | ConversationStream:
        return self._build(items, stream=stream)

    def describe(self, items: int) -> dict[str, int]:
        return {"documents": items, "data": fingerprint(self._source, items)}

    def items_of(self, saved: Mapping[str, int]) -> int:
        """Return how many documents to read: files that were added behind the others wait for another run.

        Raises:
            ConfigError: documents are missing, or were added at another place.
        """
        now, before = len(self._source), saved.get("documents", len(self._source))
        if now > before and "data" in saved and fingerprint(self._source, before) == saved["data"]:
            logger.info(
                f"the data set has {now - before:,} more documents than at the start of this run, which goes on with "
                f"its {before:,}; a new run reads all (checkpoint.initial_load_path takes the weights there)"
            )
            return before
        if now != before:
            raise ConfigError(
                f"the data set has {now:,} documents, and had {before:,} when the checkpoint was saved, so that its "
                "positions would mean other data; restore the files (new ones may be added behind the last one), or "
                "start the data anew"
            )
        return now

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            sequences = [stream.next_sequence() for stream in self._next_streams(self._batch_size)]
            names = ("tokens", "labels", "positions", "document_ids")
            arrays = {name: np.stack([getattr(sequence, name) for sequence in sequences]) for name in names}
            # Cloned, because torch never resizes memory that numpy has seen.
            batch = {name: torch.from_numpy(array).clone() for name, array in arrays.items()}
            yield batch if self._plan is None else batch | {"plan": self._plan(arrays)}


class TextData(NamedTuple):
    """The documents of a data set, what makes tokens of them, and the streams that pack these."""

    source: DocumentSource
    tokenizer: Tokenizer | ConversationEncoder
    stream: type[DocumentStream | ConversationStream]


def open_text(model: Model, dataset: str, path: str | None, training: Training = _DEFAULTS) -> TextData:
    """Return the data set `dataset` at `path`, for the tokenizer and the chat template of table [model].

    training: says how records are read.

    Raises:
        ConfigError: see `open_source`, `open_tokenizer`, `find_template`; conversations for a model of sentencepiece.
    """
    how = Reading.of(training, model.tokenizer_file)
    source, tokenizer = open_source(dataset, path, how), open_tokenizer(model.tokenizer_file)
    if dataset != "chat":
        return TextData(source, tokenizer, DocumentStream)
    tokenizer.encode_with_places("", special=True)  # refuses a format that cannot
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    ends = {name: tokenizer.decode([i]) for name, i in ids.items() if i is not None}
    template = find_template(model.tokenizer_file, model.chat_template, ends)
    return TextData(source, ConversationEncoder(tokenizer, template), ConversationStream)


def batch_hash(batch: Mapping[str, Any]) -> int:
    """Return a 63-bit hash of a batch's tensors, the same in every process: equal ones only have the same."""
    return content_hash({name: x for name, x in batch.items() if isinstance(x, torch.Tensor)})

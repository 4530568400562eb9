"""The documents of a data set, what makes tokens of them, and the streams that pack these. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from trainer.config.errors import ConfigError
from trainer.config.schema import Model, Training
from trainer.data.best_fit import DocumentEncoder, Encoder, WholeStream
from trainer.data.chat import ConversationEncoder
from trainer.data.chat_template import find_template
from trainer.data.datasets import DocumentSource, Reading, check_streams, fingerprint, ids_of_document, open_source
from trainer.data.file_index import number_of
from trainer.data.packing import PackedSequence, SequenceBuilder
from trainer.data.streams import ANEW, ItemStream, StreamState, dealt
from trainer.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_hash

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
        self._ids: np.ndarray | None = None  # tokens of the current document, made when they are needed

    def next_sequence(self) -> PackedSequence:
        """Return the next packed sequence.

        Raises:
            ConfigError: no document of this stream holds a token.
        """
        barren, builder = 0, SequenceBuilder(self._seq_len)
        while builder.missing:
            taken = builder.add(self._current(), self._token)
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
        return builder.finish()

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


TextStream: TypeAlias = DocumentStream | WholeStream


class TextData(NamedTuple):
    """The documents of a data set, what makes tokens of them, and the streams that pack these.

    made_by: hashes of the settings that decide which tokens the documents become, by name; see `streams.IDENTITY`.
    """

    source: DocumentSource
    encoder: Tokenizer | Encoder
    stream: Callable[..., TextStream] = DocumentStream
    made_by: Mapping[str, int] = MappingProxyType({})

    @property
    def items(self) -> int:
        """Number of documents."""
        return len(self.source)

    def check(self, data_streams: int | None) -> None:
        """Check that every stream has a document; ConfigError otherwise."""
        check_streams("the data set", len(self.source), data_streams)

    def builder(self, seq_len: int, seed: int, data_streams: int) -> Callable[..., TextStream]:
        """Return what makes a stream of (items, stream=its number). data_streams: a mixture depends on it."""
        return partial(self.stream, self.source, self.encoder, seq_len=seq_len, seed=seed)

    def dealt(self, items: int, *how: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number of each stream of a rank, and its documents; see `streams.dealt`."""
        return dealt(items, *how)

    def describe(self, items: int, seq_len: int) -> dict[str, int]:
        """Return what the meaning of a position depends on, besides seed and number of streams."""
        # Pieces of documents are counted in this length.
        pieces = {"seq_len": seq_len} if isinstance(self.encoder, DocumentEncoder) else {}
        return {"documents": items, "content": fingerprint(self.source, items), **self.made_by, **pieces}

    def items_of(self, saved: Mapping[str, int]) -> int:
        """Return how many documents to read: files that were added behind the others wait for another run.

        Raises:
            ConfigError: documents are missing, or were added at another place.
        """
        now, before = len(self.source), saved.get("documents", len(self.source))
        if now > before and "content" in saved and fingerprint(self.source, before) == saved["content"]:
            logger.info(
                f"the data set has {now - before:,} more documents than at the start of this run, which goes on with "
                f"its {before:,}; a new run reads all (checkpoint.initial_load_path takes the weights there)"
            )
            return before
        if now != before:
            raise ConfigError(
                f"the data set has {now:,} documents, and had {before:,} when the checkpoint was saved, so that its "
                "positions would mean other data; restore the files (new ones may be added behind the last one), "
                + ANEW
            )
        return now


def open_text(model: Model, dataset: str, path: str | None, training: Training = _DEFAULTS) -> TextData:
    """Return the data set `dataset` at `path`, for the tokenizer and the chat template of table [model].

    training: says how records are read and packed. Conversations are never cut.

    Raises:
        ConfigError: see `open_source`, `open_tokenizer`, `find_template`; conversations for a model of sentencepiece.
    """
    how = Reading.of(training, model.tokenizer_file)
    source, tokenizer = open_source(dataset, path, how), open_tokenizer(model.tokenizer_file)
    whole = partial(WholeStream, alone=training.packing == "pad")
    ends_of_text = tokenizer.bos_id, tokenizer.eos_id  # files beside that of the tokenizer may name them
    made_by = {"tokenizer": _hash(tokenizer_hash(model.tokenizer_file), *ends_of_text)}
    if dataset == "jsonl":
        made_by["text_field"] = _hash(how.text_field)
    if dataset != "chat" and training.packing in (None, "concatenate"):
        return TextData(source, tokenizer, DocumentStream, made_by)
    if dataset != "chat":
        return TextData(source, DocumentEncoder(tokenizer), whole, made_by)
    tokenizer.encode_with_places("", special=True)  # refuses a format that cannot
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    ends = {name: tokenizer.decode([i]) for name, i in ids.items() if i is not None}
    template = find_template(model.tokenizer_file, model.chat_template, ends)
    made_by["template"] = _hash(template and template.identity)
    return TextData(source, ConversationEncoder(tokenizer, template), whole, made_by)


def _hash(*parts: object) -> int:
    return number_of(blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8))

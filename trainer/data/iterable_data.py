"""An iterable of a package as a data set. torchdata's StatefulDataLoader keeps the position in it.

Each data stream has its own iterable and packs its documents, in the order of the iterable. A pass over it is an epoch.
So the order of the documents depends on the number of streams, but not on the number of ranks that resume. Without
`training.data_streams`, the number of streams is the number of data-parallel ranks of the first start.

A position is the number of the oldest document that is still needed, and the state of the iterable before it. An
iterable without a state is read again from its beginning, up to this number.

State of the process: One filter of warnings, while a loader of torchdata is built.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful import Stateful

from trainer.config.errors import ConfigError
from trainer.data.contents import Contents
from trainer.data.order.stream_loader import AGAIN
from trainer.data.order.streams import StreamState, streams_of_rank
from trainer.data.sources.records import BadRecord, Tally
from trainer.data.sources.registry import DataSettings, source_of
from trainer.data.text_data import TextData, TextStream
from trainer.data.token_files.inputs import made_by
from trainer.data.tokenizers.tokenizer import (
    NOTHING,
    Encoded,
    replace_surrogates,
    vocab_size_of,
)


class _Iterable(IterableDataset):
    """An iterable as a data set of PyTorch, with its state by torchdata's protocol `Stateful`, if it has one.

    Some streams of `datasets` have a wrong state, which is not used.
    """

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable
        if isinstance(iterable, Stateful) and not _state_is_wrong(iterable):
            self.state_dict = iterable.state_dict
            self.load_state_dict = iterable.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


def _state_is_wrong(iterable: Any) -> bool:
    """Return whether a stream of `datasets` would not continue where its state was saved; False for other iterables.

    The documents in a shuffle buffer are lost. A shuffle that reads several shards at a time waits without end after a
    resume, if the shards are Parquet files (datasets 5.2).
    """
    parts = [getattr(iterable, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if getattr(part, "max_input_shards", 1) > 1:
            return True
        if type(part).__name__ == "BufferShuffledExamplesIterable" and part.buffer_size > 1:
            return True
        inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", [])]
        parts += [one for one in inner if one is not None]
    return False


def _is_count(state: StreamState) -> bool:
    """Return whether a state of torchdata's loader only counts the documents of an iterable.

    torchdata 0.11 counts wrong after a resume: it adds the documents that it reads again to the documents of the state.
    """
    fetched = state["fetcher_state"]  # None for a sequence: its state is an index
    return (
        fetched is not None
        and state["dataset_state"] is None
        and fetched["dataset_iter_state"] is None
    )


def loader_of(iterable: Any, epoch: int) -> StatefulDataLoader:
    """Return the loader of a pass over an iterable or a sequence. Call its `set_epoch` if it has one.

    Args:
        iterable: The iterable.
        epoch: The number of the pass, for `set_epoch`.
    """
    if hasattr(iterable, "set_epoch"):
        iterable.set_epoch(epoch)
    if not (hasattr(iterable, "__len__") and hasattr(iterable, "__getitem__")):
        iterable = _Iterable(iterable)
    with warnings.catch_warnings():
        # PyTorch warns of torchdata
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(
            iterable, batch_size=None, collate_fn=lambda document: document
        )


class IterableDocuments:
    """The documents of one stream, and their `Order`. Each pass opens the iterable again and reads it in turn.

    The length is the number of known documents: one more than were requested, until the pass ends.

    Args:
        settings: The settings of the data set.
        stream: The number of the stream.
        streams: The number of streams.
    """

    def __init__(self, settings: DataSettings, stream: int, streams: int) -> None:
        self._settings = settings
        self.stream = stream
        self._streams = streams
        self._place = source_of(settings).iterable
        self._encode = source_of(settings).encoder(settings)
        self._vocab_size = vocab_size_of(settings.tokenizer)
        self._skipped = Tally()
        self._epoch = -1

    def item(self, epoch: int, place: int) -> tuple[int, int]:
        """Return the index of a document, as `__getitem__` takes it.

        Args:
            epoch: The number of the pass.
            place: The number of the document in the pass.

        Returns:
            Both numbers.
        """
        return epoch, place

    def passes(self, epoch: int, place: int) -> float:
        """Return `epoch`: only whole passes count, because the length of a pass is unknown.

        Args:
            epoch: The number of the pass.
            place: The number of the document in the pass.
        """
        return float(epoch)

    def restart(self, epoch: int, state: StreamState) -> None:
        """Go to a position in a pass.

        Args:
            epoch: The number of the pass.
            state: The state of the stream in this pass, see `state`; empty for the beginning.

        Raises:
            ConfigError: The function that opens the iterable cannot be imported or fails, or the pass ends
                before the position.
        """
        first = state.get("iterable_document", 0)
        loader_state = state.get("iterable", "")
        if loader_state and _is_count(json.loads(loader_state)):
            loader_state = ""
        self._epoch, self._ended = epoch, False
        # number of requested documents, also before the restart
        self._asked = max(first, state.get("document", 0))
        self._documents: dict[int, Any] = {}
        self._states: dict[int, str] = {first: loader_state}  # before each document
        try:
            iterable = resolve_name(self._place)(
                self._settings.path, self.stream, self._streams
            )
            self._loader = loader_of(iterable, epoch)
            if loader_state:
                self._loader.load_state_dict(json.loads(loader_state))
            self._iterator = iter(self._loader)
            # number of documents read in this pass
            self._read = (
                first if loader_state else sum(1 for _ in islice(self._iterator, first))
            )
        except Exception as error:  # whatever a user's code raises
            raise self._failed(f"{self._place} fails", error) from error
        if self._read < first:
            raise self._lacks(first - 1)

    def state(self, epoch: int, oldest: int) -> StreamState:
        """Return the position before the oldest document that a restart needs again.

        Args:
            epoch: The number of the pass.
            oldest: The number of that document in the pass.

        Returns:
            "iterable_document", its number; and "iterable", the loader's state as JSON. "iterable" is empty before
            the first document, in another pass, and if the iterable keeps no state.
        """
        if epoch != self._epoch or not oldest:
            return {"iterable_document": 0, "iterable": ""}
        self._states = {
            number: state for number, state in self._states.items() if number >= oldest
        }
        return {"iterable_document": oldest, "iterable": self._state_before(oldest)}

    def __len__(self) -> int:
        self._read_to(self._asked + 1)
        return self._read

    def __getitem__(self, place: tuple[int, int]) -> Encoded:
        """Return a document of a pass; a document without tokens if the record is bad and bad records are skipped.

        Request documents in ascending order: a document that was requested, and all before it, are not kept.

        Args:
            place: The numbers of the pass and of the document.

        Raises:
            ConfigError: The iterable fails, has no document, or has another kind of document than is known.
        """
        epoch, number = place
        if epoch != self._epoch:
            self.restart(epoch, {})
        self._asked = max(self._asked, number + 1)
        self._read_to(self._asked)
        if number >= self._read:
            raise self._lacks(number)
        document = self._documents[number]
        self._documents = {i: later for i, later in self._documents.items() if i > number}
        try:
            return self._encoded(document, number)
        except BadRecord as error:
            if not self._settings.skips:
                raise
            self._skipped.count(error)
            return NOTHING

    def _read_to(self, documents: int) -> None:
        while self._read < documents and not self._ended:
            self._states[self._read] = self._state_before(self._read)
            try:
                self._documents[self._read] = next(self._iterator)
                self._read += 1
            except StopIteration:
                self._ended = True
            except Exception as error:
                problem = f"document {self._read + 1} of stream {self.stream} cannot be read"
                raise self._failed(problem, error) from error

    def _state_before(self, number: int) -> str:
        if number in self._states:
            return self._states[number]
        state = self._loader.state_dict()
        try:
            return "" if _is_count(state) else json.dumps(state)
        except TypeError as error:
            raise self._failed("its state_dict() is not JSON", error) from error

    def _lacks(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self._settings.keys.dataset} = {self._settings.dataset!r}: pass {self._epoch + 1} of stream "
            f"{self.stream} of {self._streams} has {self._read} documents, and number {number + 1} is asked for; give "
            "each stream documents, the same ones after a restart, or use fewer training.data_streams"
        )

    def _failed(self, problem: str, error: Exception) -> ConfigError:
        where = f"{self._settings.keys.dataset} = {self._settings.dataset!r}"
        return ConfigError(
            f"{where}: {problem} ({type(error).__name__}: {error}); correct the package that makes it"
        )

    def _encoded(self, document: Any, number: int) -> Encoded:
        name = self._settings.text_field
        if isinstance(document, Encoded):
            return self._checked(document, number)
        if isinstance(document, Mapping) and name in document:
            document = document[name]
        if isinstance(document, str):
            return self._encode(replace_surrogates(document))
        if isinstance(document, list | tuple | np.ndarray | torch.Tensor):
            return self._checked(Encoded(np.asarray(document)), number)
        raise self._bad(number, f"is of type {type(document).__name__}")

    def _checked(self, document: Encoded, number: int) -> Encoded:
        ids = document.ids if len(document.ids) else NOTHING.ids
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise self._bad(number, f"has an array of shape {ids.shape} and {ids.dtype}")
        encoded = Encoded(ids, document.answers)
        if problem := encoded.wrong_id(self._vocab_size):
            raise self._bad(number, problem)
        return encoded

    def _bad(self, number: int, problem: str) -> BadRecord:
        return BadRecord(
            f"{self._settings.dataset}, stream {self.stream}, document {number + 1}, {problem}; give a text, an object "
            f'with a text or token ids in "{self._settings.text_field}" (training.dataset_text_field), or a list of '
            "token ids"
        )


@dataclass(frozen=True)
class IterableData:
    """The documents of an iterable, and how they are packed; see `TextData`."""

    settings: DataSettings
    packing: str

    items = 0
    """Number of documents: unknown."""

    def check(self, data_streams: int | None, seed: int) -> None:
        """Check nothing: nothing is known before the documents are read.

        Args:
            data_streams: The configured number of streams.
            seed: Seed of the order.
        """

    def streams_with_text(self, data_streams: int, seed: int) -> int:
        """Return `data_streams`: empty streams are not known.

        Args:
            data_streams: Number of streams.
            seed: Seed of the order.
        """
        return data_streams

    def streams(
        self,
        items: int,
        seq_len: int,
        data_streams: int,
        seed: int,
        dp_rank: int,
        dp_degree: int,
    ) -> dict[int, TextStream]:
        """Return the streams that a data-parallel rank reads, by number.

        Args:
            items: Ignored, because the number of documents is unknown.
            seq_len: Tokens of a sequence.
            data_streams: Number of streams.
            seed: Ignored: the iterable decides the order.
            dp_rank: The data-parallel rank.
            dp_degree: The number of data-parallel ranks.
        """
        streams = {}
        for s in streams_of_rank(data_streams, dp_rank, dp_degree):
            source = IterableDocuments(self.settings, s, data_streams)
            streams[s] = TextData(source, self.packing).packed(source, seq_len)
        return streams

    def describe(self, items: int, seq_len: int) -> dict[str, int]:
        """Return everything that the meaning of a position depends on, except seed and number of streams.

        Args:
            items: Ignored.
            seq_len: Tokens of a sequence.
        """
        return made_by(self.settings) | (
            {} if self.packing == "concatenate" else {"seq_len": seq_len}
        )

    def items_of(self, saved: StreamState) -> int:
        """Return 0: the number of documents is unknown.

        Args:
            saved: An entry of the saved state.

        Raises:
            ConfigError: The state is of a data set of files.
        """
        if saved and "iterable" not in saved:
            raise ConfigError(
                f"the checkpoint's positions are in a data set of files, and {self.settings.keys.dataset} = "
                f"{self.settings.dataset!r} is an iterable; resume with the data set of the checkpoint, {AGAIN}"
            )
        return 0

    def contents(self) -> dict[str, Contents]:
        """Return no counts."""
        return {}

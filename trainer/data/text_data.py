"""An opened data set: its documents, and how streams pack them. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from trainer.config.errors import ConfigError
from trainer.data.order.streams import ANEW, dealt
from trainer.data.packing.concatenate import DocumentStream
from trainer.data.packing.whole import TooLong, WholeStream
from trainer.data.sources.registry import DataSettings, check_streams
from trainer.data.token_files.catalog import open_documents
from trainer.data.token_files.reader import Documents

logger = logging.getLogger("trainer")
TextStream: TypeAlias = DocumentStream | WholeStream


class TextData(NamedTuple):
    """The documents of a data set, and how they are packed, see `training.packing`.

    conversations: a document that is longer than a sequence is not cut into pieces: its end is left out.
    """

    source: Documents
    packing: str = "concatenate"
    conversations: bool = False

    @property
    def items(self) -> int:
        """Number of documents."""
        return len(self.source)

    def check(self, data_streams: int | None) -> None:
        """Check that every stream has a document; ConfigError otherwise."""
        check_streams("the data set", len(self.source), data_streams)

    def stream(self, items: Sequence[int], *, stream: int, seq_len: int, seed: int) -> TextStream:
        """Return a stream of some of the documents."""
        return self.builder(seq_len, seed, 1)(items, stream=stream)

    def builder(self, seq_len: int, seed: int, data_streams: int) -> Callable[..., TextStream]:
        """Return what makes a stream of (items, stream=its number). data_streams: a mixture depends on it."""
        if self.packing == "concatenate":
            return partial(DocumentStream, self.source, seq_len=seq_len, seed=seed)
        more = {"alone": self.packing == "pad", "too_long": TooLong() if self.conversations else None}
        return partial(WholeStream, self.source, seq_len=seq_len, seed=seed, **more)

    def dealt(self, items: int, *how: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the number of each stream of a rank, and its documents; see `streams.dealt`."""
        return dealt(items, *how)

    def describe(self, items: int, seq_len: int) -> dict[str, int]:
        """Return what the meaning of a position depends on, besides seed and number of streams."""
        counts_pieces = self.packing != "concatenate" and not self.conversations
        pieces = {"seq_len": seq_len} if counts_pieces else {}
        return {"documents": items, "content": self.source.fingerprint(items), **self.source.made_by, **pieces}

    def items_of(self, saved: Mapping[str, int]) -> int:
        """Return how many documents to read: files that were added behind the others wait for another run.

        Raises:
            ConfigError: documents are missing, or were added at another place.
        """
        now, before = len(self.source), saved.get("documents", len(self.source))
        if now > before and "content" in saved and self.source.fingerprint(before) == saved["content"]:
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


def open_text(settings: DataSettings, packing: str | None = None, catalog: str | None = None) -> TextData:
    """Return a data set. packing: None: that of its kind; catalog: file of its catalog, if another process made it.

    Raises:
        ConfigError: see `catalog_of`.
    """
    is_chat = settings.dataset == "chat"
    return TextData(open_documents(settings, catalog), packing or ("best_fit" if is_chat else "concatenate"), is_chat)

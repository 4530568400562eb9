"""A data set of token files: its documents, and how streams pack them. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.contents import Contents, content_of
from trainer.data.document_stream import DocumentStream
from trainer.data.order.shuffled import SORTED
from trainer.data.order.stream_loader import AGAIN
from trainer.data.order.streams import Order, Shuffled, assigned, streams_with_text
from trainer.data.sources.registry import check_streams
from trainer.data.token_files.format import TokenFiles
from trainer.data.whole_stream import TooLong, WholeStream
from trainer.runtime.console import logger

TextStream = DocumentStream | WholeStream


@dataclass(frozen=True)
class TextData:
    """The documents of a data set, and how they are packed.

    Attributes:
        source: The token files.
        packing: The value of `training.packing`.
        conversations: How conversations longer than a sequence are used; None for texts, which are cut into pieces.
    """

    source: TokenFiles
    packing: str = "concatenate"
    conversations: TooLong | None = field(default=None, compare=False)

    @property
    def items(self) -> int:
        """Number of documents."""
        return len(self.source)

    def check(self, data_streams: int | None, seed: int) -> None:
        """Check that every stream has a document with text. Of more than SORTED documents the text is not read.

        Args:
            data_streams: The configured number of streams. None: one document with text is enough.
            seed: Seed of the order.

        Raises:
            ConfigError: A stream has no document with text, or there are fewer documents than streams.
        """
        check_streams("the data set", self.items, data_streams)
        if not (most := self.streams_with_text(data_streams or 1, seed)):
            raise ConfigError(
                f"none of the {self.items} documents of the data set holds text; give a document with text"
            )
        if data_streams is not None and most < data_streams:
            raise ConfigError(
                f"training.data_streams = {data_streams} leaves a stream without text, because many of the "
                f"{self.items} documents are empty; use {most}, leave it out, or leave out documents without text"
            )

    def streams_with_text(self, data_streams: int, seed: int) -> int:
        """Return `data_streams`, or fewer if a stream had no text; 0 if no document has text.

        The text of more than SORTED documents is not checked: the result is `data_streams`.

        Args:
            data_streams: Number of streams.
            seed: Seed of the order.
        """
        if self.items > SORTED:
            return data_streams
        return streams_with_text(self.source.lengths() > 0, data_streams, seed)

    def packed(self, order: Order, seq_len: int) -> TextStream:
        """Return a new stream of documents in an order: `DocumentStream` to concatenate them, else `WholeStream`.

        Args:
            order: The documents of the stream, in the order of each epoch.
            seq_len: Tokens of a sequence.
        """
        if self.packing == "concatenate":
            return DocumentStream(self.source, order, seq_len=seq_len)
        return WholeStream(
            self.source,
            order,
            seq_len=seq_len,
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
        """Return the streams that a data-parallel rank reads, by number, at their beginning.

        Args:
            items: Number of documents that are read, counted from the first one.
            seq_len: Tokens of a sequence.
            data_streams: Number of streams.
            seed: Seed of the order.
            dp_rank: The data-parallel rank.
            dp_degree: The number of data-parallel ranks.
        """
        return {
            s: self.packed(Shuffled(own, stream=s, seed=seed), seq_len)
            for s, own in assigned(items, data_streams, seed, dp_rank, dp_degree)
        }

    def describe(self, items: int, seq_len: int) -> dict[str, int]:
        """Return everything that the meaning of a position depends on, except seed and number of streams.

        Args:
            items: Number of documents that are read, counted from the first one.
            seq_len: Tokens of a sequence.

        Returns:
            The number of documents, the hash of their content, the hashes `made_by`, and `seq_len` if long texts are
            cut.
        """
        counts_pieces = self.packing != "concatenate" and not self.conversations
        pieces = {"seq_len": seq_len} if counts_pieces else {}
        return {
            "documents": items,
            "content": self.source.fingerprint(items),
            **self.source.made_by,
            **pieces,
        }

    def items_of(self, saved: Mapping[str, Any]) -> int:
        """Return how many documents a resumed run reads: the documents that were there when the run started.

        New files after the last one are not read, which the log says.

        Args:
            saved: The result of `describe` in the checkpoint. If it lacks "documents", all documents are read.

        Raises:
            ConfigError: Documents are missing, or were added at another place.
        """
        now = self.items
        before = saved.get("documents", now)
        if now > before and self.source.fingerprint(before) == saved.get("content"):
            logger.info(
                f"the data set has {now - before:,} more documents than at the start of this run, which continues "
                f"with its {before:,}; a new run reads all (checkpoint.initial_load_path takes the weights there)"
            )
            return before
        if now != before:
            raise ConfigError(
                f"the data set has {now:,} documents, and had {before:,} when the checkpoint was saved, so that "
                "its positions would mean other data; restore the files (new ones may be added behind the last "
                f"one), {AGAIN}"
            )
        return now

    def contents(self) -> dict[str, Contents]:
        """Return the counts of the documents, under the key ""."""
        return {"": content_of(self.source)}

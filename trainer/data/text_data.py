"""The data sets of a job, and one that is opened: its documents, and how streams pack them. Torch-free."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.order.streams import AGAIN, assigned
from trainer.data.packing.streams import DocumentStream, TooLong, WholeStream
from trainer.data.sources.files import DataKeys, cache_folder
from trainer.data.sources.registry import DataSettings, check_streams, files_of, source_of
from trainer.data.token_files.catalog import open_documents
from trainer.data.token_files.format import Pairs, TokenFiles
from trainer.data.token_files.made import described
from trainer.runtime.console import logger


def training_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job trains on: one, or the sources of a mixture."""
    training = config.training
    paths, keys = (training.dataset_path,), DataKeys()
    if config.mixture.names:
        paths, keys = config.mixture.paths, DataKeys(path="mixture.paths")
    return [
        DataSettings.of(training.dataset, path, config.model, training, chat=config.chat, keys=keys) for path in paths
    ]


def validation_data(config: JobConfig) -> DataSettings:
    """Return the data set that the loss is validated on."""
    keys = DataKeys("validation.dataset", "validation.dataset_path")
    source, chat = config.validation.source(config.training), config.chat
    return DataSettings.of(*source, config.model, config.training, chat=chat, keys=keys)


def all_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job reads."""
    if config.task != "tokens":
        return []
    return [*training_data(config), *([validation_data(config)] if config.validation.enable else [])]


def first_start(config: JobConfig) -> list[str]:
    """Return for each data set of text on this machine what its first start makes, and where."""
    found = []
    for settings in all_data(config):
        with suppress(MissingFile):
            source = source_of(settings)
            if not (source.token_files or source.iterable):
                what = described(settings, sum(map(os.path.getsize, files_of(settings))))
                found.append(f"the first start makes token files of {what} in {cache_folder()}; later ones read them")
    return list(dict.fromkeys(found))


TextStream: TypeAlias = DocumentStream | WholeStream


@dataclass(frozen=True)
class TextData:
    """The documents of a data set, and how they are packed, see `training.packing`.

    conversations: what is used of documents that are longer than a sequence; None: they are texts, cut into pieces.
    """

    source: TokenFiles | Pairs
    packing: str = "concatenate"
    conversations: TooLong | None = field(default=None, compare=False)

    @property
    def items(self) -> int:
        """Number of documents."""
        return len(self.source)

    def check(self, data_streams: int | None) -> None:
        """Check that every stream has a document; ConfigError otherwise."""
        check_streams("the data set", len(self.source), data_streams)

    def stream(self, items: Sequence[int], *, stream: int, seq_len: int, seed: int) -> TextStream:
        """Return a stream of some of the documents. stream: its number."""
        how = {"stream": stream, "seq_len": seq_len, "seed": seed}
        if self.packing == "concatenate":
            return DocumentStream(self.source, items, **how)
        return WholeStream(self.source, items, **how, alone=self.packing == "pad", conversations=self.conversations)

    def streams(
        self, items: int, seq_len: int, data_streams: int, seed: int, dp_rank: int, dp_degree: int
    ) -> dict[int, TextStream]:
        """Return the streams that a data-parallel rank reads, by number. items: how many documents are read."""
        shares = assigned(items, data_streams, seed, dp_rank, dp_degree)
        return {s: self.stream(own, stream=s, seq_len=seq_len, seed=seed) for s, own in shares}

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


def open_text(settings: DataSettings, packing: str | None = None, catalog: str | None = None) -> TextData:
    """Return a data set. packing: None: that of its kind; catalog: as of `open_documents`, and what is raised, too."""
    if source_of(settings).iterable:
        from trainer.data.iterable_data import IterableData

        return IterableData(settings, packing or "concatenate")
    chats, documents = None, open_documents(settings, catalog)
    if settings.dataset in CONVERSATIONS:
        chats = TooLong(drops=settings.chat.too_long == "drop")
    source = documents
    if settings.dataset == "preferences":
        chats, source = TooLong(drops=True, what="pairs longer than a sequence"), Pairs(documents)
    return TextData(source, packing or ("best_fit" if chats else "concatenate"), chats)

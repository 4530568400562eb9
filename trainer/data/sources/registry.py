"""Kinds of data sets by name: which files they have, and how these become documents. Torch-free.

`check_source` checks a data set quickly, before the job starts. `token_files` makes token ids of its parts.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from typing import Any

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.registry import Registry
from trainer.config.schema import Chat, JobConfig, Model, Training
from trainer.data.sources.conversations import COLUMNS, conversation, preference
from trainer.data.sources.files import DataKeys, find_files, stdlib_files
from trainer.data.sources.records import (
    STREAMED,
    BadRecord,
    HubData,
    Tally,
    Where,
    line_of_row,
    lines_of,
    rows_of,
    text_of_file,
    text_of_line,
    text_of_row,
)
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.tokenizer import NOTHING, Encoded, open_tokenizer
from trainer.grouping import grouped

HUB = "hub://"
"""Beginning of the path of conversations that lie on the Hugging Face hub."""
_WHOLE = 1 << 62  # more bytes than a file has: each file is one part


@dataclass(frozen=True)
class DataSettings:
    """A data set, and the settings that turn its documents into token ids.

    Attributes:
        dataset: The kind of data.
        path: File, folder or glob; for the hub NAME[:CONFIGURATION[:SPLIT]][@REVISION], for conversations after HUB.
        tokenizer: The file of the tokenizer.
        chat_template: The file of the chat template; None for the tokenizer's.
        text_field: The field of a line of JSON, or the column, with the text.
        skips: Whether bad records are left out.
        chat: The table [chat].
        keys: Keys of the configuration, for messages.
    """

    dataset: str
    path: str | None = None
    tokenizer: str = JobConfig.model.tokenizer_file
    chat_template: str | None = None
    text_field: str = "text"
    skips: bool = False
    chat: Chat = JobConfig.chat
    keys: DataKeys = field(default=DataKeys(), compare=False, repr=False)

    @classmethod
    def of(
        cls,
        dataset: str,
        path: str | None,
        model: Model,
        training: Training = JobConfig.training,
        **others: Any,
    ) -> "DataSettings":
        """Return the settings of the tables [model] and [training].

        Args:
            dataset: The kind of data.
            path: The path of the data.
            model: The table [model].
            training: The table [training].
            **others: The fields `chat` and `keys`.
        """
        field = training.dataset_text_field
        skips = training.on_bad_record == "skip"
        return cls(
            dataset, path, model.tokenizer_file, model.chat_template, field, skips, **others
        )

    @property
    def hub(self) -> str:
        """The name of the data set on the Hugging Face hub, see `HubData.of`; empty if the data are elsewhere."""
        path = self.path or ""
        if self.dataset in CONVERSATIONS and path.startswith(HUB):
            return path.removeprefix(HUB)
        return path if self.dataset == "hub" else ""

    def conversation_encoder(self) -> ConversationEncoder:
        """Return the encoder of conversations.

        Raises:
            ConfigError, MissingFile: As `ConversationEncoder.of`.
        """
        return ConversationEncoder.of(self.tokenizer, self.chat_template, self.chat)


@dataclass(frozen=True)
class Part:
    """Documents of a shard: whole files, or the lines that begin in the bytes [start, stop) of one file.

    Attributes:
        files: The files.
        size: Bytes; 0 if unknown.
        start: The first byte. For a data set of the hub, the number of its shard.
        stop: The end; None for the end of the file.
    """

    files: tuple[str, ...]
    size: int
    start: int = 0
    stop: int | None = None


def _encoder_of_texts(settings: DataSettings) -> Callable[[str], Encoded]:
    """Return the function that encodes a text with begin and end tokens. An empty text has no tokens at all."""
    tokenizer = open_tokenizer(settings.tokenizer)
    return lambda text: (
        Encoded(tokenizer.encode_to_numpy(text, bos=True, eos=True)) if text else NOTHING
    )


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    Attributes:
        endings: Endings of the files in a folder; empty if the data set has no path.
        parts: From (settings, files, bytes) to parts of about that size, which processes tokenize one by one. None, as
            `documents`, if there is no text.
        documents: From (settings, part) to the documents of a part in order, with a `BadRecord` instead of a bad one.
        encoder: From the settings to a function that makes token ids of a document.
        own_files: Returns the files of a data set without a path.
        token_files: Whether the files have token ids.
        iterable: The place of the function that opens an iterable, which has no files; see `register_iterable`.
    """

    endings: tuple[str, ...]
    parts: Callable[[DataSettings, Sequence[str], int], list[Part]] | None = None
    documents: Callable[[DataSettings, Part], Iterator[Any]] | None = None
    encoder: Callable[[DataSettings], Callable[[Any], Encoded]] = _encoder_of_texts
    own_files: Callable[[], Sequence[str]] | None = None
    token_files: bool = False
    iterable: str = ""


def files_of(settings: DataSettings) -> list[str]:
    """Return the files of a data set in order, without empty files unless they are token files.

    The list is empty for the hub and for an iterable.

    Args:
        settings: The data set.

    Raises:
        ConfigError: The data set is unknown; or its path is missing, superfluous, unreadable or matches nothing.
    """
    name = settings.dataset
    path = settings.path
    source = source_of(settings)
    keys = settings.keys
    if source.own_files is not None:
        if path:
            others = " or ".join(
                repr(other) for other, source in DATASETS.items() if source.endings
            )
            raise ConfigError(
                f"{keys.path} = {path!r} would do nothing, {name} needs none; leave it out, or choose"
                f" {keys.dataset} = {others}"
            )
        return list(source.own_files())
    if not path and not source.iterable:
        needed = (
            f"a {' or '.join(source.endings)} file, a folder, or a glob"
            if source.endings
            else "the data set's name"
        )
        raise ConfigError(f"{keys.dataset} = {name!r} needs {keys.path}; give {needed}")
    if settings.hub or not source.endings:
        return []
    others = {
        end: other for other, source in reversed(DATASETS.items()) for end in source.endings
    }
    files = find_files(path, source.endings, dataset=name, others=others, keys=keys)
    return files if source.token_files else [file for file in files if os.path.getsize(file)]


def source_of(settings: DataSettings) -> Source:
    """Return the kind of a data set.

    Args:
        settings: The data set.

    Raises:
        ConfigError: There is no kind of that name.
    """
    name = settings.dataset
    keys = settings.keys
    if name in DATASETS:
        return DATASETS[name]
    if name == "c4_test":
        raise ConfigError(
            f"{keys.dataset} = 'c4_test' is a file in torchtitan's repository; clone it, and use {keys.dataset} = "
            f"'jsonl' and {keys.path} = 'PATH/TO/torchtitan/tests/assets/c4_test/data.json'"
        )
    if name.startswith("c4") or "/" in name:
        path = "allenai/c4:en" if name.startswith("c4") else name
        raise ConfigError(
            f"{keys.dataset} = {name!r} lies on the Hugging Face hub; use {keys.dataset} = 'hub' and {keys.path} = "
            f"{path!r}"
        )
    raise ConfigError(
        f"{keys.dataset} = {name!r} is not a known data set{did_you_mean(name, DATASETS)}"
    )


def documents_of(settings: DataSettings, part: Part, skipped: Tally) -> Iterator[Any]:
    """Yield the documents of a part. If `settings.skips`, a bad document is counted, and "" is yielded for it.

    Args:
        settings: The data set.
        part: The part.
        skipped: Counts bad records, and logs some of them.

    Raises:
        ConfigError: The data cannot be read, or a record is bad and not to be skipped.
    """
    for document in source_of(settings).documents(settings, part):
        if not isinstance(document, BadRecord):
            yield document
            continue
        if not settings.skips:
            raise document
        skipped.count(document)
        yield ""


def all_documents(settings: DataSettings) -> Iterator[Any]:
    """Yield the documents of a data set, from the first one on.

    Args:
        settings: The data set.

    Raises:
        ConfigError: As `files_of` and `documents_of`.
    """
    skipped = Tally()
    for part in source_of(settings).parts(settings, files_of(settings), _WHOLE):
        yield from documents_of(settings, part, skipped)


def check_source(settings: DataSettings, data_streams: int | None = None) -> None:
    """Check a data set of text without converting it. Only the start of large data is read.

    The documents of compressed files and of the hub are not counted.

    Args:
        settings: The data set.
        data_streams: The configured number of streams, None for the default.

    Raises:
        ConfigError: As `files_of`; there are no data; the first one is bad and not to be skipped; or too many streams.
    """
    source = source_of(settings)
    files = files_of(settings)
    where = (
        f"{settings.keys.path} = {settings.path!r}"
        if settings.path
        else f"{settings.keys.dataset} = {settings.dataset!r}"
    )
    if settings.hub:
        HubData.of(settings.hub)
    if settings.hub or source.iterable:
        return
    parts = source.parts(settings, files, _WHOLE)
    documents = (document for part in parts for document in source.documents(settings, part))
    first = next(documents, None)
    if isinstance(first, BadRecord) and not settings.skips:
        raise first
    if first is None or not any(file.endswith(STREAMED) for file in files):
        further = islice(documents, (data_streams or 1) - 1)
        number = 0 if first is None else 1 + sum(1 for _ in further)
        check_streams(where, number, data_streams)


def check_streams(
    where: str, items: int, data_streams: int | None, *, item: str = "document"
) -> None:
    """Check that there is a document, and that there are at least as many documents as streams.

    Args:
        where: The data set, as the message names it.
        items: Number of documents.
        data_streams: Number of streams; None for a number that fits.
        item: The name of a document, for the message.

    Raises:
        ConfigError: There is no document, or there are fewer than streams.
    """
    if not items:
        raise ConfigError(f"{where} holds no text; give at least one {item}")
    if data_streams is not None and data_streams > items:
        raise ConfigError(
            f"training.data_streams = {data_streams} needs as many {item}s and {where} has {items}; leave it out, or "
            f"use at most {items}"
        )


# --- parts


def _groups_of_files(_: DataSettings, files: Sequence[str], size: int) -> list[Part]:
    sizes = {file: os.path.getsize(file) for file in files}
    return [
        Part(tuple(group), sum(map(sizes.__getitem__, group))) for group in grouped(sizes, size)
    ]


def _parts_of_lines(settings: DataSettings, files: Sequence[str], size: int) -> list[Part]:
    if settings.hub:
        return [Part((settings.path,), 0, i) for i in range(HubData.of(settings.hub).shards)]
    parts = []
    for file in files:
        whole = os.path.getsize(file)
        if file.endswith(STREAMED):
            parts.append(Part((file,), whole))
        else:
            edges = [*range(0, whole, size), whole]
            parts += [
                Part((file,), stop - start, start, stop) for start, stop in pairwise(edges)
            ]
    return parts


# --- documents


def _texts(_: DataSettings, part: Part) -> Iterator[Any]:
    return map(text_of_file, part.files)


def _rows(
    settings: DataSettings, part: Part, names: Sequence[str], read: Callable[..., Any]
) -> Iterator[Any] | None:
    """Return the documents of rows of the hub or of Parquet, see `rows_of`; None if the part has lines."""
    file = part.files[0]
    if settings.hub:
        return HubData.of(settings.hub).records(part.start, read)
    return rows_of(file, names, read) if file.endswith(".parquet") else None


def _texts_of_lines(settings: DataSettings, part: Part) -> Iterator[Any]:
    name = settings.text_field
    return _rows(settings, part, [name], partial(text_of_row, name)) or (
        text_of_line(content, name, where)
        for content, where in lines_of(part.files[0], part.start, part.stop)
    )


def _conversations_read_by(
    read: Callable[[bytes, Where], Iterable[Any]], sides: int = 1
) -> Source:
    """Return a kind of data set whose lines have messages. `read` turns a line into `sides` documents."""

    def documents(settings: DataSettings, part: Part) -> Iterator[Any]:
        rows = _rows(settings, part, COLUMNS, partial(line_of_row, COLUMNS))
        for line in rows or lines_of(part.files[0], part.start, part.stop):
            yield from (line, "")[:sides] if isinstance(line, BadRecord) else read(*line)

    return Source(
        (".jsonl", *STREAMED),
        _parts_of_lines,
        documents,
        lambda settings: settings.conversation_encoder().encode,
    )


DATASETS: Registry[Source] = Registry(
    "data set",
    {
        "python_stdlib": Source((), _groups_of_files, _texts, own_files=stdlib_files),
        "text": Source((".txt",), _groups_of_files, _texts),
        "jsonl": Source((".jsonl", *STREAMED), _parts_of_lines, _texts_of_lines),
        "chat": _conversations_read_by(lambda *line: [conversation(*line)]),
        "preferences": _conversations_read_by(preference, sides=2),
        "hub": Source((), _parts_of_lines, _texts_of_lines),
        "tokens": Source((".idx",), token_files=True),
    },
)

"""Kinds of data sets by name: which files they have, and how these become documents. Torch-free.

`check_source` checks a data set at once, before the job starts. `token_files` makes token ids of its parts.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, starmap
from typing import Any

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.registry import Registry
from trainer.config.schema import Chat, Model, Training
from trainer.data.sources.conversations import conversation, preference
from trainer.data.sources.files import DataKeys, find_files, stdlib_files
from trainer.data.sources.records import (
    COMPRESSED,
    STREAMED,
    BadRecord,
    HubData,
    Tally,
    lines_of,
    rows_of,
    text_of_file,
    text_of_line,
)
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.tokenizer import NOTHING, Encoded, open_tokenizer
from trainer.grouping import grouped

_MODEL = Model()
_TRAINING = Training()
_CHAT = Chat()
_WHOLE = 1 << 62  # bytes of a part that is a whole file


@dataclass(frozen=True)
class DataSettings:
    """A data set, and how its documents become token ids.

    path: file, folder or glob; for the hub NAME[:CONFIGURATION[:SPLIT]][@REVISION]. text_field: of a line of JSON, or
    column; skips: bad records are left out; keys: of the configuration, for messages.
    """

    dataset: str
    path: str | None = None
    tokenizer: str = _MODEL.tokenizer_file
    chat_template: str | None = None
    text_field: str = "text"
    skips: bool = False
    chat: Chat = _CHAT
    keys: DataKeys = field(default=DataKeys(), compare=False, repr=False)

    @classmethod
    def of(
        cls,
        dataset: str,
        path: str | None,
        model: Model,
        training: Training = _TRAINING,
        **others: Any,
    ) -> "DataSettings":
        """Return what the tables [model] and [training] say. others: the fields `chat` and `keys`, if given."""
        tokenizer = model.tokenizer_file
        field = training.dataset_text_field
        skips = training.on_bad_record == "skip"
        return cls(dataset, path, tokenizer, model.chat_template, field, skips, **others)


@dataclass(frozen=True)
class Part:
    """Documents of a shard: whole files, or the lines that begin in the bytes [start, stop) of one.

    size: in bytes, 0: not known; start: of a data set of the hub the number of its shard.
    """

    files: tuple[str, ...]
    size: int
    start: int = 0
    stop: int | None = None


def _encoder_of_texts(settings: DataSettings) -> Callable[[str], Encoded]:
    """Return what puts a text between the tokens that begin and end it; an empty one has none."""
    tokenizer = open_tokenizer(settings.tokenizer)
    return lambda text: (
        Encoded(tokenizer.encode_to_numpy(text, bos=True, eos=True)) if text else NOTHING
    )


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    endings: of the files in a folder; empty: the data set has no path.
    parts: (settings, files, bytes) -> parts of about so many bytes, which processes tokenize one by one; None, as
    `documents`, if there is no text.
    documents: (settings, part) -> the documents of a part in their order, a `BadRecord` in the place of a bad one.
    encoder: settings -> a function that makes token ids of a document.
    own_files: files of a data set without a path.
    check: what is checked before the job starts in place of the first document.
    token_files: the files have token ids.
    iterable: the place of the function that opens an iterable, see `register_iterable`; it has no files.
    """

    endings: tuple[str, ...]
    parts: Callable[[DataSettings, Sequence[str], int], list[Part]] | None = None
    documents: Callable[[DataSettings, Part], Iterator[Any]] | None = None
    encoder: Callable[[DataSettings], Callable[[Any], Encoded]] = _encoder_of_texts
    own_files: Callable[[], Sequence[str]] | None = None
    check: Callable[[DataSettings], object] | None = None
    token_files: bool = False
    iterable: str = ""


def files_of(settings: DataSettings) -> list[str]:
    """Return the files of a data set that are not empty, in their order.

    Raises:
        ConfigError: an unknown data set, or a path that is missing, superfluous, unreadable or matches nothing.
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
        what = (
            f"a {' or '.join(source.endings)} file, a folder, or a glob"
            if source.endings
            else "the data set's name"
        )
        raise ConfigError(f"{keys.dataset} = {name!r} needs {keys.path}; give {what}")
    if not source.endings:
        return []
    others = {
        end: other for other, source in reversed(DATASETS.items()) for end in source.endings
    }
    files = find_files(path, source.endings, dataset=name, others=others, keys=keys)
    return files if source.token_files else [file for file in files if os.path.getsize(file)]


def source_of(settings: DataSettings) -> Source:
    """Return the kind of a data set; ConfigError if there is none of that name."""
    name = settings.dataset
    keys = settings.keys
    if name in DATASETS:
        return DATASETS[name]
    if name == "c4_test":
        raise ConfigError(
            f"{keys.dataset} = 'c4_test' means the 2,000 documents in torchtitan's repository; use {keys.dataset} = "
            f"'jsonl' and {keys.path} = 'torchtitan/tests/assets/c4_test/data.json', where your clone of it lies"
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
    """Yield the documents of a part. A bad one is empty if bad records are skipped, and counted in `skipped`.

    Raises:
        ConfigError: the data cannot be read, or a record is bad and not to be skipped.
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
    """Yield the documents of a data set, from the first one on; it raises as `files_of` and `documents_of`."""
    skipped = Tally()
    for part in source_of(settings).parts(settings, files_of(settings), _WHOLE):
        yield from documents_of(settings, part, skipped)


def check_source(settings: DataSettings, data_streams: int | None = None) -> None:
    """Check a data set of text without converting it; only the start of large data is read.

    Raises:
        ConfigError: see `files_of`; no data; a first document that is bad; `data_streams` that do not fit, see
            `check_streams`. The documents of compressed files, and of the hub, are not counted.
    """
    source = source_of(settings)
    files = files_of(settings)
    keys = settings.keys
    where = (
        f"{keys.path} = {settings.path!r}"
        if settings.path
        else f"{keys.dataset} = {settings.dataset!r}"
    )
    if source.check is not None:
        source.check(settings)
        return
    parts = source.parts(settings, files, _WHOLE)
    documents = (document for part in parts for document in source.documents(settings, part))
    first = next(documents, None)
    if isinstance(first, BadRecord) and not settings.skips:
        raise first
    if first is None or not any(file.endswith(STREAMED) for file in files):
        more = islice(documents, (data_streams or 1) - 1)
        check_streams(where, first is not None and 1 + sum(1 for _ in more), data_streams)


def check_streams(
    where: str, items: int, data_streams: int | None, *, item: str = "document"
) -> None:
    """Check that every data stream has a document; None: the number is chosen to fit.

    where: the data set, as the message names it; item: what it has in place of documents.

    Raises:
        ConfigError: there is none, or there are fewer than streams.
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


def _ranges_of_lines(_: DataSettings, files: Sequence[str], size: int) -> list[Part]:
    found = []
    for file in files:
        whole = os.path.getsize(file)
        if file.endswith(STREAMED):
            found.append(Part((file,), whole))
        else:
            edges = [*range(0, whole, size), whole]
            found += [
                Part((file,), stop - start, start, stop) for start, stop in pairwise(edges)
            ]
    return found


# --- documents


def _texts(_: DataSettings, part: Part) -> Iterator[Any]:
    return map(text_of_file, part.files)


def _lines(settings: DataSettings, part: Part) -> Iterator[Any]:
    file = part.files[0]
    name = settings.text_field
    if file.endswith(".parquet"):
        return rows_of(file, name)
    return (
        text_of_line(content, name, where)
        for content, where in lines_of(file, part.start, part.stop)
    )


def _of_conversations(read: Callable[[Iterable[Any]], Iterator[Any]]) -> Source:
    """Return a kind of data set of lines with messages. read: lines, each with where it is -> documents."""
    return Source(
        (".jsonl", *COMPRESSED),
        _ranges_of_lines,
        lambda _, part: read(lines_of(part.files[0], part.start, part.stop)),
        lambda settings: (
            ConversationEncoder.of(
                settings.tokenizer, settings.chat_template, settings.chat
            ).encode
        ),
    )


DATASETS: Registry[Source] = Registry(
    "data set",
    {
        "python_stdlib": Source((), _groups_of_files, _texts, own_files=stdlib_files),
        "text": Source((".txt",), _groups_of_files, _texts),
        "jsonl": Source((".jsonl", *STREAMED), _ranges_of_lines, _lines),
        "chat": _of_conversations(lambda lines: starmap(conversation, lines)),
        "preferences": _of_conversations(
            lambda lines: chain.from_iterable(starmap(preference, lines))
        ),
        "hub": Source(
            (),
            lambda settings, *_: [
                Part((settings.path,), 0, i) for i in range(HubData.of(settings.path).shards)
            ],
            lambda settings, part: HubData.of(settings.path).texts(
                part.start, settings.text_field
            ),
            check=lambda settings: HubData.of(settings.path),
        ),
        "tokens": Source((".idx",), token_files=True),
    },
)

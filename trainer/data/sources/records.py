"""Documents of files, one after another: lines of JSON, rows of Parquet, whole texts; and of the Hugging Face hub.

A reader yields each document, or a `BadRecord` in its place: the run stops there, or leaves it out. The package
`datasets` reads these formats too, but it cannot name or skip a bad line, and does not compare the check sums of
Parquet's pages.

Data sets of the hub are streamed file by file, by the package `datasets`. Torch-free.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from trainer.config.errors import ConfigError, MissingFile, first_line
from trainer.data.sources.files import BLOCK, reading
from trainer.data.tokenizers.tokenizer import replace_surrogates
from trainer.runtime.console import logger

COMPRESSED = (".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
STREAMED = (*COMPRESSED, ".parquet")
"""Endings of files that can only be read from their start to their end."""
Where = Callable[[], str]
"""Returns which record it is, such as "file, line 7". It is called for messages only, because it may take long."""


class BadRecord(ConfigError):
    """One document of a data set cannot be used; the others can."""


class Tally:
    """Counts what is left out. The log has the 1st, 10th, 100th ... with its reason.

    number: so far; first: the reason of the first one.
    """

    def __init__(self, what: str = "bad records") -> None:
        self._what, self.number, self.first = what, 0, ""

    def count(self, reason: object) -> None:
        self.number += 1
        self.first = self.first or str(reason)
        if self.number == 10 ** (len(str(self.number)) - 1):
            logger.warning(f"{self._what} left out so far: {self.number:,}; this one: {reason}")


def lines_of(
    file: str, start: int = 0, stop: int | None = None
) -> Iterator[tuple[bytes, Where]]:
    """Yield the lines of a file that are not blank. start, stop: of the bytes in which they begin.

    Raises:
        ConfigError: the file cannot be read to its end.
    """
    with reading(file), _opened(file) as stream:
        if start:  # behind the line that begins before
            start = stream.seek(start - 1) + len(stream.readline())
        before = cache(lambda: _lines_before(file, start))
        place = start
        for number, content in enumerate(stream, 1):
            if stop is not None and place >= stop:
                return
            place += len(content)
            if content.strip():
                yield content, lambda number=number: f"{file}, line {before() + number}"


def rows_of(file: str, name: str) -> Iterator[str | BadRecord]:
    """Yield the texts in the column `name` of a Parquet file, of which no other column is read.

    Raises:
        ConfigError: the file cannot be read to its end, has no such column, or needs pyarrow.
    """
    parquet = package("pyarrow.parquet", file)
    numbers = count()
    with reading(file), parquet.ParquetFile(file, page_checksum_verification=True) as rows:
        check_column(name, rows.schema_arrow.names, file)
        for batch in rows.iter_batches(batch_size=1024, columns=[name]):
            # Arrow reads a struct "a" with a field "b" beside a column "a.b".
            for value, number in zip(_values(batch.column(name)), numbers, strict=False):
                yield text_of_row(value, name, f"{file}, row {number}")


def text_of_file(file: str) -> str | BadRecord:
    """Return the whole text of a file, or why it is no UTF-8; ConfigError if it cannot be read."""
    with reading(file):
        content = Path(file).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRecord(
            f"{file} is not UTF-8 text (byte {error.start}); convert it, or leave it out of the data set"
        )


def text_of_line(content: bytes, name: str, where: Where) -> str | BadRecord:
    """Return the field `name` of a line of JSON, or why there is none."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        if isinstance(text := json.loads(content)[name], str):
            return replace_surrogates(text)
    return BadRecord(f'{where()}, must be a JSON object with a string field "{name}", in UTF-8')


def text_of_row(value: object, name: str, where: str) -> str | BadRecord:
    """Return the text in the column `name` of a row, empty if it is null, or why it is none."""
    if value is None or isinstance(value, str):
        return replace_surrogates(value or "")
    return BadRecord(
        f'{where}, must have a text in UTF-8 in the column "{name}", not {type(value).__name__}; write texts there (a '
        "CSV file does not say which of its columns are texts: use JSON lines or Parquet)"
    )


def check_column(name: str, columns: Sequence[str], where: str) -> None:
    """Check that a table has a column; ConfigError otherwise."""
    if name not in columns:
        raise ConfigError(
            f'{where} has no column "{name}" ({", ".join(columns[:8])}); name one with training.dataset_text_field'
        )


def package(module: str, reader_of: str) -> Any:
    """Return a module of a package that only some data need; MissingFile if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise MissingFile(
            f"{reader_of} needs the package {name}: pip install {name}, or give .jsonl or .jsonl.gz"
        ) from None


def _opened(file: str) -> BinaryIO:
    if file.endswith(".gz"):
        return gzip.open(file)
    if file.endswith(".zst"):
        return io.BufferedReader(
            package("pyarrow", file).input_stream(file, compression="zstd"), BLOCK
        )
    return open(file, "rb")


def _lines_before(file: str, place: int) -> int:
    number = 0
    with open(file, "rb") as stream:
        while block := stream.read(min(BLOCK, place)):
            number = number + block.count(b"\n")
            place = place - len(block)
    return number


def _values(column: Any) -> Iterator[Any]:
    """Yield the values of a column of Arrow's; a text that is no UTF-8 as its bytes, where Arrow would stop."""
    types = package("pyarrow.types", "")
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = types.is_string(column.type) or types.is_large_string(column.type)
    for value in (column.cast("large_binary") if is_text else column).to_pylist():
        try:
            yield value.decode() if is_text and value is not None else value
        except UnicodeDecodeError:
            yield value


# ---- the Hugging Face hub

_ANSWER_SECONDS = 3.0


@dataclass(frozen=True)
class HubData:
    """A split of a data set, which does not change at one revision.

    config: None: the default one; revision: None: the newest one.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @classmethod
    def of(cls, path: str) -> "HubData":
        """Return the data set that NAME[:CONFIGURATION[:SPLIT]][@REVISION] names; ConfigError for other words."""
        place, _, revision = path.partition("@")
        name, *more = place.split(":")
        if not name or len(more) > 2:
            raise ConfigError(
                f"{path!r} must be the name of a data set of the Hugging Face hub, with its configuration and split if "
                "they are not the default ones, such as allenai/c4:en:train"
            )
        config, split = (*more, "", "")[:2]
        return cls(name, config or None, split or "train", revision or None)

    @property
    def path(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.name}:{self.config or ''}:{self.split}{revision}"

    def found(self) -> "HubData":
        """Return the data set with its revision, by its hash.

        Raises:
            ConfigError: the hub is not reached within seconds, or has no such data set.
        """
        _package()
        from huggingface_hub import HfApi

        try:
            found = HfApi().dataset_info(
                self.name, revision=self.revision, timeout=_ANSWER_SECONDS
            )
        except Exception as error:
            # of huggingface_hub, and of whichever package it sends requests with
            raise ConfigError(
                f"{self.name!r} is not found at the Hugging Face hub ({_reason(error)}); check name, revision and "
                "network, log in with `hf auth login` if it is private or needs consent, or give files that are here"
            ) from None
        return replace(self, revision=found.sha)

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.config, self.split) if part)

    @cached_property
    def _rows(self) -> Any:
        datasets = _package()
        try:
            return datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=True
            )
        except Exception as error:  # of `datasets` and of packages below it
            raise ConfigError(
                f"{self} cannot be opened ({_reason(error)}); correct the name"
            ) from None

    @property
    def shards(self) -> int:
        """Number of shards, mostly files; ConfigError if there is no such configuration or split."""
        return self._rows.num_shards

    def texts(self, shard: int, name: str) -> Iterator[str | BadRecord]:
        """Yield the texts in the column `name` of a shard.

        The packages below repeat requests that fail, for some minutes. Nothing of a shard can be read behind a row that
        they cannot convert: a `BadRecord` stands for all of these rows.

        Raises:
            ConfigError: the hub no longer answers, the shard is damaged, or has no such column.
        """
        number = -1
        try:
            for number, row in enumerate(self._rows.shard(self.shards, shard)):
                check_column(name, list(row), str(self))
                yield text_of_row(row[name], name, f"{self}, shard {shard}, row {number}")
        except ConfigError:
            raise
        except (ValueError, TypeError, NotImplementedError) as error:
            # of Arrow, too: a wrong type, or no UTF-8
            yield BadRecord(
                f"{self}, shard {shard}, cannot be read from row {number + 1} on ({_reason(error)}); correct its "
                "file, or download the files and give those that are right with training.dataset = 'jsonl'"
            )
        except Exception as error:
            raise ConfigError(
                f"{self}, shard {shard}, cannot be read ({_reason(error)}); run the same command again, which "
                "makes the shards that are missing"
            ) from None


def _package() -> Any:
    datasets = package("datasets", "the Hugging Face hub")
    datasets.disable_progress_bars()
    return datasets


def _reason(error: Exception) -> str:
    return first_line(error).rstrip(".")

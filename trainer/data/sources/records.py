"""Documents of files, one after another: lines of JSON, rows of Parquet, whole texts; and of the Hugging Face hub.

A reader yields each document, or a `BadRecord` instead of it: the run stops there, or leaves it out. The package
`datasets` reads these formats too, but it cannot name or skip a bad line, and does not compare the check sums of
Parquet's pages. Data sets of the hub are streamed file by file, by `datasets`. Torch-free.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from trainer.config.errors import ConfigError, MissingFile, first_line
from trainer.data.sources.files import BLOCK, reading
from trainer.data.tokenizers.tokenizer import replace_surrogates
from trainer.runtime.console import logger

COMPRESSED = (".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
STREAMED = (*COMPRESSED, ".parquet")
"""Endings of files that can only be read from their start to their end."""
ReadRow = Callable[[Mapping[str, Any], str], Any]
"""Makes a document of the values of a row by column, and of the place of the row, for messages."""
Where = Callable[[], str]
"""Returns the place of a record, such as "file, line 7". Only messages call it, because it may take long."""


class BadRecord(ConfigError):
    """One document of a data set cannot be used; the others can."""


class Tally:
    """Counts documents that are left out. The log has the 1st, 10th, 100th and so on, with its reason.

    Args:
        kind: The name of the documents, for the log.

    Attributes:
        number: Documents so far.
        first: The reason of the first one.
    """

    def __init__(self, kind: str = "bad records") -> None:
        self._kind = kind
        self.number = 0
        self.first = ""

    def count(self, reason: object) -> None:
        """Count one document. The 1st, 10th, 100th and so on is logged as a warning.

        Args:
            reason: Why it is left out.
        """
        self.number += 1
        self.first = self.first or str(reason)
        if self.number == 10 ** (len(str(self.number)) - 1):
            logger.warning(f"{self._kind} left out so far: {self.number:,}; this one: {reason}")


def lines_of(
    file: str, start: int = 0, stop: int | None = None
) -> Iterator[tuple[bytes, Where]]:
    """Yield the lines of a file that are not blank, each with a function that returns its place.

    Lines keep their line break.

    Args:
        file: The file. It may be compressed if `start` is 0.
        start: First byte in which a line may begin, from 0. A line that begins before is skipped.
        stop: Byte from which on no line begins; None for the end.

    Raises:
        ConfigError: The file cannot be read to its end.
    """
    with reading(file), _opened(file) as stream:
        if start:  # skip the line that begins before
            start = stream.seek(start - 1) + len(stream.readline())
        before = cache(lambda: _lines_before(file, start))
        place = start
        for number, content in enumerate(stream, 1):
            if stop is not None and place >= stop:
                return
            place += len(content)
            if content.strip():
                yield content, lambda number=number: f"{file}, line {before() + number}"


def rows_of(file: str, names: Sequence[str], read: ReadRow) -> Iterator[Any]:
    """Yield the documents of the rows of a Parquet file. A row that is not UTF-8 has b"" in each column.

    Args:
        file: The file.
        names: The columns that are read, if the file has them. If the file has none of them, all columns are read.
        read: Makes a document of a row. It raises a ConfigError if the row lacks a needed column.

    Raises:
        ConfigError: The file cannot be read to its end, or `read` raises.
        MissingFile: The package pyarrow is not installed.
    """
    parquet = package("pyarrow.parquet", file)
    with reading(file), parquet.ParquetFile(file, page_checksum_verification=True) as table:
        there = table.schema_arrow.names
        columns = [name for name in names if name in there] or there
        # Arrow also reads a struct "a" with a field "b", for the column "a.b".
        batches = table.iter_batches(batch_size=1024, columns=columns)
        for number, row in enumerate(chain.from_iterable(map(_values, batches))):
            yield read(row, f"{file}, row {number}")


def _values(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch of Arrow, as dicts by column.

    Arrow refuses a text that is not UTF-8. Such a row has b"" in each column.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [dict.fromkeys(batch.schema.names, b"")]
        half = batch.num_rows // 2
        return _values(batch.slice(0, half)) + _values(batch.slice(half))


def line_of_row(
    names: Sequence[str], row: Mapping[str, Any], where: str
) -> tuple[bytes, Where]:
    """Return a row as a line of JSON, with a function that returns the place of the row.

    The line is b"" if a value has a type that JSON lacks. Fields of null are left out at each level: Arrow writes null
    for a field that only other rows have.

    Args:
        names: The columns. A missing column is left out, as a null is.
        row: The values, by column.
        where: The row, for messages.
    """
    content = b""
    with suppress(TypeError, ValueError):
        fields = _without_nulls({name: row.get(name) for name in names})
        content = json.dumps(fields, ensure_ascii=False).encode()
    return content, lambda: where


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(x) for name, x in value.items() if x is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def text_of_file(file: str) -> str | BadRecord:
    """Return the whole text of a file without a byte order mark, or a BadRecord if it is not UTF-8.

    Args:
        file: The file.

    Raises:
        ConfigError: The file cannot be read.
    """
    with reading(file):
        content = Path(file).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRecord(
            f"{file} is not UTF-8 text (byte {error.start}); convert it, or leave it out of the data set"
        )


def text_of_line(content: bytes, name: str, where: Where) -> str | BadRecord:
    """Return a string field of a line of JSON. Lone surrogates are replaced.

    Args:
        content: The line.
        name: The field.
        where: Returns the place of the line, for the message.

    Returns:
        The text, or a BadRecord if the line is no JSON object with such a string. Null is a BadRecord too.
    """
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        if isinstance(text := json.loads(content)[name], str):
            return replace_surrogates(text)
    return BadRecord(f'{where()}, must be a JSON object with a string field "{name}", in UTF-8')


def text_of_row(name: str, row: Mapping[str, Any], where: str) -> str | BadRecord:
    """Return the text in one column of a row, "" if it is null; or a BadRecord if it is no text.

    Lone surrogates are replaced.

    Args:
        name: The column.
        row: The values, by column.
        where: The row, for the message.

    Raises:
        ConfigError: There is no such column.
    """
    if name not in row:
        columns = ", ".join([*row][:8])
        raise ConfigError(
            f'{where} has no column "{name}" ({columns}); name one with training.dataset_text_field'
        )
    value = row[name]
    if value is None or isinstance(value, str):
        return replace_surrogates(value or "")
    return BadRecord(
        f'{where}, must have a text in UTF-8 in the column "{name}", not {type(value).__name__}; write texts there (a '
        "CSV file does not say which of its columns are texts: use JSON lines or Parquet)"
    )


def package(module: str, reader_of: str) -> Any:
    """Return a module of a package that only some data need. The module is imported now.

    Args:
        module: The module.
        reader_of: The data that need it, for the message.

    Raises:
        MissingFile: The package is not installed.
    """
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
            number += block.count(b"\n")
            place -= len(block)
    return number


# ---- the Hugging Face hub

_ANSWER_SECONDS = 3.0


@dataclass(frozen=True)
class HubData:
    """A split of a data set of the Hugging Face hub. It does not change at one revision.

    Attributes:
        name: The name of the data set.
        config: The configuration; None for the default one.
        split: The split.
        revision: The revision; None for the newest one.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    @classmethod
    def of(cls, path: str) -> "HubData":
        """Return the data set of a path. The hub is not asked.

        Args:
            path: NAME[:CONFIGURATION[:SPLIT]][@REVISION]. The default split is "train".

        Raises:
            ConfigError: The path has another form.
        """
        place, _, revision = path.partition("@")
        name, *details = place.split(":")
        if not name or len(details) > 2:
            raise ConfigError(
                f"{path!r} must be the name of a data set of the Hugging Face hub, with its configuration and split "
                "if they are not the defaults, such as allenai/c4:en:train"
            )
        config, split = (*details, "", "")[:2]
        return cls(name, config or None, split or "train", revision or None)

    @property
    def path(self) -> str:
        """Name, configuration, split and revision, as in `training.dataset_path`."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.name}:{self.config or ''}:{self.split}{revision}"

    def pinned(self) -> "HubData":
        """Return a copy of the data set, whose revision is the hash of the commit. The hub is asked for it.

        Raises:
            ConfigError: The hub does not answer within seconds, or has no such data set.
            MissingFile: The package datasets is not installed.
        """
        _package()
        from huggingface_hub import HfApi

        try:
            info = HfApi().dataset_info(
                self.name, revision=self.revision, timeout=_ANSWER_SECONDS
            )
        except Exception as error:
            # errors of huggingface_hub, and of the package with which it sends requests
            raise ConfigError(
                f"{self.name!r} is not found at the Hugging Face hub ({_reason(error)}); check name, revision and "
                "network, log in with `hf auth login` if it is private or needs consent, or give files that are here"
            ) from None
        return replace(self, revision=info.sha)

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.config, self.split) if part)

    @cached_property
    def _rows(self) -> Any:
        datasets = _package()
        try:
            return datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=True
            )
        except Exception as error:  # any error of `datasets` or of a package that it uses
            raise ConfigError(
                f"{self} cannot be opened ({_reason(error)}); correct the name"
            ) from None

    @property
    def shards(self) -> int:
        """Number of shards, mostly files; ConfigError if there is no such configuration or split."""
        return self._rows.num_shards

    def records(self, shard: int, read: ReadRow) -> Iterator[Any]:
        """Yield the documents of the rows of a shard.

        The packages repeat failed requests for some minutes. After a row that they cannot convert, nothing of the shard
        can be read: one `BadRecord` replaces this row and all later rows.

        Args:
            shard: The number of the shard, from 0.
            read: Makes a document of a row.

        Raises:
            ConfigError: The hub no longer answers, the shard is damaged, or `read` raises.
        """
        number = -1
        try:
            for number, row in enumerate(self._rows.shard(self.shards, shard)):
                yield read(row, f"{self}, shard {shard}, row {number}")
        except ConfigError:
            raise
        except (ValueError, TypeError, NotImplementedError) as error:
            # also errors of Arrow: a wrong type, or no UTF-8
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

"""Compressed lines of JSON, and Parquet. Torch-free.

The package `datasets` reads these formats too, but it cannot name or skip a bad line, and does not compare the check
sums of Parquet's pages.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from trainer.config.errors import ConfigError, MissingFile
from trainer.data.sources.files import BLOCK
from trainer.data.sources.records import Line, Row

COMPRESSED = (".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
STREAMED = (*COMPRESSED, ".parquet")
"""Endings of files that can only be read from their start to their end."""


def records_of(file: str, name: str) -> Iterator[Line | Row]:
    """Yield the lines of a compressed file that are not blank, or the rows of a Parquet file.

    name: of the column with the text.

    Raises:
        ConfigError: the file cannot be read to its end, has no such column, or needs pyarrow.
    """
    try:
        if file.endswith(".parquet"):
            yield from _rows(file, name)
            return
        for number, content in enumerate(_decompressed(file), 1):
            if content.strip():
                yield Line(content, lambda number=number: f"{file}, line {number}")
    except ConfigError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:  # Arrow's are among these
        raise ConfigError(f"{file} cannot be read to its end ({error}); copy it again") from None


def _decompressed(file: str) -> Iterator[bytes]:
    """Yield the lines of a compressed file."""
    if file.endswith(".gz"):
        with gzip.open(file) as stream:
            yield from stream
        return
    pyarrow = _pyarrow("", file)
    with pyarrow.input_stream(file, compression="zstd") as stream:
        rest = b""
        while block := stream.read(BLOCK):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        yield rest


def _rows(file: str, name: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file, of which no other column is read."""
    parquet, number = _pyarrow(".parquet", file), 0
    with parquet.ParquetFile(file, page_checksum_verification=True) as rows:
        columns = rows.schema_arrow.names
        if name not in columns:
            raise ConfigError(
                f'{file} has no column "{name}" ({", ".join(columns[:8])}); name one with training.dataset_text_field'
            )
        for batch in rows.iter_batches(batch_size=1024, columns=[name]):
            for value in _values(batch[0]):
                yield Row(value, f"{file}, row {number}")
                number += 1


def _values(column: Any) -> Iterator[Any]:
    """Yield the values of a column of Arrow's; a text that is no UTF-8 as its bytes, where Arrow would stop."""
    types = _pyarrow(".types", "")
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = types.is_string(column.type) or types.is_large_string(column.type)
    for value in (column.cast("large_binary") if is_text else column).to_pylist():
        try:
            yield value.decode() if is_text and value is not None else value
        except UnicodeDecodeError:
            yield value


def _pyarrow(module: str, file: str) -> Any:
    try:
        return import_module(f"pyarrow{module}")
    except ImportError:
        raise MissingFile(
            f"{file} needs the package pyarrow: pip install pyarrow, or give .jsonl or .jsonl.gz"
        ) from None

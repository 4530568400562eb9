"""Shards of token ids: parts of a data set, which processes tokenize one by one. `token_files.py` has the format.

A part is some files, or a range of bytes of a large file of lines. Its number is that of its shard, so that documents
keep the order that the data set has as text. Bad and empty documents keep their place, without tokens. Torch-free.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.errors import ConfigError, MissingFile
from trainer.data.bad_records import BadRecord, Skipped
from trainer.data.datasets import DATASETS, STREAMED, Reading
from trainer.data.file_index import BLOCK
from trainer.data.json_lines import Line, lines_of
from trainer.data.token_files import CODES, HEADER, MAGIC
from trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Part:
    """Documents of a shard: whole files, or the lines that begin in the bytes [start, stop) of one. size: in bytes."""

    dataset: str
    files: tuple[str, ...]
    size: int
    start: int = 0
    stop: int | None = None


def parts_of(dataset: str, files: Sequence[str], shard_bytes: int) -> list[Part]:
    """Return the parts of a data set, about `shard_bytes` of input each. A compressed file is one part."""
    if not files:
        return [Part(dataset, (), 0)]
    sizes = [os.path.getsize(file) for file in files]
    if dataset == "text":
        groups: list[list[int]] = []
        for i, size in enumerate(sizes):
            if not groups or sum(sizes[j] for j in groups[-1]) + size > shard_bytes:
                groups.append([])
            groups[-1].append(i)
        return [Part(dataset, tuple(files[i] for i in group), sum(sizes[i] for i in group)) for group in groups]
    found = []
    for file, size in zip(files, sizes, strict=True):
        if file.endswith(STREAMED):
            found.append(Part(dataset, (file,), size))
            continue
        edges = [*range(0, size, shard_bytes), size]
        for start, stop in pairwise(edges):
            found.append(Part(dataset, (file,), stop - start, start, stop))
    return found


def write_shard(part: Part, stem: Path, tokenizer: Tokenizer, reading: Reading) -> None:
    """Tokenize a part. Its .idx appears last, when the shard is whole.

    Raises:
        ConfigError: the data cannot be read, or a record is bad and not to be skipped.
    """
    code = 8 if tokenizer.vocab_size <= 1 << 16 else 4  # uint16, or int32: the format has no uint32
    lengths, sums = [], []
    ids_file, sums_file, index = (stem.with_suffix(ending) for ending in (".bin", ".crc", ".idx"))
    with ids_file.open("wb") as stream:
        for text in documents_of(part, reading):
            ids = tokenizer.encode_to_numpy(text, bos=bool(text), eos=bool(text)).astype(CODES[code])
            stream.write(content := ids.tobytes())
            lengths.append(len(ids))
            sums.append(zlib.crc32(content))
        os.fsync(stream.fileno())
    np.array(sums, dtype="<u4").tofile(sums_file)
    unfinished = index.with_suffix(".idx.tmp")
    with unfinished.open("wb") as stream:
        n = len(lengths)
        stream.write(HEADER.pack(MAGIC, 1, code, n, n + 1))
        ends = np.cumsum([0, *lengths], dtype="<i8") * np.dtype(CODES[code]).itemsize
        for array in (np.array(lengths, dtype="<i4"), ends[:-1], np.arange(n + 1, dtype="<i8")):
            array.tofile(stream)
        os.fsync(stream.fileno())
    unfinished.replace(index)


def documents_of(part: Part, reading: Reading) -> Iterator[str]:
    """Yield the texts of a part. A bad one is empty if bad records are skipped.

    Raises:
        ConfigError: the data cannot be read, or a record is bad and not to be skipped.
    """
    if part.dataset != "jsonl":
        source = DATASETS[part.dataset].open(list(part.files), reading)
        yield from (source[i] for i in range(len(source)))
        return
    (file,) = part.files
    skipped = Skipped()
    for line in _lines(part, file, reading.text_field):
        try:
            text = line.text(reading.text_field)
        except BadRecord as error:
            if not reading.skips:
                raise
            skipped.add(error)
            text = ""
        yield text


def _lines(part: Part, file: str, name: str) -> Iterator[Line]:
    if not file.endswith(STREAMED):
        yield from lines_of(file, part.start, part.stop)
        return
    contents = _rows(file, name) if file.endswith(".parquet") else _decompressed(file)
    try:
        for number, content in enumerate(contents, 1):
            if content.strip():
                yield Line(content, lambda number=number: f"{file}, line {number}")
    except (OSError, EOFError, zlib.error) as error:
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


def _rows(file: str, name: str) -> Iterator[bytes]:
    """Yield the rows of a Parquet file as lines of JSON, with the text alone. A null is an empty text."""
    parquet = _pyarrow(".parquet", file)
    with parquet.ParquetFile(file) as rows:
        columns = rows.schema_arrow.names
        if name not in columns:
            raise ConfigError(f'{file} has no column "{name}" ({", ".join(columns[:8])}); name one with --text-field')
        for batch in rows.iter_batches(batch_size=1024, columns=[name]):
            yield from (json.dumps({name: "" if text is None else text}).encode() for text in batch[0].to_pylist())


def _pyarrow(module: str, file: str) -> Any:
    try:
        return import_module(f"pyarrow{module}")
    except ImportError:
        raise MissingFile(
            f"{file} needs the package pyarrow: pip install pyarrow, or give .jsonl or .jsonl.gz"
        ) from None

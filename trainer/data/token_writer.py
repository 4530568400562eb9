"""Shards of token ids: parts of a data set, which processes tokenize one by one. `token_files.py` has the format.

A part is some files, or a range of bytes of a large file of lines. Its number is that of its shard, so that documents
keep the order that the data set has as text. Bad and empty documents keep their place, without tokens. Torch-free.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.bad_records import BadRecord, Skipped
from trainer.data.datasets import DATASETS, Reading
from trainer.data.file_index import ByteRanges
from trainer.data.hub import HubData
from trainer.data.json_lines import lines_of
from trainer.data.streamed import STREAMED, records_of
from trainer.data.token_files import CODES, HEADER, MAGIC, Pair
from trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Part:
    """Documents of a shard: whole files, or the lines that begin in the bytes [start, stop) of one.

    size: in bytes, 0: not known; hub: the data set of the hub, of which `start` is the shard.
    """

    dataset: str
    files: tuple[str, ...]
    size: int
    start: int = 0
    stop: int | None = None
    hub: HubData | None = None


def parts_of(dataset: str, files: Sequence[str], shard_bytes: int) -> list[Part]:
    """Return the parts of a data set, about `shard_bytes` of input each. A compressed file is one part."""
    if not files:
        return [Part(dataset, (), 0)]
    sizes = [os.path.getsize(file) for file in files]
    if dataset == "text":
        groups: list[list[str]] = []
        bytes_of: list[int] = []
        for file, size in zip(files, sizes, strict=True):
            if not groups or bytes_of[-1] + size > shard_bytes:
                groups.append([])
                bytes_of.append(0)
            groups[-1].append(file)
            bytes_of[-1] += size
        return [Part(dataset, tuple(group), size) for group, size in zip(groups, bytes_of, strict=True)]
    found = []
    for file, size in zip(files, sizes, strict=True):
        if file.endswith(STREAMED):
            found.append(Part(dataset, (file,), size))
            continue
        edges = [*range(0, size, shard_bytes), size]
        for start, stop in pairwise(edges):
            found.append(Part(dataset, (file,), stop - start, start, stop))
    return found


def keep_if_whole(stem: Path, entry: Mapping[str, Any] | None) -> bool:
    """Return whether a shard is there and whole. The index of a damaged one is removed, so that it is made again.

    entry: what the manifest says about the shard; None: there is no manifest yet.
    """
    index = stem.with_suffix(".idx")
    if not index.exists():
        return False
    with stem.with_suffix(".bin").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # another process may make it again
        if not _is_whole(stem, entry):
            index.unlink(missing_ok=True)
        return index.exists()


def _is_whole(stem: Path, entry: Mapping[str, Any] | None) -> bool:
    """Return whether the files of a shard fit each other and the manifest; all of them are read."""
    try:
        pair, sums = Pair(str(stem.with_suffix(".idx")), entry), np.fromfile(stem.with_suffix(".crc"), dtype="<u4")
        ids = ByteRanges([pair.ids])
        found = (zlib.crc32(ids.read(0, *pair.span(i))) for i in range(len(pair)))
        return len(sums) == len(pair) and all(map(eq, found, sums.tolist()))
    except (ConfigError, OSError, KeyError, TypeError, ValueError):
        return False


def write_shard(part: Part, stem: Path, tokenizer: Tokenizer, reading: Reading) -> None:
    """Tokenize a part. Its .idx appears last, when the shard is whole; one process at a time writes it.

    Raises:
        ConfigError: the data cannot be read, or a record is bad and not to be skipped.
    """
    code = 8 if tokenizer.vocab_size <= 1 << 16 else 4  # uint16, or int32: the format has no uint32
    index, dtype = stem.with_suffix(".idx"), np.dtype(CODES[code])
    with stem.with_suffix(".bin").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # a process of a run whose parent was killed may still write
        if index.exists():
            return
        stream.truncate(0)
        lengths, sums = [], []
        for text in documents_of(part, reading):
            ids = tokenizer.encode_to_numpy(text, bos=bool(text), eos=bool(text)).astype(dtype)
            stream.write(content := ids.tobytes())
            lengths.append(len(ids))
            sums.append(zlib.crc32(content))
        stream.flush()
        os.fsync(stream.fileno())
        _write(stem.with_suffix(".crc"), np.array(sums, dtype="<u4").tobytes())
        n = len(lengths)
        ends = np.cumsum([0, *lengths], dtype="<i8") * dtype.itemsize
        arrays = (np.array(lengths, dtype="<i4"), ends[:-1], np.arange(n + 1, dtype="<i8"))
        _write(index, HEADER.pack(MAGIC, 1, code, n, n + 1), *(array.tobytes() for array in arrays))


def _write(file: Path, *parts: bytes) -> None:
    """Write a file under a temporary name, and give it its name when it is on the disk."""
    unfinished = file.with_suffix(f"{file.suffix}.tmp")
    with unfinished.open("wb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def documents_of(part: Part, reading: Reading) -> Iterator[str]:
    """Yield the texts of a part. A bad one is empty if bad records are skipped.

    Raises:
        ConfigError: the data cannot be read, or a record is bad and not to be skipped.
    """
    skipped = Skipped()
    for text in _texts(part, reading):
        try:
            yield text()
        except BadRecord as error:
            if not reading.skips:
                raise
            skipped.add(error)
            yield ""


def _texts(part: Part, reading: Reading) -> Iterator[Callable[[], str]]:
    """Yield for each document what reads its text."""
    name = reading.text_field
    if part.hub is not None:
        records = part.hub.records(part.start, name)
    elif part.dataset != "jsonl":
        source = DATASETS[part.dataset].open(list(part.files), reading)
        yield from (partial(source.__getitem__, i) for i in range(len(source)))
        return
    elif part.files[0].endswith(STREAMED):
        records = records_of(part.files[0], name)
    else:
        records = lines_of(part.files[0], part.start, part.stop)
    yield from (partial(record.text, name) for record in records)

"""Token ids on disk: pairs of Megatron-LM's format, as this program writes them. Torch-free.

    tokens/
      shard-00000.bin       ids, one document after another
      shard-00000.idx       Megatron's index: data type, length and place of every document
      shard-00000.crc       uint32, the check sum (zlib.crc32) of each document
      shard-00000.answers   of conversations only: a byte for each id, 1 if the token is part of an answer
      tokens.json           the tokenizer, and the number of documents and the check sums of each shard

The last three are of this program only. The check sum is that of the ids, and behind them the bytes of the answers.

An .idx is, little-endian: b"MMIDIDX\\0\\0", version 1 (u64), data type (u8), sequences n (u64), document ends m (u64),
lengths (n int32), places in the .bin in bytes (n int64), the first sequence of each document and the end (m int64).
"""

import os
import resource
import struct
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.sources.files import reading

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
MANIFEST, UNFINISHED = "tokens.json", "unfinished.json"
_OTHER_FILES = 512  # of a process that trains: connections, libraries, devices
_MOST_FILES = 1 << 16
_CHECKED = 1 << 20  # places of an index that are checked at once


def index_bytes(code: int, lengths: Sequence[int] | np.ndarray) -> tuple[bytes, ...]:
    """Return the content of an .idx in parts; each document is a sequence."""
    n = len(lengths)
    ends = np.cumsum([0, *lengths], dtype="<i8") * np.dtype(CODES[code]).itemsize
    arrays = (np.asarray(lengths, dtype="<i4"), ends[:-1], np.arange(n + 1, dtype="<i8"))
    return HEADER.pack(MAGIC, 1, code, n, n + 1), *(array.tobytes() for array in arrays)


class Pair(NamedTuple):
    """An index and its ids. crc, answers: further files of this program; None if absent."""

    idx: str
    ids: str
    dtype: str
    sequences: int
    documents: int
    crc: str | None = None
    answers: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an id."""
        return np.dtype(self.dtype).itemsize

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The mapped index: lengths and places of sequences, and the first sequence of each document and the end."""
        n, m = self.sequences, self.documents + 1
        lengths, places, firsts = (
            np.memmap(self.idx, dtype, "r", HEADER.size + offset, (count,)) if count else np.empty(0, dtype)
            for dtype, offset, count in (("<i4", 0, n), ("<i8", 4 * n, n), ("<i8", 12 * n, m))
        )
        return lengths, places, firsts


def open_pair(idx: str) -> Pair:
    """Return a pair of Megatron's format; ConfigError if the index is damaged, or does not fit the ids."""
    if not idx.endswith(".idx"):
        raise ConfigError(
            f"{idx} is no index of token ids; name an .idx file beside its .bin (docs/data.md makes one for other ids)"
        )
    ids = str(Path(idx).with_suffix(".bin"))
    with reading(idx), open(idx, "rb") as stream:
        size, ids_size = os.path.getsize(idx), os.path.getsize(ids)
        header = stream.read(HEADER.size)
    magic, version, code, n, m = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    if magic != MAGIC or version != 1 or code not in CODES or not m or size != HEADER.size + 12 * n + 8 * m:
        raise ConfigError(f"{idx} is no whole index of token ids (Megatron's format, version 1); copy it again")
    pair = Pair(idx, ids, CODES[code], n, m - 1)
    lengths, places, _ = pair.arrays
    end = int(places[-1]) + int(lengths[-1]) * pair.itemsize if n else 0
    if end != ids_size:
        raise ConfigError(
            f"{ids} has {ids_size} bytes and its index {Path(idx).name} says {end}: it is damaged or of another index; "
            "copy both again"
        )
    return pair


def checked_pair(idx: str) -> Pair:
    """Return a pair of another program; ConfigError if its sequences do not follow each other in the .bin."""
    pair = open_pair(idx)
    lengths, places, firsts = pair.arrays
    whole = firsts[0] == 0 and firsts[-1] == len(lengths) and (not len(places) or places[0] == 0)
    for start in range(0, len(firsts), _CHECKED):
        whole = whole and bool((np.diff(firsts[start : start + _CHECKED + 1]) >= 0).all())
    for start in range(0, len(lengths), _CHECKED):
        sizes = lengths[start : start + _CHECKED].astype(np.int64) * pair.itemsize
        steps = np.diff(places[start : start + _CHECKED + 1])
        whole = whole and bool((sizes >= 0).all()) and bool((steps == sizes[: len(steps)]).all())
    if not whole:
        raise ConfigError(
            f"{idx} is damaged: its sequences do not follow each other in {Path(pair.ids).name}, or its documents in "
            "them; copy both again"
        )
    return pair


class ByteRanges:
    """Reads ranges of bytes of files, of which as many stay open as the process may have.

    Files are not mapped: a mapped file that shrinks ends the process without a word (SIGBUS).
    """

    def __init__(self) -> None:
        self._opened = lru_cache(maxsize=_open_files_allowed())(partial(open, mode="rb", buffering=0))

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file; ConfigError if it cannot be read, or is shorter than that."""
        parts, here = [], start
        with reading(file):
            opened = self._opened(file)
            while here < stop and (part := os.pread(opened.fileno(), min(stop - here, 1 << 30), here)):
                parts.append(part)
                here += len(part)
        if here < stop:
            raise ConfigError(
                f"{file} is shorter than when the run began to read it (byte {stop} is missing); restore it"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _open_files_allowed() -> int:
    """Raise this process's limit of open files as far as the system allows, and return how many data may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft := wanted, hard))
    return max(min(soft if soft != resource.RLIM_INFINITY else wanted, wanted) - _OTHER_FILES, 64)

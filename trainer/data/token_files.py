"""Documents as token ids in files: Megatron's pairs, as `lct tokenize` writes them, and flat files. Torch-free.

    tokens/
      shard-00000.bin      ids, one document after another
      shard-00000.idx      Megatron's index: data type, length and place of every document
      shard-00000.crc      uint32, the check sum (zlib.crc32) of each document; of `lct tokenize` only
      tokens.json          the tokenizer, and the number of documents and the check sums of each shard; likewise

An .idx is, little-endian: b"MMIDIDX\\0\\0", version 1 (u64), data type (u8), sequences n (u64), document ends m (u64),
lengths (n int32), places in the .bin in bytes (n int64), the first sequence of each document and the end (m int64).

A file of another name is flat, as those of OLMo: ids without a header (or a real .npy file), of the type that
training.token_dtype names, by default uint16 if the vocabulary has at most 65,536 tokens, else uint32. A document ends
behind each end-of-text id.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.bad_records import BadRecord
from trainer.data.file_index import BLOCK, ByteRanges, Input, allow_open_files, contents, indexed, unreadable
from trainer.data.tokenizer import open_tokenizer, tokenizer_hash, vocab_size_of

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
MANIFEST, UNFINISHED = "tokens.json", "unfinished.json"
_SAMPLE = 1 << 16  # bytes at the start of a flat file that show its type
_CHECKED = 1 << 20  # places of an index that are checked at once
_MAPS = 4  # of a pair: three arrays of the index, and the check sums


class TokenFile(Protocol):
    """The documents of one file.

    ids: the file with the ids; dtype: of an id; content: tells what is in the files, None: their bytes must be read.
    """

    ids: str
    dtype: np.dtype
    content: object | None

    def __len__(self) -> int: ...

    def span(self, i: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of document i."""

    def is_whole(self, i: int, content: bytes) -> bool:
        """Return whether these bytes have the check sum of document i, if that is known."""


class Pair:
    """A Megatron pair. entry: what `lct tokenize` says about it; None: another program made it.

    Raises:
        ConfigError: the index is damaged, or does not fit the ids.
    """

    def __init__(self, idx: str, entry: Mapping[str, Any] | None) -> None:
        self.ids = str(Path(idx).with_suffix(".bin"))
        try:
            size, ids_size = os.path.getsize(idx), os.path.getsize(self.ids)
            with open(idx, "rb") as stream:
                header = stream.read(HEADER.size)
        except OSError as error:
            raise unreadable(error.filename or idx, error) from None
        magic, version, code, n, m = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        if magic != MAGIC or version != 1 or code not in CODES or not m or size != HEADER.size + 12 * n + 8 * m:
            raise ConfigError(f"{idx} is no whole index of token ids (Megatron's format, version 1); copy it again")
        self.dtype = np.dtype(CODES[code])
        if entry is not None:
            self._check_index(idx, entry)
        self._lengths, self._places, self._firsts = (
            np.memmap(idx, dtype, "r", HEADER.size + offset, (count,)) if count else np.empty(0, dtype)
            for dtype, offset, count in (("<i4", 0, n), ("<i8", 4 * n, n), ("<i8", 12 * n, m))
        )
        end = int(self._places[-1]) + int(self._lengths[-1]) * self.dtype.itemsize if n else 0
        if end != ids_size:
            raise ConfigError(
                f"{self.ids} has {ids_size} bytes and its index {Path(idx).name} says {end}: it is damaged or of "
                "another index; copy both again"
            )
        if entry is None:
            self._check_arrays(idx)
        # The check sums in the .crc are those of all ids, which are compared when they are read.
        self.content = None if entry is None else (ids_size, entry["idx"], entry["crc"])
        known = entry is not None and m > 1
        self._crc = np.memmap(Path(idx).with_suffix(".crc"), "<u4", "r", shape=(m - 1,)) if known else None

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def span(self, i: int) -> tuple[int, int]:
        first, last = int(self._firsts[i]), int(self._firsts[i + 1]) - 1
        if last < first:
            return 0, 0
        return int(self._places[first]), int(self._places[last]) + int(self._lengths[last]) * self.dtype.itemsize

    def is_whole(self, i: int, content: bytes) -> bool:
        return self._crc is None or zlib.crc32(content) == self._crc[i]

    def _check_arrays(self, idx: str) -> None:
        """Check that the sequences follow each other in the .bin, and the documents in the sequences."""
        lengths, places, firsts = self._lengths, self._places, self._firsts
        whole = firsts[0] == 0 and firsts[-1] == len(lengths) and (not len(places) or places[0] == 0)
        for start in range(0, len(firsts), _CHECKED):
            whole = whole and bool((np.diff(firsts[start : start + _CHECKED + 1]) >= 0).all())
        for start in range(0, len(lengths), _CHECKED):
            sizes = lengths[start : start + _CHECKED].astype(np.int64) * self.dtype.itemsize
            steps = np.diff(places[start : start + _CHECKED + 1])
            whole = whole and bool((sizes >= 0).all()) and bool((steps == sizes[: len(steps)]).all())
        if not whole:
            raise ConfigError(
                f"{idx} is damaged: its sequences do not follow each other in {Path(self.ids).name}, or its documents "
                "in them; copy both again"
            )

    @staticmethod
    def _check_index(idx: str, entry: Mapping[str, Any]) -> None:
        for ending in ("idx", "crc"):
            file = Path(idx).with_suffix(f".{ending}")
            try:
                found = zlib.crc32(file.read_bytes())
            except OSError as error:
                raise unreadable(str(file), error) from None
            if found != entry[ending]:
                raise ConfigError(f"{file} is damaged: its check sum is not that of {MANIFEST}; copy it again")


class Flat:
    """A file of ids without an index, cut behind each end-of-text id `eos`.

    Raises:
        ConfigError: its size is not that of whole ids.
    """

    def __init__(self, file: str, vocab_size: int, eos: int, token_dtype: str) -> None:
        self.ids, self._start, self.dtype = file, *_flat_layout(file, vocab_size, token_dtype)
        kind = f"documents {self.dtype.str} {eos} from {self._start}"
        index = indexed(file, kind, partial(_flat_places, start=self._start, dtype=self.dtype, eos=eos))
        self._places, self._size = index.places, index.stamp.size
        self.content = (index.content, self.dtype.str)  # the same bytes may be other ids

    def __len__(self) -> int:
        return len(self._places)

    def span(self, i: int) -> tuple[int, int]:
        return int(self._places[i]), int(self._places[i + 1]) if i + 1 < len(self._places) else self._size

    def is_whole(self, i: int, content: bytes) -> bool:
        return True


def _flat_layout(file: str, vocab_size: int, token_dtype: str) -> tuple[int, np.dtype]:
    """Return the place of the first id, in bytes, and the data type."""
    by_vocabulary = "uint16" if vocab_size <= 1 << 16 else "uint32"
    start, dtype = 0, np.dtype(by_vocabulary if token_dtype == "auto" else token_dtype).newbyteorder("<")
    array = None
    try:
        with open(file, "rb") as stream:
            sample = stream.read(_SAMPLE)
        if sample[:6] == b"\x93NUMPY":
            array = np.load(file, mmap_mode="r")
        size = os.path.getsize(file)
    except OSError as error:
        raise unreadable(file, error) from None
    except ValueError:
        raise ConfigError(f"{file} is a damaged .npy file; copy it again") from None
    if array is not None:
        start, dtype = array.offset, array.dtype
        if array.ndim != 1 or dtype.kind not in "ui":
            raise ConfigError(f"{file} has {array.ndim} dimensions of {dtype}; token ids are one of integers")
    if (size - start) % dtype.itemsize:
        raise ConfigError(
            f"{file} has {size} bytes, which are no whole number of {dtype} ids (a vocabulary of {vocab_size:,}); copy "
            "it again, name the tokenizer that made it in model.tokenizer_path, or their type in training.token_dtype"
        )
    if array is None and token_dtype == "auto":
        _check_type(file, sample, vocab_size)
    return start, dtype


def _check_type(file: str, sample: bytes, vocab_size: int) -> None:
    """Check that the first bytes of a flat file look like ids of the type that the vocabulary has."""
    halves = np.frombuffer(sample[: len(sample) // 4 * 4], dtype="<u2")
    are_long = len(halves) > 0 and halves.any() and not halves[1::2].any()
    if vocab_size <= 1 << 16 and are_long:
        raise ConfigError(
            f"{file} seems to have ids of uint32: every second number of uint16 is 0; set training.token_dtype = "
            "'uint32', or 'uint16' if that is its type"
        )
    if vocab_size > 1 << 16 and len(halves) and (halves.view("<u4") >= vocab_size).all():
        raise ConfigError(
            f"{file} seems to have ids of uint16: as uint32 all are beyond the vocabulary of {vocab_size:,}; set "
            "training.token_dtype = 'uint16', or 'uint32' if that is its type"
        )


def _flat_places(stream: Input, start: int, dtype: np.dtype, eos: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield where documents begin, in bytes; see `Scan`."""
    begins = True
    stream.read(start)
    while len(ids := np.frombuffer(stream.read(BLOCK), dtype=dtype)):
        starts = np.flatnonzero(np.concatenate([[begins], ids[:-1] == eos]))
        begins = ids[-1] == eos
        yield start + starts * dtype.itemsize, 0
        start += ids.nbytes


@dataclass(frozen=True)
class TokenFiles:
    """Documents by number: arrays of token ids, which begin and end as in the file. vocab_size: of the tokenizer."""

    parts: Sequence[TokenFile]
    vocab_size: int
    ends: np.ndarray = field(init=False)
    """(files,) number of documents up to the end of each file."""
    reads: ByteRanges = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", np.cumsum([len(part) for part in self.parts], dtype=np.int64))
        object.__setattr__(self, "reads", ByteRanges([part.ids for part in self.parts]))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, i: int) -> np.ndarray:
        number = int(np.searchsorted(self.ends, i, side="right"))
        part = self.parts[number]
        i -= int(self.ends[number]) - len(part)
        content = self.reads.read(number, *part.span(i))
        if not part.is_whole(i, content):
            raise BadRecord(
                f"{part.ids}, document {i}, is damaged: its check sum is wrong; copy the file again, or make it again "
                "with `lct tokenize`"
            )
        ids = np.frombuffer(content, dtype=part.dtype)
        if len(ids) and (ids.max() >= self.vocab_size or ids.min() < 0):
            wrong = int(ids.max() if ids.max() >= self.vocab_size else ids.min())
            raise BadRecord(
                f"{part.ids}, document {i}, has the token id {wrong}, and the tokenizer has {self.vocab_size:,} "
                "(0 and up); name the tokenizer that made the file in model.tokenizer_path"
            )
        return ids

    def digests(self, documents: int) -> list[object] | None:
        """Return what tells the content of each file of the first documents; None: these end within a file."""
        files = int(np.searchsorted(self.ends, documents)) + 1
        if self.ends[files - 1] != documents:
            return None
        parts = self.parts[:files]
        pairs = [part.ids for part in parts if part.content is None]
        indices = [str(Path(ids).with_suffix(".idx")) for ids in pairs]
        read = iter(zip(contents(pairs), contents(indices), strict=True))
        return [next(read) if part.content is None else part.content for part in parts]


def open_token_files(files: Sequence[str], tokenizer_file: str | None, token_dtype: str = "auto") -> TokenFiles:
    """Return the documents of .idx and flat files. token_dtype: of flat ones, see `Reading`.

    Raises:
        ConfigError: a file is damaged, or of another tokenizer.
    """
    allow_open_files(_MAPS * len(files))
    vocab_size, manifests, eos = vocab_size_of(tokenizer_file), {}, _end_of_text(files, tokenizer_file)
    parts = [
        _pair(file, manifests, tokenizer_file) if file.endswith(".idx") else Flat(file, vocab_size, eos, token_dtype)
        for file in files
    ]
    return TokenFiles(parts, vocab_size)


def token_documents(files: Sequence[str], tokenizer_file: str | None, token_dtype: str = "auto") -> Iterator[str]:
    """Yield something for each document, of large flat files without an index: of these only the start is read.

    Raises:
        ConfigError: see `open_token_files`.
    """
    manifests, eos = {}, _end_of_text(files, tokenizer_file)
    for file in files:
        if file.endswith(".idx"):
            yield from repeat("", len(_pair(file, manifests, tokenizer_file)))
            continue
        start, dtype = _flat_layout(file, vocab_size_of(tokenizer_file), token_dtype)
        with open(file, "rb") as stream:
            for places, _ in _flat_places(stream, start, dtype, eos):
                yield from repeat("", len(places))


def _end_of_text(files: Sequence[str], tokenizer_file: str | None) -> int:
    """Return the id that ends documents of flat files; -1: there are no such files, or no such id."""
    eos = None if all(file.endswith(".idx") for file in files) else open_tokenizer(tokenizer_file).eos_id
    return -1 if eos is None else eos


def _pair(idx: str, manifests: dict[Path, Mapping[str, Any]], tokenizer_file: str | None) -> Pair:
    """Return a pair, with the check sums that the manifest of its folder has. manifests: those read so far."""
    folder = Path(idx).parent
    if folder not in manifests:
        manifests[folder] = _shards(folder, tokenizer_file)
    entry = manifests[folder].get(Path(idx).stem)
    if entry is None and Path(idx).with_suffix(".crc").exists():
        raise ConfigError(
            f"{idx} is of `lct tokenize`, and no {MANIFEST} beside it names it; copy the whole folder again, or "
            "make it again with another --output"
        )
    return Pair(idx, entry)


def _shards(folder: Path, tokenizer_file: str | None) -> Mapping[str, Any]:
    """Return what `lct tokenize` says about its shards in a folder; empty: another program made them.

    Raises:
        ConfigError: the folder is not finished or not whole, or of another tokenizer.
    """
    if (folder / UNFINISHED).exists():
        raise ConfigError(
            f"{folder} is not finished; run the same `lct tokenize` again, which goes on where it stopped"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        shards, made_by = manifest["shards"], manifest["tokenizer"]
        _ = [made_by[key] for key in ("hash", "name", "vocab_size")]
        _ = [int(entry[key]) for entry in shards.values() for key in ("idx", "crc")]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"{folder / MANIFEST} is damaged; copy it again, or run `lct tokenize` with another --output"
        ) from None
    lost = next((name for name in shards if not (folder / f"{name}.idx").exists()), None)
    if lost is not None:
        raise ConfigError(f"{folder} lacks {lost}.idx, which its {MANIFEST} names; copy the folder again")
    if made_by["hash"] != tokenizer_hash(tokenizer_file):
        raise ConfigError(
            f"{folder} has the token ids of another tokenizer ({made_by['name']}, {made_by['vocab_size']:,} tokens); "
            "name that one in model.tokenizer_path, or run `lct tokenize` with this one"
        )
    return shards

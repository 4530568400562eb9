r"""Token ids on disk: pairs of Megatron-LM's format, as this program writes them, and their documents. Torch-free.

    tokens/
      shard-00000.bin       ids, one document after another
      shard-00000.idx       Megatron's index: data type, length and place of every document
      shard-00000.crc       uint32, the check sum (zlib.crc32) of each document
      shard-00000.answers   for conversations: a byte for each id, 1 if the token is part of an answer
      shard-00000.notes     for conversations: how many answers there are, and how many lack something, as JSON
      tokens.json           the tokenizer, and the number of documents and the check sums of each shard

The last four belong to this program. The check sum covers the ids, and after them the bytes of the answers.

An .idx is little-endian, in this order:

    b"MMIDIDX\0\0", version 1 (u64), data type (u8), sequences n (u64), document ends m (u64)
    lengths (n int32)
    places in the .bin in bytes (n int64)
    the first sequence of each document, and the end (m int64)
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.sources.files import reading
from trainer.data.sources.records import BadRecord, Tally
from trainer.data.token_files.byte_ranges import ByteRanges
from trainer.data.tokenizers.chat_notes import sum_of
from trainer.data.tokenizers.tokenizer import NOTHING, Encoded

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
MANIFEST, UNFINISHED = "tokens.json", "unfinished.json"
NOTES = ".notes"
_CHECKED = 1 << 20  # places of an index in one check


def index_bytes(code: int, lengths: Sequence[int] | np.ndarray) -> tuple[bytes, ...]:
    """Return the content of an .idx in parts, to be written one after another. Each document is a sequence.

    Args:
        code: Megatron's code of the data type.
        lengths: Tokens of each document.
    """
    n = len(lengths)
    ends = np.cumsum([0, *lengths], dtype="<i8") * np.dtype(CODES[code]).itemsize
    arrays = (np.asarray(lengths, dtype="<i4"), ends[:-1], np.arange(n + 1, dtype="<i8"))
    return HEADER.pack(MAGIC, 1, code, n, n + 1), *(array.tobytes() for array in arrays)


class Pair(NamedTuple):
    """An index and its ids.

    Attributes:
        idx: The file of the index.
        ids: The file of the ids.
        dtype: The data type of an id, such as "<u2".
        sequences: Number of sequences.
        documents: Number of documents.
        crc: The file of check sums of this program, None if absent.
        answers: The file of answers of this program, None if absent.
    """

    idx: str
    ids: str
    dtype: str
    sequences: int
    documents: int
    crc: str | None = None
    answers: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a token id."""
        return np.dtype(self.dtype).itemsize

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The mapped index: tokens of each sequence, first byte of each sequence, first sequence of each document.

        The shapes are (sequences,) int32, (sequences,) int64 and (documents + 1,) int64. The last array ends with the
        number of sequences.
        """
        n = self.sequences
        return tuple(
            np.memmap(self.idx, dtype, "r", HEADER.size + offset, (count,))
            if count
            else np.empty(0, dtype)
            for dtype, offset, count in (
                ("<i4", 0, n),
                ("<i8", 4 * n, n),
                ("<i8", 12 * n, self.documents + 1),
            )
        )


def open_pair(idx: str) -> Pair:
    """Return a pair of Megatron's format, after a check of header and file sizes. `crc` and `answers` are None.

    Args:
        idx: The file of the index. The .bin lies next to it.

    Raises:
        ConfigError: The index is damaged, cannot be read, or does not fit the ids.
    """
    if not idx.endswith(".idx"):
        raise ConfigError(
            f"{idx} is no index of token ids; name an .idx file next to its .bin (docs/data.md makes one for other ids)"
        )
    ids = str(Path(idx).with_suffix(".bin"))
    with reading(idx), open(idx, "rb") as stream:
        size = os.path.getsize(idx)
        ids_size = os.path.getsize(ids)
        header = stream.read(HEADER.size)
    magic, version, code, n, m = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    if (
        magic != MAGIC
        or version != 1
        or code not in CODES
        or not m
        or size != HEADER.size + 12 * n + 8 * m
    ):
        raise ConfigError(
            f"{idx} is no whole index of token ids (Megatron's format, version 1); copy it again"
        )
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
    """Return a pair of another program, after a check of its whole index.

    Args:
        idx: The file of the index.

    Raises:
        ConfigError: As `open_pair`; or its sequences do not follow each other in the .bin.
    """
    pair = open_pair(idx)
    lengths, places, firsts = pair.arrays
    whole = (
        firsts[0] == 0 and firsts[-1] == len(lengths) and (not len(places) or places[0] == 0)
    )
    for start in range(0, len(firsts), _CHECKED):
        whole &= (np.diff(firsts[start : start + _CHECKED + 1]) >= 0).all()
    for start in range(0, len(lengths), _CHECKED):
        sizes = lengths[start : start + _CHECKED].astype(np.int64) * pair.itemsize
        steps = np.diff(places[start : start + _CHECKED + 1])
        whole &= (sizes >= 0).all() and (steps == sizes[: len(steps)]).all()
    if not whole:
        raise ConfigError(
            f"{idx} is damaged: its sequences do not follow each other in {Path(pair.ids).name}, or its documents in "
            "them; copy both again"
        )
    return pair


def catalog_name(content: bytes) -> str:
    """Return the name of a catalog's file, which is a hash of its content.

    Args:
        content: The content.
    """
    return f"{sha256(content).hexdigest()[:32]}.json"


class Catalog(NamedTuple):
    """Everything that a rank must know about a data set. One process of each node finds it out for the others.

    Attributes:
        pairs: The token files.
        made_by: Hashes of the settings that decide the tokens of documents, by name.
        content: (number of documents, hash of their content) at the end of each file.
        vocab_size: Size of the tokenizer's vocabulary.
        remedy: What to do about a damaged document.
    """

    pairs: Sequence[Pair]
    made_by: Mapping[str, int]
    content: Sequence[tuple[int, int]]
    vocab_size: int
    remedy: str

    @classmethod
    def read(cls, file: str | Path) -> "Catalog":
        """Return the catalog in a file. The name of the file must be the hash of its content.

        Args:
            file: The file.

        Raises:
            ConfigError: The file cannot be read, or its content does not fit its name.
        """
        with reading(str(file)):
            content = Path(file).read_bytes()
        if Path(file).name != catalog_name(content):
            raise ConfigError(
                f"{file} was damaged since this job began; start the job again, which makes it again"
            )
        pairs, *others = json.loads(content)
        return cls([Pair(*pair) for pair in pairs], *others)


class TokenFiles:
    """Documents by number.

    Args:
        catalog: The catalog of the data set.
        skips: Whether a damaged document, or one with a wrong id, counts as a document without text.
    """

    def __init__(self, catalog: Catalog, *, skips: bool = False) -> None:
        self.made_by = catalog.made_by
        self._catalog = catalog
        self._skips = skips
        self._ends = np.cumsum([pair.documents for pair in catalog.pairs], dtype=np.int64)
        self._reads = ByteRanges()
        self._skipped = Tally()
        self._bad = set[int]()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, i: int) -> Encoded:
        """Return a document. If `skips`, a bad document is counted once and is empty.

        Args:
            i: Its number, from 0.

        Raises:
            BadRecord: `skips` is False, and the document is damaged or has an id that the tokenizer lacks.
            ConfigError: A file cannot be read.
        """
        if i in self._bad:  # found in an earlier epoch
            return NOTHING
        try:
            return self._document(i)
        except BadRecord as error:
            if not self._skips:
                raise
            self._skipped.count(error)
        self._bad.add(i)
        return NOTHING

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, (n,) int64, from the indices alone."""
        documents = [np.empty(0, dtype=np.int64)]
        for pair in self._catalog.pairs:
            lengths, _, firsts = pair.arrays
            documents.append(
                np.diff(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[firsts])
            )
        return np.concatenate(documents)

    def answers(self) -> int | None:
        """Return the number of learned tokens of all conversations; None for texts, where all tokens are learned.

        The files of answers are read whole.
        """
        files = [pair.answers for pair in self._catalog.pairs if pair.answers is not None]
        if not files:
            return None
        return sum(int(np.count_nonzero(np.fromfile(file, dtype=bool))) for file in files)

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return the sum of the notes of all shards, see `sum_of`; empty if no shard has readable notes."""
        notes = []
        for pair in self._catalog.pairs:
            with suppress(OSError, ValueError):
                notes.append(json.loads(Path(pair.idx).with_suffix(NOTES).read_text("utf-8")))
        return sum_of(notes)

    def fingerprint(self, documents: int) -> int:
        """Return a 63-bit hash of the content of the first documents; 0 if they end within a file.

        Args:
            documents: How many documents, counted from the first one.
        """
        return next((content for end, content in self._catalog.content if end == documents), 0)

    def _document(self, i: int) -> Encoded:
        number = int(np.searchsorted(self._ends, i, side="right"))
        pair = self._catalog.pairs[number]
        i -= int(self._ends[number]) - pair.documents
        start, stop = self._span(pair, i)
        content = self._reads.read(pair.ids, start, stop)
        answers = b""
        if pair.answers is not None:
            answers = self._reads.read(
                pair.answers, start // pair.itemsize, stop // pair.itemsize
            )
        if pair.crc is not None:
            known = int.from_bytes(self._reads.read(pair.crc, 4 * i, 4 * i + 4), "little")
            if zlib.crc32(answers, zlib.crc32(content)) != known:
                raise BadRecord(
                    f"{pair.ids}, document {i}, is damaged: its check sum is wrong; {self._catalog.remedy}"
                )
        document = Encoded(
            np.frombuffer(content, dtype=pair.dtype),
            None if pair.answers is None else np.frombuffer(answers, dtype=bool),
        )
        if problem := document.wrong_id(self._catalog.vocab_size):
            raise BadRecord(
                f"{pair.ids}, document {i}, {problem}; name the tokenizer that made the file in model.tokenizer_path"
            )
        return document

    def _span(self, pair: Pair, i: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of document i of a pair in its .bin; (0, 0) if the document is empty."""

        def numbers(place: int, dtype: str, count: int = 1) -> list[int]:
            start = HEADER.size + place
            stop = start + count * np.dtype(dtype).itemsize
            return np.frombuffer(self._reads.read(pair.idx, start, stop), dtype=dtype).tolist()

        n = pair.sequences
        first, end = numbers(12 * n + 8 * i, "<i8", 2)
        if end == first:
            return 0, 0
        (start,) = numbers(4 * n + 8 * first, "<i8")
        (last,) = numbers(4 * n + 8 * (end - 1), "<i8")
        (length,) = numbers(4 * (end - 1), "<i4")
        return start, last + length * pair.itemsize


class Pairs(TokenFiles):
    """Token files in which documents 2 i and 2 i + 1 are the sides of pair i."""

    def __len__(self) -> int:
        return super().__len__() // 2

    def __getitem__(self, i: int) -> Encoded:
        """Return both sides of a pair in one `Encoded` with two lengths; `NOTHING` if one of the sides is empty.

        Args:
            i: The number of the pair, from 0.

        Raises:
            BadRecord, ConfigError: As `TokenFiles`.
        """
        sides = [TokenFiles.__getitem__(self, 2 * i + side) for side in range(2)]
        if not all(len(side.ids) for side in sides):
            return NOTHING
        ids, answers = (np.concatenate(column) for column in list(zip(*sides, strict=True))[:2])
        return Encoded(ids, answers, tuple(len(side.ids) for side in sides))

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each pair, (n,) int64."""
        lengths = super().lengths()
        return lengths[::2] + lengths[1::2]

    def fingerprint(self, pairs: int) -> int:
        """Return a 63-bit hash of the content of the first pairs; 0 if they end within a file.

        Args:
            pairs: Number of pairs.
        """
        return super().fingerprint(2 * pairs)

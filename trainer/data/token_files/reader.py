"""Documents of token files by number, as a catalog lists them. Torch-free."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.data.sources.records import BadRecord, Tally
from trainer.data.token_files.format import HEADER, ByteRanges, Pair
from trainer.data.tokenizers.encoders import NOTHING, Encoded


class Catalog(NamedTuple):
    """All that a rank must know about a data set: one process of each node finds it out for the others.

    made_by: hashes of the settings that decide which tokens the documents become, by name; content: pairs of (number of
    documents, hash of the content of these), at the end of each file; vocab_size: of the tokenizer; remedy: what to do
    about a damaged document.
    """

    pairs: Sequence[Pair]
    made_by: Mapping[str, int]
    content: Sequence[tuple[int, int]]
    vocab_size: int
    remedy: str

    @classmethod
    def read(cls, file: str | Path) -> "Catalog":
        """Return the catalog in a file."""
        pairs, *others = json.loads(Path(file).read_text(encoding="utf-8"))
        return cls([Pair(*pair) for pair in pairs], *others)


class TokenFiles:
    """Documents by number. skips: one that is damaged, or has a wrong id, is as one without text."""

    def __init__(self, catalog: Catalog, *, skips: bool = False) -> None:
        self.made_by, self._catalog, self._skips = catalog.made_by, catalog, skips
        self._ends = np.cumsum([pair.documents for pair in catalog.pairs], dtype=np.int64)
        self._reads, self._skipped, self._bad = ByteRanges(), Tally(), set[int]()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, i: int) -> Encoded:
        """Return document i.

        Raises:
            BadRecord: it is damaged, or has an id that the tokenizer does not have.
            ConfigError: a file cannot be read.
        """
        if i in self._bad:  # every epoch meets it again
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
        found = [np.empty(0, dtype=np.int64)]
        for pair in self._catalog.pairs:
            lengths, _, firsts = pair.arrays
            found.append(np.diff(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[firsts]))
        return np.concatenate(found)

    def answers(self) -> int | None:
        """Return the number of tokens in answers of conversations; None for texts, of which all tokens are learned."""
        files = [pair.answers for pair in self._catalog.pairs if pair.answers is not None]
        if not files:
            return None
        return sum(int(np.count_nonzero(np.fromfile(file, dtype=bool))) for file in files)

    def fingerprint(self, documents: int) -> int:
        """Return a 63-bit hash of the content of the first documents; 0: they end within a file."""
        return next((content for end, content in self._catalog.content if end == documents), 0)

    def _document(self, i: int) -> Encoded:
        number = int(np.searchsorted(self._ends, i, side="right"))
        pair = self._catalog.pairs[number]
        i -= int(self._ends[number]) - pair.documents
        start, stop = self._span(pair, i)
        content, answers = self._reads.read(pair.ids, start, stop), b""
        if pair.answers is not None:
            answers = self._reads.read(pair.answers, start // pair.itemsize, stop // pair.itemsize)
        if pair.crc is not None:
            (known,) = np.frombuffer(self._reads.read(pair.crc, 4 * i, 4 * i + 4), dtype="<u4").tolist()
            if zlib.crc32(answers, zlib.crc32(content)) != known:
                raise BadRecord(f"{pair.ids}, document {i}, is damaged: its check sum is wrong; {self._catalog.remedy}")
        ids, vocab_size = np.frombuffer(content, dtype=pair.dtype), self._catalog.vocab_size
        if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
            wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
            raise BadRecord(
                f"{pair.ids}, document {i}, has the token id {wrong}, and the tokenizer has {vocab_size:,} (0 and up); "
                "name the tokenizer that made the file in model.tokenizer_path"
            )
        return Encoded(ids, None if pair.answers is None else np.frombuffer(answers, dtype=bool))

    def _span(self, pair: Pair, i: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of document i of a pair."""

        def numbers(place: int, dtype: str, count: int = 1) -> list[int]:
            start = HEADER.size + place
            stop = start + count * np.dtype(dtype).itemsize
            return np.frombuffer(self._reads.read(pair.idx, start, stop), dtype=dtype).tolist()

        n = pair.sequences
        first, end = numbers(12 * n + 8 * i, "<i8", 2)
        if end == first:
            return 0, 0
        (start,), (last,), (length,) = (
            numbers(4 * n + 8 * first, "<i8"),
            numbers(4 * n + 8 * (end - 1), "<i8"),
            numbers(4 * (end - 1), "<i4"),
        )
        return start, last + length * pair.itemsize


class Pairs:
    """Token files whose documents 2 i and 2 i + 1 are the sides of pair i; it is used as `TokenFiles` is."""

    def __init__(self, documents: TokenFiles) -> None:
        self._documents, self.made_by = documents, documents.made_by

    def __len__(self) -> int:
        return len(self._documents) // 2

    def __getitem__(self, i: int) -> Encoded:
        """Return the sides one after the other; nothing if one of them is a bad record. It raises as `TokenFiles`."""
        sides = [self._documents[2 * i + side] for side in range(2)]
        if not all(len(side.ids) for side in sides):
            return NOTHING
        ids, answers = (np.concatenate(column) for column in list(zip(*sides, strict=True))[:2])
        return Encoded(ids, answers, tuple(len(side.ids) for side in sides))

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each pair, (n,) int64."""
        lengths = self._documents.lengths()
        return lengths[::2] + lengths[1::2]

    def answers(self) -> int | None:
        """Return the number of tokens that are learned in both sides."""
        return self._documents.answers()

    def fingerprint(self, pairs: int) -> int:
        """Return a 63-bit hash of the content of the first pairs; 0: they end within a file."""
        return self._documents.fingerprint(2 * pairs)

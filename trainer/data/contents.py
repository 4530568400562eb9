"""What a data set holds: documents, tokens, how many are learned, and how many documents a sequence has room for.

Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trainer.data.mixture import Mixture
from trainer.data.text_data import TextData
from trainer.data.token_files.reader import TokenFiles

LENGTHS = tuple(2**n for n in range(14, 19))
"""Lengths of sequences of the retention curve: 16k .. 256k tokens."""
QUICK = 10**7
"""Documents that are counted at the start of a run: 80 MB of lengths, and a second."""


@dataclass(frozen=True)
class Contents:
    """lengths: (n,) tokens of each document that has some; learned: tokens with a label."""

    lengths: np.ndarray
    learned: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.lengths.sum(dtype=np.int64))

    def whole(self, length: int) -> float:
        """Return the share of documents of at most `length` tokens: the retention."""
        return float((self.lengths <= length).mean()) if len(self.lengths) else 1.0


def contents_of(data: TextData | Mixture) -> dict[str, Contents]:
    """Return the content of each source by name, "" if there is one; none of an iterable, which has no files."""
    parts = data.parts if isinstance(data, Mixture) else {"": data}
    return {name: _contents(part.source) for name, part in parts.items() if isinstance(part, TextData)}


def _contents(source: TokenFiles) -> Contents:
    lengths = source.lengths()
    lengths, learned = lengths[lengths > 0], source.answers()
    return Contents(lengths, int((lengths - 1).sum()) if learned is None else learned)


def summary(found: Mapping[str, Contents], seq_len: int) -> str:
    """Return the sums of all sources in a line, and below it the table if there are several."""
    lengths = np.concatenate([one.lengths for one in found.values()])
    learned, total = sum(one.learned for one in found.values()), Contents(lengths, 0)
    line = (
        f"{len(lengths):,} documents, {total.tokens:,} tokens, {learned / max(total.tokens, 1):.1%} learned; "
        f"{total.whole(seq_len):.1%} of the documents have at most {seq_len:,} tokens"
    )
    return line if len(found) < 2 else f"{line}\n{table(found, seq_len)}"


def table(found: Mapping[str, Contents], seq_len: int) -> str:
    """Return a table, a row each source: counts, and the share of documents that are whole by length of a sequence."""
    lengths = sorted({*LENGTHS, seq_len})
    names = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths]
    rows = [["source", "documents", "tokens", "learned", "median", "longest", *names]]
    for name, one in found.items():
        median, longest = (int(np.median(one.lengths)), int(one.lengths.max())) if len(one.lengths) else (0, 0)
        counts = (f"{n:,}" for n in (len(one.lengths), one.tokens))
        shares = (f"{one.whole(n):.1%}" for n in lengths)
        learned = f"{one.learned / max(one.tokens, 1):.1%}"
        rows.append([name or "all", *counts, learned, f"{median:,}", f"{longest:,}", *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(["share of documents that are whole, by length of a sequence, on the right", *lines])


def runs_of(marks: np.ndarray) -> list[tuple[int, int, bool]]:
    """Return [start, stop) and value of each run of equal marks. marks: (n,) bool."""
    edges: Sequence[int] = [0, *(np.flatnonzero(marks[1:] != marks[:-1]) + 1).tolist(), len(marks)]
    return [(start, stop, bool(marks[start])) for start, stop in pairwise(edges) if stop > start]

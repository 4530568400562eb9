"""Counts of data sets: tokens, learned tokens, and documents that fit into a sequence; also as a table. Torch-free.

`lct data show` and the start of a run print them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.data.token_files.format import TokenFiles
from trainer.data.tokenizers import chat_notes

LENGTHS = tuple(2**n for n in range(14, 19))
"""Lengths of sequences of the retention curve: 16k .. 256k tokens."""


QUICK = 10**7
"""Most documents that the start of a run counts: 80 MB of lengths, and a second."""


@dataclass(frozen=True)
class Contents:
    """The counts of a data set.

    Attributes:
        lengths: Number of tokens of each document that has a token, (n,).
        learned: Number of tokens that have a label.
        notes: Counts of the parts of conversations that their text lacks; see `TokenFiles.notes`.
    """

    lengths: np.ndarray
    learned: int
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.lengths.sum())

    def whole(self, length: int) -> float:
        """Return the retention: the share of documents that fit whole; 1.0 without documents.

        Args:
            length: Tokens of a sequence.
        """
        return float((self.lengths <= length).mean()) if len(self.lengths) else 1.0


def content_of(source: TokenFiles) -> Contents:
    """Count the documents of token files. Documents without tokens do not count.

    Args:
        source: The token files.

    Returns:
        The counts.
    """
    lengths = source.lengths()
    lengths = lengths[lengths > 0]
    learned = source.answers()
    return Contents(
        lengths, int((lengths - 1).sum()) if learned is None else learned, source.notes()
    )


def lacking_parts(contents: Mapping[str, Contents]) -> list[str]:
    """Return a sentence for each kind of part that the texts of conversations lack; empty if none lacks a part.

    Args:
        contents: The counts of each source, by name.
    """
    return chat_notes.sentences(chat_notes.sum_of([one.notes for one in contents.values()]))


def summary(contents: Mapping[str, Contents], seq_len: int) -> str:
    """Return the sums of all sources in a line, with the table below it if there are several sources.

    Args:
        contents: The counts of each source, by name.
        seq_len: Tokens of a sequence.
    """
    lengths = np.concatenate([one.lengths for one in contents.values()])
    learned = sum(one.learned for one in contents.values())
    total = Contents(lengths, 0)
    line = (
        f"{len(lengths):,} documents, {total.tokens:,} tokens, {learned / max(total.tokens, 1):.1%} learned; "
        f"{total.whole(seq_len):.1%} of the documents have at most {seq_len:,} tokens"
    )
    return line if len(contents) < 2 else f"{line}\n{table(contents, seq_len)}"


def table(contents: Mapping[str, Contents], seq_len: int) -> str:
    """Return a table with a row for each source: its documents, and the share of them that fit whole into a sequence.

    The columns are documents, tokens, the share of learned tokens, median and longest length, and a share for
    `seq_len` and for each of `LENGTHS`.

    Args:
        contents: The counts of each source, by name.
        seq_len: Tokens of a sequence.
    """
    lengths = sorted({*LENGTHS, seq_len})
    names = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths]
    rows = [["source", "documents", "tokens", "learned", "median", "longest", *names]]
    for name, one in contents.items():
        known = one.lengths if len(one.lengths) else np.zeros(1)
        middle = (f"{int(n):,}" for n in (np.median(known), known.max()))
        counts = (f"{n:,}" for n in (len(one.lengths), one.tokens))
        shares = (f"{one.whole(n):.1%}" for n in lengths)
        learned = f"{one.learned / max(one.tokens, 1):.1%}"
        rows.append([name or "all", *counts, learned, *middle, *shares])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(
        ["share of documents that are whole, by length of a sequence, on the right", *lines]
    )

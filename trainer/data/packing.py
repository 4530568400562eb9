"""Documents back to back in sequences of `seq_len` tokens, with labels, positions and document ids. Torch-free.

documents   [B a b E] [B c E]            B, E: begin and end of text; seq_len = 4
tokens       B a b E | B c E ...
labels       a b E - | c E - ...         shifted by one within the document; -: IGNORE_INDEX
positions    0 1 2 3 | 0 1 2 ...         from 0 in each document, and where a sequence continues one
document_ids 0 0 0 0 | 0 0 0 1 ...       numbered within the sequence
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

IGNORE_INDEX = -100  # a label that no loss counts
NO_POSITION = -1  # of padding, which has a row of the rotary table like any token, and which no router counts


class Sample(NamedTuple):
    """tokens (n,) and labels (n,) int32 of a document or a part of it; a label is the next token, or IGNORE_INDEX."""

    tokens: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class PackedSequence:
    """Four arrays (seq_len,) int64, each with memory of its own.

    padding: tokens at the end that are of no document, at NO_POSITION; source: number of the data set in a mixture.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_ids: np.ndarray
    padding: int = 0
    source: int = 0


def positions_of(lengths: np.ndarray | list[int], *, padding: int) -> np.ndarray:
    """Return positions (n,) int64, from 0 in each document of these lengths; the last `padding` tokens have none."""
    lengths = np.asarray(lengths, dtype=np.int64)
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions[len(positions) - padding :] = NO_POSITION
    return positions


class SequenceBuilder:
    """Fills one sequence after the other.

    `add` parts of documents until `missing` is 0; `finish` then returns the sequence and begins the next one.
    """

    def __init__(self, seq_len: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len = {seq_len} must be at least 1")
        self._seq_len = seq_len
        self._count = np.arange(seq_len, dtype=np.int64)
        self._begin()

    @property
    def missing(self) -> int:
        """Tokens that the sequence still lacks."""
        return self._seq_len - self._filled

    def add(self, document: np.ndarray, start: int = 0) -> int:
        """Append as much of `document[start:]` as fits, and return the number of tokens.

        `document` (n,) is whole, with its begin and end tokens: the label of the last token that fits is the document's
        next token, which may stand in the next sequence.
        """
        n = min(self.missing, len(document) - start)
        if n <= 0:
            return 0
        sequence, here = self._sequence, slice(self._filled, self._filled + n)
        sequence.tokens[here] = document[start : start + n]
        following = document[start + 1 : start + n + 1]
        sequence.labels[here][: len(following)] = following
        if len(following) < n:  # the document ends here: its last token has nothing to predict
            sequence.labels[self._filled + n - 1] = IGNORE_INDEX
        sequence.positions[here] = self._count[:n]
        sequence.document_ids[here] = self._documents
        self._filled += n
        self._documents += 1
        return n

    def finish(self) -> PackedSequence:
        """Return the full sequence, and begin the next one in new memory."""
        assert self.missing == 0, f"the sequence lacks {self.missing} of {self._seq_len} tokens"
        sequence = self._sequence
        self._begin()
        return sequence

    def _begin(self) -> None:
        self._sequence = PackedSequence(*(np.empty(self._seq_len, dtype=np.int64) for _ in range(4)))
        self._filled = self._documents = 0

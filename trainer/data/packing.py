"""How documents lie in sequences of `seq_len` tokens, with labels, positions and document ids. Torch-free.

documents   [B a b E] [B c E]            B, E: begin and end of text; seq_len = 4
tokens       B a b E | B c E ...
labels       a b E - | c E - ...         shifted by one within the document; -: IGNORE_INDEX
positions    0 1 2 3 | 0 1 2 ...         from 0 in each document, and where a sequence continues one
document_ids 0 0 0 0 | 0 0 0 1 ...       numbered within the sequence

`document_stream.DocumentStream` cuts documents at the end of a sequence; `whole_stream.WholeStream` keeps them whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.data.tokenizers.tokenizer import Encoded

IGNORE_INDEX = -100  # a label that no loss counts
# position of padding, which has a row of the rotary table like any token, and which no router counts
NO_POSITION = -1


class Sample(NamedTuple):
    """A document, or a part of one.

    Attributes:
        tokens: (n,) int32.
        labels: (n,) int32: the next token, or IGNORE_INDEX.
        lengths: Tokens of each part, as of `Encoded`.
    """

    tokens: np.ndarray
    labels: np.ndarray
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class PackedSequence:
    """A sequence of documents: four arrays (seq_len,) int64, each with its own memory.

    Attributes:
        tokens: The tokens.
        labels: The next token of each token, or IGNORE_INDEX.
        positions: Positions within each document, from 0.
        document_ids: Numbers of the documents within the sequence.
        padding: Number of padding tokens at the end, at NO_POSITION.
        source: Number of the data set in a mixture, else None.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_ids: np.ndarray
    padding: int
    source: int | None = None


def positions_of(lengths: np.ndarray | list[int], *, padding: int) -> np.ndarray:
    """Return positions from 0 in each document, (n,) int64. The padding at the end has `NO_POSITION`.

    Args:
        lengths: Tokens of each document, then the number of padding tokens. n is their sum.
        padding: Number of padding tokens.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions[len(positions) - padding :] = NO_POSITION
    return positions


def sample_of(document: Encoded) -> Sample:
    """Return all n tokens of a document with n labels: the next token if it is learned, else IGNORE_INDEX.

    The last token of each part of the document has the label IGNORE_INDEX.

    Args:
        document: The document, not empty.
    """
    ids = document.ids.astype(np.int32)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    labels[:-1] = (
        ids[1:]
        if document.answers is None
        else np.where(document.answers[1:], ids[1:], IGNORE_INDEX)
    )
    labels[np.cumsum(document.lengths, dtype=np.int64) - 1] = IGNORE_INDEX
    return Sample(ids, labels, document.lengths)


def together(samples: Sequence[Sample], seq_len: int) -> PackedSequence:
    """Pack samples into one sequence. Padding is one more document, of token 0 without labels.

    Args:
        samples: At least one sample, of at most `seq_len` tokens together. Each part of a sample is a document.
        seq_len: Tokens of the sequence.

    Returns:
        The sequence. Its document ids count from 0.
    """
    lengths = [
        length for sample in samples for length in sample.lengths or (len(sample.tokens),)
    ]
    padding = seq_len - sum(lengths)
    lengths.append(padding)
    sequence = PackedSequence(
        tokens=np.zeros(seq_len, dtype=np.int64),
        labels=np.full(seq_len, IGNORE_INDEX),
        positions=positions_of(lengths, padding=padding),
        document_ids=np.repeat(np.arange(len(lengths)), lengths),
        padding=padding,
    )
    sequence.tokens[: seq_len - padding] = np.concatenate([sample.tokens for sample in samples])
    sequence.labels[: seq_len - padding] = np.concatenate([sample.labels for sample in samples])
    return sequence


def no_text(documents: object, stream: int) -> str:
    """Return the message that no document of a data stream holds text.

    Args:
        documents: Number of its documents, or words for the number.
        stream: The number of the stream, from 0.
    """
    return (
        f"none of the {documents} documents of data stream {stream} holds text; "
        "leave out documents without text"
    )

"""Whole documents through the trainer's `SequenceBuilder`: what the tests of packing and of the loader compare with."""

from collections.abc import Iterable, Iterator

import numpy as np

from trainer.data.packing import PackedSequence, SequenceBuilder


def pack(documents: Iterable[np.ndarray], seq_len: int) -> Iterator[PackedSequence]:
    """Yield the full sequences of whole documents (n,), each with its begin and end tokens; drop an incomplete one."""
    builder = SequenceBuilder(seq_len)
    for document in documents:
        start = 0
        while start < len(document):
            start += builder.add(document, start)
            if builder.missing == 0:
                yield builder.finish()

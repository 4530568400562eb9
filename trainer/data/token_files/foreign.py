"""Token files of other programs: Megatron's pairs without our check sums, and flat files. Torch-free.

A file of another name than .idx is flat, as those of OLMo: ids without a header (or a real .npy file), of the type that
training.token_dtype names, by default uint16 if the vocabulary has at most 65,536 tokens, else uint32. A document ends
behind each end-of-text id. Its index is made once, in the cache, and is read as those of pairs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.sources.files import BLOCK, cache_folder, contents, unreadable, write_whole
from trainer.data.token_files.format import HEADER, Pair, index_bytes, open_pair

_SAMPLE = 1 << 16  # bytes at the start of a flat file that show its type
_CHECKED = 1 << 20  # places of an index that are checked at once


def checked_pair(idx: str) -> Pair:
    """Return a pair of another program, whose sequences follow each other in the .bin.

    Raises:
        ConfigError: they do not, or the index is damaged.
    """
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


def flat_pair(file: str, layout: tuple[int, np.dtype], eos: int) -> tuple[Pair, tuple[int, str]]:
    """Return a flat file with an index of its documents, which end behind each id `eos`, and what tells its content.

    layout: see `flat_layout`.

    Raises:
        ConfigError: the index cannot be written.
    """
    (content,), (start, dtype) = contents([file]), layout
    code = {1: 1, 2: 8, 4: 4, 8: 5}[dtype.itemsize]  # of the size alone: Megatron has no uint32
    index = cache_folder() / "flat" / f"{content:016x}-{dtype.str[1:]}-{start}-{eos}.idx"
    if not index.exists():
        lengths = np.concatenate([*flat_lengths(file, layout, eos), np.empty(0, dtype=np.int32)])
        try:
            write_whole(index, *index_bytes(code, lengths, start))
        except OSError as error:
            raise ConfigError(
                f"the index of {file} cannot be written to {index.parent} ({error.strerror}); make room there, or name "
                "another folder in XDG_CACHE_HOME"
            ) from None
    n = (index.stat().st_size - HEADER.size - 8) // 20  # see format.py
    return Pair(str(index), file, dtype.str, n, n), (content, dtype.str)


def flat_lengths(file: str, layout: tuple[int, np.dtype], eos: int) -> Iterator[np.ndarray]:
    """Yield the lengths of the documents of a flat file, block by block."""
    start, dtype = layout
    open_length = 0
    with open(file, "rb") as stream:
        stream.read(start)
        while len(ids := np.frombuffer(stream.read(BLOCK // dtype.itemsize * dtype.itemsize), dtype=dtype)):
            ends = np.flatnonzero(ids == eos) + 1
            lengths = np.diff(ends, prepend=0)
            if len(lengths):
                lengths[0] += open_length
                open_length = 0
            open_length += len(ids) - (int(ends[-1]) if len(ends) else 0)
            yield lengths
    if open_length:
        yield np.array([open_length])


def flat_layout(file: str, vocab_size: int, token_dtype: str) -> tuple[int, np.dtype]:
    """Return the place of the first id of a flat file, in bytes, and the data type.

    Raises:
        ConfigError: its size is not that of whole ids, or they are of another type.
    """
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

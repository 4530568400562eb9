"""Reads parts of the tensors of a file as PyTorch tensors, and no other byte."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import BinaryIO

import torch
from torch import Tensor

from trainer.hugging_face.quantised import blocks_of, scaled
from trainer.hugging_face.stored import BYTES, FLOAT8, Stored

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
DTYPES = FLOATS | {"U8": torch.uint8, FLOAT8: torch.float8_e4m3fn}


def wider_types(tensors: Mapping[str, Stored]) -> dict[str, torch.dtype]:
    """Return the dtypes of tensors that are wider than most weights, for example norms in float32, by name.

    The dtype of most elements counts as the dtype of most weights.

    Args:
        tensors: The tensors of a folder, by name.
    """
    floats = {name: stored for name, stored in tensors.items() if stored.dtype in FLOATS}
    elements = Counter()
    for stored in floats.values():
        elements[stored.dtype] += math.prod(stored.shape)
    usual = BYTES[elements.most_common(1)[0][0]] if elements else 0
    return {
        name: FLOATS[stored.dtype]
        for name, stored in floats.items()
        if BYTES[stored.dtype] > usual
    }


def dtype_of(stored: Stored) -> torch.dtype:
    """Return the dtype of a tensor of a file after it has been read.

    Args:
        stored: The tensor in the file.
    """
    return DTYPES[stored.dtype] if stored.scales is None else torch.float32


def read_part(stored: Stored, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return a part of a tensor of a file, of shape `lengths`, on the CPU. Only its bytes and its scales are read.

    A tensor with scales becomes float32; others keep their dtype.

    Args:
        stored: The tensor in the file.
        offsets: First index in each dimension.
        lengths: Length in each dimension.
    """
    part = _read_bytes(stored, offsets, lengths)
    if stored.scales is None or 0 in lengths:
        return part.to(dtype_of(stored))
    return scaled(part, _read_bytes(stored.scales, *blocks_of(offsets, lengths)), offsets)


def read_rows(stored: Stored, first: int, rows: int) -> Tensor:
    """Return whole rows (dim 0) of a tensor of a file.

    Args:
        stored: The tensor in the file.
        first: The first row.
        rows: Number of rows.
    """
    shape = stored.shape[1:]
    return read_part(stored, [first, *[0] * len(shape)], [rows, *shape])


def _read_bytes(stored: Stored, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    part = torch.empty(tuple(lengths), dtype=DTYPES[stored.dtype])
    into = memoryview(part.view(-1).view(torch.uint8).numpy())
    done = 0
    with stored.file.open("rb", buffering=0) as file:
        for start, size in _runs(stored, offsets, lengths):
            _read_exactly(file, start, into[done : done + size])
            done += size
    return part


def _runs(
    stored: Stored, offsets: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (first byte in the file, number of bytes) of the contiguous runs of a part, in its order."""
    shape = stored.shape
    itemsize = BYTES[stored.dtype]
    # The last dimension that is not read whole: a run is contiguous in it and in all inner dimensions.
    cut = max((dim for dim in range(len(shape)) if lengths[dim] != shape[dim]), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    size = math.prod(lengths[cut:]) * itemsize
    for place in product(
        *(
            range(offset, offset + n)
            for offset, n in zip(offsets[:cut], lengths[:cut], strict=True)
        )
    ):
        element = sum(
            i * stride for i, stride in zip((*place, *offsets[cut:]), strides, strict=True)
        )
        yield stored.start + element * itemsize, size


def _read_exactly(file: BinaryIO, start: int, into: memoryview) -> None:
    file.seek(start)
    while into:
        count = file.readinto(into)  # one call reads at most 2 GiB
        if not count:
            raise OSError(f"{file.name} has become shorter")
        into = into[count:]

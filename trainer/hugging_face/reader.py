"""A Hugging Face folder as a checkpoint of weights: DCP asks for parts of our tensors, and only these are read.

Published weights may be stored in fewer bits, with their scales.

MXFP4 (OCP Microscaling Formats 1.0), as the experts of gpt-oss:

   NAME_blocks  (E, R, G, 16) uint8   two numbers of 4 bits a byte, the lower ones first: an index of `_VALUES`
   NAME_scales  (E, R, G) uint8       exponent of 2, plus 127, of the 32 numbers of a block
-> NAME         (E, 32 * G, R)        as transformers has it, rows of the matrix last

float8 in blocks, as DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), MiniMax-M2 and others are published:

   NAME            (..., R, C) float8 e4m3
   NAME_scale_inv  (..., ceil(R / 128), ceil(C / 128))   what the numbers of a block are multiplied by
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from trainer.config.errors import ConfigError
from trainer.hugging_face.files import (
    BYTES,
    FLOAT8,
    FLOAT8_BLOCK,
    HFModel,
    Shape,
    Stored,
    check_shapes,
    read_folder,
)

BLOCKS, SCALES = "_blocks", "_scales"
FLOAT8_SCALES = "_scale_inv"
_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)


def shapes_of(stored: Mapping[str, Stored]) -> dict[str, Shape]:
    """Return the shapes of all tensors by name; blocks and their scales are one tensor."""
    shapes = {name: x.shape for name, x in stored.items()}
    for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
        *first, groups, size = shapes[name + BLOCKS]
        if shapes.get(name + SCALES) == (*first, groups) and len(first) == 2:
            del shapes[name + BLOCKS], shapes[name + SCALES]
            shapes[name] = first[0], 2 * groups * size, first[1]
    return shapes


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers as transformers has them, in bfloat16, which has all of them.

    blocks: (E, R, G, B) uint8; scales: (E, R, G) uint8 -> (E, 2 * B * G, R).
    """
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    # (E, R, G, B, 2)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1)
    return torch.ldexp(pairs, scales.int()[..., None, None] - 127).flatten(2).mT


def with_scales(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors by name, each one in float8 with its scales, which have no name of their own then.

    Raises:
        ConfigError: a tensor in float8 has no scales, or scales for blocks of another size.
    """
    scales = {
        name: stored.get(name + FLOAT8_SCALES)
        for name, x in stored.items()
        if x.dtype == FLOAT8
    }
    for name, of_blocks in scales.items():
        *first, rows, columns = (1, 1, *stored[name].shape)
        grid = (*first, -(-rows // FLOAT8_BLOCK), -(-columns // FLOAT8_BLOCK))[
            -len(stored[name].shape) :
        ]
        if of_blocks is None or of_blocks.shape != grid:
            found = "is not there" if of_blocks is None else f"has the shape {of_blocks.shape}"
            raise ConfigError(
                f"{name} is stored as float8 and needs {name}{FLOAT8_SCALES} of shape {grid}, one scale for each block "
                f"of {FLOAT8_BLOCK} x {FLOAT8_BLOCK}; it {found}"
            )
    found = {name: replace(x, scales=scales.get(name)) for name, x in stored.items()}
    return {
        name: x
        for name, x in found.items()
        if scales.get(name.removesuffix(FLOAT8_SCALES)) != x
    }


def blocks_of(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (offsets, lengths) of the scales of a part of a tensor in float8."""
    firsts = [start // FLOAT8_BLOCK for start in offsets[-2:]]
    lasts = [
        -(-(start + n) // FLOAT8_BLOCK)
        for start, n in zip(offsets[-2:], lengths[-2:], strict=True)
    ]
    counts = [last - first for first, last in zip(firsts, lasts, strict=True)]
    return [*offsets[:-2], *firsts], [*lengths[:-2], *counts]


def scaled(part: torch.Tensor, scales: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """Return a part of a tensor in float8 as float32. scales: of the blocks that it meets; offsets: of the part."""
    for dim in range(-min(2, part.ndim), 0):
        blocks = torch.arange(offsets[dim], offsets[dim] + part.shape[dim]) // FLOAT8_BLOCK
        scales = scales.float().index_select(dim, blocks - offsets[dim] // FLOAT8_BLOCK)
    return scales.mul_(part.float())


FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
DTYPES = FLOATS | {"U8": torch.uint8, FLOAT8: torch.float8_e4m3fn}
_ROWS = 4096  # that are compared at once


def wider_types(tensors: Mapping[str, Stored]) -> dict[str, torch.dtype]:
    """Return the types of the tensors that are wider than most of the weights, such as norms in float32, by name."""
    floats = {name: stored for name, stored in tensors.items() if stored.dtype in FLOATS}
    elements: Counter[str] = Counter()
    for stored in floats.values():
        elements[stored.dtype] += math.prod(stored.shape)
    usual = BYTES[elements.most_common(1)[0][0]] if elements else 0
    return {
        name: FLOATS[stored.dtype]
        for name, stored in floats.items()
        if BYTES[stored.dtype] > usual
    }


class HFReader(FileSystemReader):
    """Reads the tensors `model.<name>` of a model from the safetensors files of a folder, in the model's own layout.

    Raises:
        ConfigError: a file is missing or broken; a tensor is missing, unknown or of another shape.
    """

    def __init__(self, folder: Path, model: HFModel, headers: bytes | None = None) -> None:
        """headers: those of a reader of another rank, which has read and checked the files."""
        super().__init__(folder)
        if headers is None:
            found = {
                name: (x.file.name, x.dtype, x.shape, x.start)
                for name, x in read_folder(folder).items()
            }
        self.headers = json.dumps(found).encode() if headers is None else headers
        """Names, shapes and places of all tensors, for readers of other ranks: their folder may have another path."""
        entries = json.loads(self.headers).items()
        stored = {
            name: Stored(folder / file, dtype, tuple(shape), at)
            for name, (file, dtype, shape, at) in entries
        }
        try:
            self._stored = with_scales(stored)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None
        for name, first in model.second_names.items():
            if name in self._stored and first not in self._stored:
                self._stored[first] = self._stored.pop(name)
        there = (name for ours in model.further for name in model.pairs[ours][1].names)
        self.lacks_further = model.has_further and not any(
            name in self._stored for name in there
        )
        """Whether the model's layers for further tokens are not there."""
        model = model.without_further() if self.lacks_further else model
        self.pairs = model.pairs
        if headers is None:
            self._check(model)

    def _check(self, model: HFModel) -> None:
        second_names = {
            name: first
            for name, first in model.second_names.items()
            if {name, first} <= {*self._stored}
        }
        others = {name for name in self._stored if name.startswith(model.unread)} | {
            *second_names
        }
        found = {
            name: shape for name, shape in shapes_of(self._stored).items() if name not in others
        }
        try:
            for name in found:
                if (
                    name in self._stored
                    and _dtype_of(self._stored[name]) not in FLOATS.values()
                ):
                    raise ConfigError(
                        f"{name} is stored as whole numbers, without their scales"
                    )
            check_shapes(found, model.shapes())
            for name, first in second_names.items():
                self._check_equal(name, first)
        except ConfigError as error:
            raise ConfigError(
                f"{self.path}: {error}; the folder must hold the weights of this very model"
            ) from None

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return a part of our tensor, by default all of it: of shape `lengths`, on the CPU, in the file's data type.

        The part is in memory at most twice; whole rows (dim 0), if each changes by itself; the whole tensor, if more
        than the order of its rows changes.

        Raises:
            OSError: the file cannot be read, or is shorter than before.
        """
        shape = self.pairs[name][0].shape
        hf = self.pairs[name][1]
        offsets = offsets or [0] * len(shape)
        lengths = shape if lengths is None else lengths
        if hf.stacked:
            return self._read_stacked(hf.stacked, shape, offsets, lengths)
        if hf.name not in self._stored:
            return hf.from_hf(self._dequantised(hf.name, offsets[0], lengths[0]))[
                _places([0, *offsets[1:]], lengths)
            ]
        stored = self._stored[hf.name]
        if hf.same_layout or 0 in lengths:
            return read_part(stored, [hf.first_row + offsets[0], *offsets[1:]], lengths)
        if hf.keeps_rows:
            part = read_part(
                stored,
                [offsets[0], *[0] * (len(stored.shape) - 1)],
                [lengths[0], *stored.shape[1:]],
            )
            return hf.from_hf(part)[_places([0, *offsets[1:]], lengths)]
        if not hf.moves_rows:
            whole = hf.from_hf(read_part(stored, [0] * len(stored.shape), stored.shape))
            return whole[_places(offsets, lengths)]
        rows = hf.from_hf(torch.arange(shape[0]))[offsets[0] : offsets[0] + lengths[0]]
        first = rows.min().item()
        part = read_part(
            stored,
            [hf.first_row + first, *offsets[1:]],
            [rows.max().item() + 1 - first, *lengths[1:]],
        )
        return part[rows - first]

    def _read_stacked(
        self,
        names: Sequence[Sequence[str]],
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """Return a part of a tensor whose rows are those of other tensors. names: of the parts of each row."""
        part = torch.empty(tuple(lengths), dtype=self._dtype_of_all(sum(map(tuple, names), ())))
        size = shape[1] // len(names[0])
        first = offsets[1]
        last = offsets[1] + lengths[1]
        for row, of_row in zip(part, names[offsets[0] : offsets[0] + lengths[0]], strict=True):
            for start, name in zip(range(0, shape[1], size), of_row, strict=True):
                begin = max(first, start)
                end = min(last, start + size)
                if begin < end:
                    cut = [begin - start, *offsets[2:]], [end - begin, *lengths[2:]]
                    row[begin - first : end - first] = read_part(self._stored[name], *cut)
        return part

    def _dequantised(self, name: str, first: int, rows: int) -> torch.Tensor:
        """Return some rows (dim 0) of a tensor in MXFP4, of which a whole row changes its layout by itself."""
        parts = (self._stored[name + kind] for kind in (BLOCKS, SCALES))
        return dequantise(
            *(
                read_part(x, [first, *[0] * len(x.shape[1:])], [rows, *x.shape[1:]])
                for x in parts
            )
        )

    def _check_equal(self, name: str, first: str) -> None:
        a = self._stored[name]
        b = self._stored[first]
        same = a.shape == b.shape
        wide = torch.promote_types(_dtype_of(a), _dtype_of(b))
        for start in range(0, a.shape[0], _ROWS) if same else ():
            part = (
                [start, *[0] * len(a.shape[1:])],
                [min(_ROWS, a.shape[0] - start), *a.shape[1:]],
            )
            same = same and torch.equal(
                read_part(a, *part).to(wide), read_part(b, *part).to(wide)
            )
        if not same:
            raise ConfigError(
                f"{name} and {first} differ, and the model has one tensor for both (tie_word_embeddings)"
            )

    def _dtype_of_all(self, names: Sequence[str]) -> torch.dtype:
        """Return the data type that can hold these tensors as they are; of numbers in MXFP4: bfloat16."""
        found = [self._stored[name] for name in names if name in self._stored]
        return reduce(torch.promote_types, map(_dtype_of, found)) if found else torch.bfloat16

    def rounded_to(self, types: Mapping[str, torch.dtype]) -> list[str]:
        """Return the tensors there that are wider than most others, and wider than ours. types: of ours, by name."""
        wide = wider_types(self._stored)
        ours = {
            there: types[name]
            for name, (_, hf) in self.pairs.items()
            if name in types
            for there in hf.names
        }
        return [
            name
            for name, dtype in wide.items()
            if name in ours and ours[name].itemsize < dtype.itemsize
        ]

    # ---- the protocol of DCP

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries = {}
        for name, (ours, hf) in self.pairs.items():
            shape = ours.shape
            dtype = self._dtype_of_all(hf.names)
            whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            entries[f"model.{name}"] = TensorStorageMetadata(
                TensorProperties(dtype), shape, [whole]
            )
        return Metadata(entries, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item)
            target.copy_(
                self.read(
                    item.storage_index.fqn.removeprefix("model."),
                    item.storage_offsets,
                    item.lengths,
                )
            )
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _places(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(offsets, lengths, strict=True))


def _dtype_of(stored: Stored) -> torch.dtype:
    """Return the data type that a tensor of a file has when it has been read."""
    return DTYPES[stored.dtype] if stored.scales is None else torch.float32


def read_part(stored: Stored, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return a part of a tensor of a file, of shape `lengths`; no other bytes are read but those of scales."""
    part = _read_bytes(stored, offsets, lengths)
    if stored.scales is None or 0 in lengths:
        return part.to(_dtype_of(stored))
    return scaled(part, _read_bytes(stored.scales, *blocks_of(offsets, lengths)), offsets)


def _read_bytes(stored: Stored, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
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
    """Yield (first byte, bytes) of the contiguous runs of a part, in its order."""
    shape = stored.shape
    itemsize = BYTES[stored.dtype]
    # The last dimension of which a part is wanted: in it a run is contiguous, with all that is within.
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
        count = file.readinto(into)  # a call reads 2 GiB at most
        if not count:
            raise OSError(f"{file.name} has become shorter")
        into = into[count:]

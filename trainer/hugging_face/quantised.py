"""Published weights in fewer bits with their scales: which tensors they are, and how to compute their numbers.

MXFP4 (OCP Microscaling Formats 1.0), used for the experts of gpt-oss:

   NAME_blocks  (E, R, G, 16) uint8   two numbers of 4 bits a byte, the lower ones first: an index of `_VALUES`
   NAME_scales  (E, R, G) uint8       exponent of 2, plus 127, of the 32 numbers of a block
-> NAME         (E, 32 * G, R)        as transformers has it, rows of the matrix last

float8 in blocks, the published form of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), MiniMax-M2 and others:

   NAME            (..., R, C) float8 e4m3
   NAME_scale_inv  (..., ceil(R / 128), ceil(C / 128))   the factor of the numbers of a block
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer.config.errors import ConfigError
from trainer.hugging_face.pairs import Shape
from trainer.hugging_face.stored import FLOAT8, FLOAT8_BLOCK, Stored

BLOCKS, SCALES = "_blocks", "_scales"
FLOAT8_SCALES = "_scale_inv"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))


def shapes_of(stored: Mapping[str, Stored]) -> dict[str, Shape]:
    """Return the shapes of all tensors by name. MXFP4 blocks and their scales are one tensor, as `dequantise` gives it.

    Args:
        stored: The tensors of a folder, by name.
    """
    shapes = {name: x.shape for name, x in stored.items()}
    for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
        *first, groups, size = shapes[name + BLOCKS]
        if shapes.get(name + SCALES) == (*first, groups) and len(first) == 2:
            del shapes[name + BLOCKS], shapes[name + SCALES]
            shapes[name] = first[0], 2 * groups * size, first[1]
    return shapes


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers in transformers' layout, (E, 2 * B * G, R), in bfloat16, which can hold all of them.

    Args:
        blocks: (E, R, G, B), uint8: two numbers of 4 bits a byte, the low bits first.
        scales: (E, R, G), uint8: exponents of 2, plus 127.
    """
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    # (E, R, G, B, 2)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1)
    return torch.ldexp(pairs, scales.int()[..., None, None] - 127).flatten(2).mT


def with_scales(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors by name, each float8 tensor with its scales. The scales are no longer an entry by themselves.

    Args:
        stored: The tensors of a folder, by name.

    Raises:
        ConfigError: A float8 tensor has no scales, or scales for blocks of another size.
    """
    scales = {
        name: stored.get(name + FLOAT8_SCALES)
        for name, x in stored.items()
        if x.dtype == FLOAT8
    }
    for name, block_scales in scales.items():
        *first, rows, columns = (1, 1, *stored[name].shape)
        grid = (*first, -(-rows // FLOAT8_BLOCK), -(-columns // FLOAT8_BLOCK))[
            -len(stored[name].shape) :
        ]
        if block_scales is None or block_scales.shape != grid:
            problem = (
                "is missing" if block_scales is None else f"has the shape {block_scales.shape}"
            )
            raise ConfigError(
                f"{name} is stored as float8 and needs {name}{FLOAT8_SCALES} of shape {grid}, one scale for each block "
                f"of {FLOAT8_BLOCK} x {FLOAT8_BLOCK}; it {problem}"
            )
    return {
        name: replace(x, scales=scales.get(name))
        for name, x in stored.items()
        if scales.get(name.removesuffix(FLOAT8_SCALES)) != x
    }


def blocks_of(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (offsets, lengths), in blocks, of the scales of a part of a float8 tensor.

    Only the last two dimensions are divided by FLOAT8_BLOCK. A block that the part overlaps counts whole.

    Args:
        offsets: First index of the part in each dimension.
        lengths: Length of the part in each dimension.
    """
    firsts = [start // FLOAT8_BLOCK for start in offsets[-2:]]
    counts = [
        -(-(start + n) // FLOAT8_BLOCK) - start // FLOAT8_BLOCK
        for start, n in zip(offsets[-2:], lengths[-2:], strict=True)
    ]
    return [*offsets[:-2], *firsts], [*lengths[:-2], *counts]


def scaled(part: Tensor, scales: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return a part of a float8 tensor times its scales, as float32, with the shape of `part`.

    Args:
        part: The part, (..., R, C).
        scales: Scales of the blocks that the part overlaps, (..., rows, columns) of blocks.
        offsets: First index of the part in each dimension of the tensor.
    """
    for dim in range(-min(2, part.ndim), 0):
        blocks = torch.arange(offsets[dim], offsets[dim] + part.shape[dim]) // FLOAT8_BLOCK
        scales = scales.float().index_select(dim, blocks - offsets[dim] // FLOAT8_BLOCK)
    return scales.mul_(part.float())

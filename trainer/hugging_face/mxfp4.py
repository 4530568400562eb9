"""Tensors in MXFP4 (OCP Microscaling Formats 1.0), as the experts of gpt-oss are published.

   NAME_blocks  (E, R, G, 16) uint8   two numbers of 4 bits a byte, the lower ones first: an index of `_VALUES`
   NAME_scales  (E, R, G) uint8       exponent of 2, plus 127, of the 32 numbers of a block
-> NAME         (E, 32 * G, R)        as transformers has it, rows of the matrix last
"""

from collections.abc import Mapping

import torch

from trainer.hugging_face.files import Stored
from trainer.hugging_face.tensors import Shape

BLOCKS, SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1)  # (E, R, G, B, 2)
    return torch.ldexp(pairs, scales.int()[..., None, None] - 127).flatten(2).mT

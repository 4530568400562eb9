"""Rows put together from a shard, a halo (rows of other ranks that have arrived), and zeros; nothing is sent."""

from typing import NamedTuple

import torch

from trainer.distributed.sharding.ranges import Range, Ranges, difference, intersection, size
from trainer.distributed.sharding.tensors import planned

Pieces = tuple[tuple[int, int, int], ...]
"""Rows of a dimension as parts (source, start, stop): 0 are zeros, 1 rows of the shard, 2 of the halo."""


@planned
def plan_pieces(owned: Ranges, length: int, wanted: tuple[Range, ...]) -> Pieces:
    """Return the rows wanted of an axis: what is not owned is of the halo, in order, and beyond the ends zeros."""
    pieces, in_halo, whole = [], 0, ((0, length),)
    for part in wanted:
        parts = [(*x, 0) for x in difference((part,), whole)]
        parts += [(*x, 1) for x in intersection((part,), owned)]
        parts += [(*x, 2) for x in difference(intersection((part,), whole), owned)]
        for start, stop, source in sorted(parts):
            place = 0
            if source == 1:
                place = size(intersection(owned, ((0, start),)))
            elif source == 2:
                place, in_halo = in_halo, in_halo + stop - start
            pieces.append((source, place, place + stop - start))
    return tuple(pieces)


class Block(NamedTuple):
    """A part of a result: for each dimension where it begins there, where in the source, and how many rows it has."""

    source: int
    places: tuple[tuple[int, int, int, int], ...]
    """Of each dimension: (dimension, first row of the result, first row of the source, rows)."""

    def of(self, result: torch.Tensor) -> torch.Tensor:
        for dim, first, _, rows in self.places:
            result = result.narrow(dim, first, rows)
        return result

    def within(self, source: torch.Tensor) -> torch.Tensor:
        for dim, _, first, rows in self.places:
            source = source.narrow(dim, first, rows)
        return source

    def is_all_of(self, shape: torch.Size) -> bool:
        return all(first == 0 and rows == shape[dim] for dim, _, first, rows in self.places)


@planned
def plan_blocks(pieces: tuple[tuple[int, Pieces], ...]) -> tuple[tuple[tuple[int, int], ...], tuple[Block, ...]]:
    """Return the rows of the result in each dimension, and its blocks. pieces: dimension -> its pieces in order."""
    extents, blocks = [], [Block(1, ())]
    for dim, parts in pieces:
        length, longer = 0, []
        for source, start, stop in parts:
            place = (dim, length, start, stop - start)
            longer += [Block(min(source, b.source) and max(source, b.source), (*b.places, place)) for b in blocks]
            length += stop - start
        extents.append((dim, length))
        blocks = longer
    return tuple(extents), tuple(blocks)


def put_together(x: torch.Tensor, halo: torch.Tensor | None, pieces: dict[int, Pieces]) -> torch.Tensor:
    """Return the rows that the pieces of each dimension name, in one copy; differentiable.

    x: the shard. halo: its rows of other ranks; None if no piece is of them.
    """
    return _PutTogether.apply(x, halo, *plan_blocks(tuple(pieces.items()))) if pieces else x


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, halo, extents, blocks):
        ctx.blocks, ctx.shapes = blocks, [None if t is None else t.shape for t in (x, halo)]
        shape = [*x.shape]
        for dim, rows in extents:
            shape[dim] = rows
        result = x.new_empty(shape)
        for block in blocks:
            if block.source:
                block.of(result).copy_(block.within((x, halo)[block.source - 1]))
            else:
                block.of(result).zero_()
        return result

    @staticmethod
    def backward(ctx, gradient):
        gradients, wide = [], torch.promote_types(gradient.dtype, torch.float32)  # a row may have many copies
        for number, shape in enumerate(ctx.shapes, 1):
            if shape is None:
                gradients.append(None)
                continue
            blocks = [block for block in ctx.blocks if block.source == number]
            whole = next((block for block in blocks if block.is_all_of(shape)), None)
            if whole is None:
                total = gradient.new_zeros(shape, dtype=wide)
                if torch.is_grad_enabled():  # a rank without blocks joins the second derivatives
                    total = total + gradient.narrow(0, 0, 0).sum()
            else:
                total = whole.of(gradient).to(wide, copy=True, memory_format=torch.contiguous_format)
            for block in blocks:
                if block is not whole:
                    block.within(total).add_(block.of(gradient))
            gradients.append(total.to(gradient.dtype))
        return *gradients, None, None

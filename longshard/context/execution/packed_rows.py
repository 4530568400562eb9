"""Pack tensors that are sent together between ranks that divide heads: side by side in rows of bytes.

    a row       | q  h D | k  k D | v  k D |        every tensor begins at a multiple of 16 bytes
    a piece     the rows of one rank, in its order; where keys have a layout of their own, rows of queries, then of keys
    a message   the pieces of all ranks

Few copies do it: each tensor is copied into these rows and out of them as a whole. If the order of ranks and the order
of the sequence differ, one concatenation changes between them. Received tensors stay views of the rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Offsets, aligned

Tensors = list[Tensor]


class _Rows:
    """Rows of bytes with a row of each tensor. layout: the rows of each rank; tensors: (B, h, rows, ...)."""

    def __init__(self, layout: AxisLayout, tensors: Tensors) -> None:
        self.layout = layout
        self.width = 0
        self._tensors = []
        for x in tensors:
            shape = *x.shape[:2], *x.shape[3:]
            size = math.prod(shape) * x.itemsize
            self._tensors.append((slice(self.width, self.width + size), x.dtype, shape))
            self.width += aligned(size)

    def views(self, rows: Tensor) -> Tensors:
        """Return the tensors in rows of bytes: (..., width) -> (..., B, h, ...) for each."""
        return [
            rows[..., place].view(dtype).unflatten(-1, shape)
            for place, dtype, shape in self._tensors
        ]

    def size(self, rank: int) -> int:
        """Return the number of bytes of a rank's rows."""
        return self.layout.local_length(rank) * self.width

    def in_sequence(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return all rows in the order of the sequence; pieces: the bytes of each rank's rows."""
        parts = []
        for piece, ranges in zip(pieces, self.layout.ranges, strict=True):
            rows = piece.view(-1, self.width)
            places = Offsets(ranges)
            parts += [
                (start, rows[places(start) :][: stop - start].view(-1))
                for start, stop in ranges
            ]
        in_order = [part for _, part in sorted(parts, key=lambda part: part[0])]
        # the empty piece: the group may have no rows
        return _joined([pieces[0][:0], *in_order]).view(-1, self.width)


@dataclass(frozen=True)
class PackedRows:
    """Tensors that are sent together.

    Attributes:
        blocks: The rows of queries and, if their layout is another one, the rows of keys.
    """

    blocks: tuple[_Rows, ...]

    @classmethod
    def of(
        cls, queries: Tensors, keys: Tensors, layouts: tuple[AxisLayout, AxisLayout]
    ) -> "PackedRows":
        """Return the packed rows of tensors of these shapes, (B, h, any rows, ...).

        Args:
            queries: The tensors that have rows of queries.
            keys: The tensors that have rows of keys.
            layouts: The layouts of queries and of keys over the ranks.
        """
        if not keys or layouts[0].ranges == layouts[1].ranges:
            return cls((_Rows(layouts[0], [*queries, *keys]),))
        return cls((_Rows(layouts[0], queries), _Rows(layouts[1], keys)))

    def size(self, rank: int) -> int:
        """Return the number of bytes of a rank's piece.

        Args:
            rank: The rank.
        """
        return sum(block.size(rank) for block in self.blocks)

    def views(self, pieces: Tensor, rank: int) -> Tensors:
        """Return views of the tensors, (..., S, B, h, ...) each.

        Args:
            pieces: Pieces with the rows of a rank, (..., bytes).
            rank: The rank.
        """
        parts = pieces.split([block.size(rank) for block in self.blocks], dim=-1)
        return [
            view
            for block, part in zip(self.blocks, parts, strict=True)
            for view in block.views(
                part.unflatten(-1, (block.layout.local_length(rank), block.width))
            )
        ]

    def in_sequence(self, message: Tensor) -> Tensors:
        """Return all rows in the order of the sequence, (R, width) for each block.

        Args:
            message: The message of all ranks, 1-D.
        """
        if self._in_order:
            return [message.view(-1, self.blocks[0].width)]
        ranks = range(self.blocks[0].layout.degree)
        number = len(self.blocks)
        pieces = message.split([block.size(rank) for rank in ranks for block in self.blocks])
        return [block.in_sequence(pieces[i::number]) for i, block in enumerate(self.blocks)]

    def tensors(self, rows: Tensors) -> Tensors:
        """Return the tensors, (B, h, R, ...) each.

        Args:
            rows: All rows, (R, width) for each block.
        """
        return [
            x.movedim(0, 2)
            for block, each in zip(self.blocks, rows, strict=True)
            for x in block.views(each)
        ]

    @property
    def _in_order(self) -> bool:
        """Whether a message is already in the order of the sequence."""
        ranges = sum(self.blocks[0].layout.ranges, ())
        return len(self.blocks) == 1 and ranges == tuple(sorted(ranges))

    def rows(self, tensors: Tensors) -> Tensors:
        """Return all rows of the tensors as bytes, (R, width) for each of `blocks`.

        A row has the bytes of all tensors of its block, side by side.

        Args:
            tensors: The tensors, (B, h, R, ...) each: of queries first, then of keys. Rows are in the order of
                the sequence.
        """
        remaining = iter(tensors)
        whole = []
        for block in self.blocks:
            rows = tensors[0].new_empty(block.layout.length, block.width, dtype=torch.uint8)
            for view in block.views(rows):
                view.copy_(next(remaining).movedim(2, 0))
            whole.append(rows)
        return whole

    def by_rank(self, rows: Tensors) -> Tensor:
        """Return one 1-D byte buffer with the rows of rank 0, then the rows of rank 1, and so on.

        Args:
            rows: For each block, all its rows in the order of the sequence, (R, width).
        """
        if self._in_order:
            return rows[0].view(-1)
        parts = [rows[0].view(-1)[:0]]
        for rank in range(self.blocks[0].layout.degree):
            for block, each in zip(self.blocks, rows, strict=True):
                parts += [
                    each[start:stop].view(-1) for start, stop in block.layout.ranges[rank]
                ]
        return _joined(parts)


def _joined(parts: Tensors) -> Tensor:
    """Return these bytes one after another; they are copied as 64-bit words."""
    return torch.cat([part.view(torch.int64) for part in parts]).view(torch.uint8)

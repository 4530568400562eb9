"""Gathers each matrix whole at one rank, so that a computation on whole matrices runs once in the whole job.

    4 ranks have rows of the matrices A B C D E         rank 0 owns A E, rank 1 B, rank 2 C, rank 3 D
    all-to-all: rows to the owners                      rank 0 has all rows of A and E
    the owner computes on its whole matrices
    all-to-all: rows of the results to their ranks      replicas, too

The ranks that share matrices of one shape own them in turn. A matrix on one rank, for example of an expert, stays
there. The plan follows from meshes and placements alone, so every rank knows it without communication. Shards may be
uneven, empty, cut along rows and columns, and repeated.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from longshard.sharding.exchange import Pending, all_to_all
from longshard.sharding.movement import common_parts
from longshard.sharding.ranges import Offsets, Range, Ranges, union

AT_ONCE = 2**25
"""Elements of the matrices that a rank owns at once, if one matrix has no more."""


@dataclass(frozen=True)
class Box:
    """The part of a parameter on a rank: rows, where all dimensions except the last are rows, and columns."""

    rows: Ranges
    columns: Range


Boxes = Mapping[Box, tuple[int, ...]]
"""The ranks that have each box, in order."""


@dataclass(frozen=True)
class Piece:
    """A box's part of a matrix.

    places: pairs (rows of the matrix, the same rows of the shard); columns: columns of the matrix, all columns of the
    shard; ranks: all ranks that have the part, in order.
    """

    places: tuple[tuple[Range, Range], ...]
    columns: Range
    ranks: tuple[int, ...]

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each block of rows."""
        return [
            (stop - start, self.columns[1] - self.columns[0])
            for (start, stop), _ in self.places
        ]

    @cached_property
    def elements(self) -> int:
        """Number of elements of the part."""
        return sum(rows * columns for rows, columns in self.shapes)


@dataclass(frozen=True)
class Matrix:
    """parameter: its number; rows, columns: sizes of the matrix; owner: a rank."""

    parameter: int
    rows: int
    columns: int
    pieces: tuple[Piece, ...]
    owner: int

    def sender(self, piece: Piece) -> int:
        """Return the rank of the group that sends a piece: the nearest to the owner by number, if several have it.

        Args:
            piece: A piece of this matrix.
        """
        place = bisect_left(piece.ranks, self.owner)
        return min(
            piece.ranks[max(place - 1, 0) : place + 1], key=lambda rank: abs(rank - self.owner)
        )


Round = tuple[Matrix, ...]
"""Matrices of one shape that are exchanged at once."""


@dataclass(frozen=True)
class RankRound:
    """The work of one rank in a round, computed once.

    rows, columns: sizes of each matrix; owned: matrices of this rank; local: its pieces of all matrices; sources: rank
    that sends pieces to this owner -> (number among `owned`, piece); homes: rank that returns results -> pieces;
    gathers, returns: whether any rank of the group sends something to another rank, to the owners and back.
    """

    rows: int
    columns: int
    owned: Sequence[Matrix]
    local: Sequence[tuple[Matrix, Piece]]
    sources: Mapping[int, list[tuple[int, Piece]]]
    homes: Mapping[int, list[tuple[Matrix, Piece]]]
    gathers: bool
    returns: bool

    @classmethod
    def of(cls, matrices: Round, rank: int, known: dict[int, tuple[Piece, ...]]) -> "RankRound":
        """Return the work of a rank.

        Args:
            matrices: The matrices of the round.
            rank: The rank.
            known: Cache, id of a layer's pieces -> this rank's pieces; extended in place.
        """
        for matrix in matrices:
            if id(matrix.pieces) not in known:
                known[id(matrix.pieces)] = tuple(
                    piece for piece in matrix.pieces if rank in piece.ranks
                )
        owned = [matrix for matrix in matrices if matrix.owner == rank]
        local = [(matrix, piece) for matrix in matrices for piece in known[id(matrix.pieces)]]
        sources = defaultdict(list)
        for place, matrix in enumerate(owned):
            for piece in matrix.pieces:
                sources[matrix.sender(piece)].append((place, piece))
        homes = defaultdict(list)
        for matrix, piece in local:
            homes[matrix.owner].append((matrix, piece))
        pairs = [(matrix, piece) for matrix in matrices for piece in matrix.pieces]
        gathers = any(matrix.sender(piece) != matrix.owner for matrix, piece in pairs)
        returns = any(piece.ranks != (matrix.owner,) for matrix, piece in pairs)
        return cls(
            matrices[0].rows,
            matrices[0].columns,
            owned,
            local,
            sources,
            homes,
            gathers,
            returns,
        )


class Owners:
    """Sends rows of matrices to their owners, and rows of results back.

    Args:
        parameters: Parameters, (..., columns), with the rows of their matrices, see `matrices_of`; the same on every
            rank.
        group: The ranks that share them.
        dtype: Dtype of messages and whole matrices.
        device: Device of messages and whole matrices.
    """

    def __init__(
        self,
        parameters: Mapping[Tensor, tuple[Ranges, ...]],
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._rank = group.rank()
        self._settings = {"dtype": dtype, "device": device}
        ranks = tuple(dist.get_process_group_ranks(group))
        boxes = {}
        pieces = {}
        split = [(_boxes(p, ranks, boxes), p.shape[-1], rows) for p, rows in parameters.items()]
        self.rounds = [
            RankRound.of(matrices, self._rank, pieces) for matrices in rounds_of(split)
        ]
        """The same number of rounds, with the same matrices, on every rank."""

    def gather(
        self, this: RankRound, part: Callable[[int, Range], Tensor]
    ) -> Callable[[], Tensor]:
        """Start sending this rank's pieces of matrices to their owners. A collective, if `this.gathers`.

        Args:
            this: The round.
            part: Returns the values of some rows. It takes the index of a parameter, and the rows of its shard.

        Returns:
            A function that waits, and returns the matrices that this rank owns, (matrices, rows, columns).
        """
        sent = defaultdict(list)
        for matrix, piece in this.local:
            if matrix.sender(piece) == self._rank:
                sent[matrix.owner] += [
                    part(matrix.parameter, rows).flatten() for _, rows in piece.places
                ]
        wait_for = self._exchange(sent, this.sources, this.gathers)

        def wait() -> Tensor:
            blocks = wait_for()
            whole = torch.empty(len(this.owned), this.rows, this.columns, **self._settings)
            for rank in sorted(this.sources):
                for place, piece in this.sources[rank]:
                    for (start, stop), _ in piece.places:
                        whole[place, start:stop, slice(*piece.columns)] = next(blocks)
            return whole

        return wait

    def give_back(
        self, this: RankRound, results: Tensor
    ) -> Callable[[], Iterator[tuple[Matrix, Range, Tensor]]]:
        """Start sending results to all ranks that have the rows, also replicas. A collective, if `this.returns`.

        Args:
            this: The round.
            results: Results of the matrices in `this.owned`, in their order, (number, rows, columns).

        Returns:
            A function that waits, and yields this rank's blocks: (matrix, rows of its parameter's shard, their values).
        """
        sent = defaultdict(list)
        for result, matrix in zip(results, this.owned, strict=True):
            for piece in matrix.pieces:
                blocks = [
                    result[start:stop, slice(*piece.columns)].flatten()
                    for (start, stop), _ in piece.places
                ]
                for rank in piece.ranks:
                    sent[rank] += blocks
        wait_for = self._exchange(sent, this.homes, this.returns)

        def wait() -> Iterator[tuple[Matrix, Range, Tensor]]:
            blocks = wait_for()
            for rank in sorted(this.homes):
                for matrix, piece in this.homes[rank]:
                    for _, rows in piece.places:
                        yield matrix, rows, next(blocks)

        return wait

    def _exchange(
        self,
        sent: Mapping[int, list[Tensor]],
        arriving: Mapping[int, list[tuple[Any, Piece]]],
        moves: bool,
    ) -> Callable[[], Iterator[Tensor]]:
        """Start the exchange of blocks by rank. The result waits, and yields the arrived blocks, by rank.

        moves: whether any rank of the group sends to another rank, the same on every rank. If so, it is a collective.
        """
        blocks = [block for rank in sorted(sent) for block in sent[rank]]
        received = torch.cat(
            [block.to(**self._settings) for block in blocks or [torch.empty(0)]]
        )
        pending = Pending()
        if moves:
            ranks = range(self._group.size())
            sizes = [sum(block.numel() for block in sent.get(r, ())) for r in ranks]
            wanted = [sum(piece.elements for _, piece in arriving.get(r, ())) for r in ranks]
            received, pending = all_to_all(received, sizes, wanted, self._group, kind="owners")

        def wait() -> Iterator[Tensor]:
            pending.wait()
            shapes = [
                shape
                for rank in sorted(arriving)
                for _, piece in arriving[rank]
                for shape in piece.shapes
            ]
            flat = received.split([rows * columns for rows, columns in shapes])
            return (block.view(shape) for block, shape in zip(flat, shapes, strict=True))

        return wait


def rounds_of(parameters: Sequence[tuple[Boxes, int, tuple[Ranges, ...]]]) -> list[Round]:
    """Return all matrices with their owners, by shape, largest first, in rounds of about `AT_ONCE` elements an owner.

    Args:
        parameters: For each parameter its boxes, its columns, and the rows of its matrices.
    """
    known = {}
    # (rows, columns) -> ranks that share a matrix -> (number of the parameter, pieces) of each matrix
    shapes = {}
    for number, (boxes, columns, matrices) in enumerate(parameters):
        for rows in matrices:
            if (id(boxes), rows) not in known:  # layers have the same
                known[id(boxes), rows] = _pieces_of(boxes, rows)
            pieces = known[id(boxes), rows]
            sharing = tuple(sorted(rank for piece in pieces for rank in piece.ranks))
            shape = sum(stop - start for start, stop in rows), columns
            shapes.setdefault(shape, {}).setdefault(sharing, []).append((number, pieces))
    rounds = []
    turn_of = defaultdict(int)
    for shape in sorted(shapes, key=lambda sizes: -sizes[0] * sizes[1]):
        each = max(1, AT_ONCE // (shape[0] * shape[1]))
        turns = defaultdict(list)
        for sharing, matrices in shapes[shape].items():
            for place, (number, pieces) in enumerate(matrices):
                owner = sharing[turn_of[sharing] % len(sharing)]
                turn_of[sharing] += 1
                turns[place // (each * len(sharing))].append(
                    Matrix(number, *shape, pieces, owner)
                )
        rounds += [tuple(turns[turn]) for turn in sorted(turns)]
    return rounds


def _pieces_of(boxes: Boxes, rows: Ranges) -> tuple[Piece, ...]:
    """Return the pieces of one matrix, the rows `rows` of a parameter: one for each box that has a part of it."""
    pieces = (
        (tuple(common_parts(rows, Offsets(box.rows))), box, ranks)
        for box, ranks in boxes.items()
    )
    return tuple(
        Piece(places, box.columns, ranks)
        for places, box, ranks in pieces
        if places and box.columns[0] < box.columns[1]
    )


def _boxes(parameter: Tensor, ranks: tuple[int, ...], known: dict[Hashable, Boxes]) -> Boxes:
    """Return the boxes of a parameter, each with the indices in `ranks` of the ranks that hold it.

    `known` keeps results by shape, mesh and placements. Raises ValueError if the parameter's ranks are not `ranks`.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        mesh_shape = (1,)
        grid = [dist.get_rank()]
        placements = ()
    else:
        mesh_shape = parameter.device_mesh.shape
        placements = parameter.placements
        grid = parameter.device_mesh.mesh.flatten().tolist()
    key = shape, mesh_shape, tuple(grid), placements
    if key not in known:
        if sorted(grid) != sorted(ranks):
            raise ValueError(
                f"a parameter of shape {shape} lies on ranks {grid}; fully_shard it over {list(ranks)}"
            )
        numbers = {rank: number for number, rank in enumerate(ranks)}
        box_ranks = defaultdict(list)
        for coordinate, rank in zip(product(*map(range, mesh_shape)), grid, strict=True):
            box_ranks[_box(shape, mesh_shape, coordinate, placements)].append(numbers[rank])
        known[key] = {box: tuple(sorted(numbers)) for box, numbers in box_ranks.items()}
    return known[key]


def rows_here(parameter: Tensor) -> Ranges:
    """Return the rows that this rank has, as ranges (start, end) of the whole parameter, in order.

    Args:
        parameter: 1-D or 2-D.
    """
    if not isinstance(parameter, DTensor):
        return ((0, parameter.shape[0]),)
    mesh = parameter.device_mesh
    shape = (parameter.shape[0], 1)
    return _box(shape, mesh.shape, mesh.get_coordinate(), parameter.placements).rows


def _box(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """Return the part of a parameter on one rank; its ranges may be empty. FSDP's strided placement cuts last.

    coordinate: place of the rank in each dimension of the mesh.
    """
    held = [(0, length) for length in shape]
    cuts = [
        cut
        for cut in zip(placements, mesh_shape, coordinate, strict=False)
        if hasattr(cut[0], "dim")
    ]
    for placement, parts, place in sorted(
        cuts, key=lambda cut: hasattr(cut[0], "split_factor")
    ):
        start, stop = held[placement.dim]
        step = -(-(stop - start) // parts)
        held[placement.dim] = (
            min(start + place * step, stop),
            min(start + (place + 1) * step, stop),
        )
    *leading, (first, last), columns = held
    heights = torch.arange(torch.Size(shape[:-2]).numel()).view(shape[:-2])[
        tuple(slice(*part) for part in leading)
    ]
    starts = (heights.flatten() * shape[-2]).tolist()
    return Box(union((start + first, start + last) for start in starts), columns)

"""Whole matrices at one rank each, from shards on many: what is computed of a matrix runs once in the whole job.

    4 ranks have rows of the matrices A B C D E         rank 0 owns A E, rank 1 B, rank 2 C, rank 3 D
    all-to-all: rows to the owners                      rank 0 has all rows of A and E
    something is computed of the whole matrices
    all-to-all: rows of the results to who has them     replicas, too

Matrices of one shape are dealt in turn over the ranks that share them. One that lies on one rank, as that of an expert
does, stays there. The plan follows from meshes and placements alone, so that every rank knows it and nothing is agreed.
Shards may be uneven, empty, cut along rows and columns, and repeated.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from trainer.distributed.sharding.exchange import Pending, all_to_all, common_parts
from trainer.distributed.sharding.ranges import Offsets, Range, Ranges, union

AT_ONCE = 2**25
"""Elements of the matrices that a rank owns at once, if one matrix has no more."""


@dataclass(frozen=True)
class Box:
    """What a rank has of a parameter: rows, with all dimensions but the last made one, and columns."""

    rows: Ranges
    columns: Range


Boxes = Mapping[Box, tuple[int, ...]]
"""The ranks that have each box, in order."""


@dataclass(frozen=True)
class Piece:
    """A box's part of a matrix. places: (rows of the matrix, the same rows of the shard); columns: of the matrix, which
    are all of the shard; ranks: all that have it, in order."""

    places: tuple[tuple[Range, Range], ...]
    columns: Range
    ranks: tuple[int, ...]

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each block of rows."""
        return [(stop - start, self.columns[1] - self.columns[0]) for (start, stop), _ in self.places]

    @cached_property
    def elements(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)


@dataclass(frozen=True)
class Matrix:
    """parameter: its number; rows, columns: of the matrix; owner: a rank."""

    parameter: int
    rows: int
    columns: int
    pieces: tuple[Piece, ...]
    owner: int

    def sender(self, piece: Piece) -> int:
        """Return which of the ranks that have a piece sends it: the one whose number is nearest to the owner's."""
        place = bisect_left(piece.ranks, self.owner)
        return min(piece.ranks[max(place - 1, 0) : place + 1], key=lambda rank: abs(rank - self.owner))


Round = tuple[Matrix, ...]
"""Matrices of one shape that are exchanged at once."""


class Owners:
    """Sends rows of matrices to their owners, and rows of results back.

    parameters: each with the rows of its matrices, as of `matrices_of`, alike on every rank; group: the ranks that
    share them; dtype, device: of messages and whole matrices.
    """

    def __init__(
        self,
        parameters: Mapping[torch.Tensor, tuple[Ranges, ...]],
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group, self._rank, self._settings = group, group.rank(), {"dtype": dtype, "device": device}
        ranks, known = tuple(dist.get_process_group_ranks(group)), {}
        split = [(_boxes(p, ranks, known), p.shape[-1], rows) for p, rows in parameters.items()]
        self.rounds = rounds_of(split)
        """The same on every rank."""

    def owned(self, matrices: Round) -> list[Matrix]:
        """Return the matrices that this rank owns."""
        return [matrix for matrix in matrices if matrix.owner == self._rank]

    def gather(self, matrices: Round, part: Callable[[int, Range], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start sending this rank's pieces of matrices to their owners; a collective.

        part: (number of a parameter, rows of its shard) -> their values. Return what waits and returns the matrices
        that this rank owns: (number, rows, columns).
        """
        sent: dict[int, list[torch.Tensor]] = defaultdict(list)
        for matrix, piece in self._pieces(matrices):
            if matrix.sender(piece) == self._rank:
                sent[matrix.owner] += [part(matrix.parameter, rows).flatten() for _, rows in piece.places]
        arriving: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
        for place, matrix in enumerate(self.owned(matrices)):
            for piece in matrix.pieces:
                arriving[matrix.sender(piece)].append((place, piece))
        moves = any(matrix.sender(piece) != matrix.owner for matrix in matrices for piece in matrix.pieces)
        wait_for = self._exchange(sent, {rank: [p for _, p in pieces] for rank, pieces in arriving.items()}, moves)
        shape = len(self.owned(matrices)), matrices[0].rows, matrices[0].columns

        def wait() -> torch.Tensor:
            blocks, whole = wait_for(), torch.empty(shape, **self._settings)
            for rank in sorted(arriving):
                for place, piece in arriving[rank]:
                    for (start, stop), _ in piece.places:
                        whole[place, start:stop, slice(*piece.columns)] = next(blocks)
            return whole

        return wait

    def give_back(
        self, matrices: Round, results: torch.Tensor
    ) -> Callable[[], Iterator[tuple[Matrix, Range, torch.Tensor]]]:
        """Start sending results to the ranks that have the rows, replicas too; a collective.

        results: (number, rows, columns) of the matrices that this rank owns. Return what waits and yields this rank's
        part, by blocks: (matrix, rows of its parameter's shard, their values).
        """
        sent: dict[int, list[torch.Tensor]] = defaultdict(list)
        for result, matrix in zip(results, self.owned(matrices), strict=True):
            for piece in matrix.pieces:
                blocks = [result[start:stop, slice(*piece.columns)].flatten() for (start, stop), _ in piece.places]
                for rank in piece.ranks:
                    sent[rank] += blocks
        arriving: dict[int, list[tuple[Matrix, Piece]]] = defaultdict(list)
        for matrix, piece in self._pieces(matrices):
            arriving[matrix.owner].append((matrix, piece))
        moves = any(piece.ranks != (matrix.owner,) for matrix in matrices for piece in matrix.pieces)
        wait_for = self._exchange(sent, {rank: [p for _, p in pieces] for rank, pieces in arriving.items()}, moves)

        def wait() -> Iterator[tuple[Matrix, Range, torch.Tensor]]:
            blocks = wait_for()
            for rank in sorted(arriving):
                for matrix, piece in arriving[rank]:
                    for _, rows in piece.places:
                        yield matrix, rows, next(blocks)

        return wait

    def _pieces(self, matrices: Round) -> Iterator[tuple[Matrix, Piece]]:
        """Yield what this rank has of matrices."""
        for matrix in matrices:
            for piece in matrix.pieces:
                place = bisect_left(piece.ranks, self._rank)
                if place < len(piece.ranks) and piece.ranks[place] == self._rank:
                    yield matrix, piece

    def _exchange(
        self, sent: Mapping[int, list[torch.Tensor]], arriving: Mapping[int, list[Piece]], moves: bool
    ) -> Callable[[], Iterator[torch.Tensor]]:
        """Start the exchange of blocks by rank. Return what waits, and yields those that arrived, by rank.

        moves: whether some rank of the group sends something to another one; it is the same on every rank.
        """
        blocks = [block for rank in sorted(sent) for block in sent[rank]]
        received, pending = torch.cat([block.to(**self._settings) for block in blocks or [torch.empty(0)]]), Pending()
        if moves:
            sizes = [sum(block.numel() for block in sent.get(rank, ())) for rank in range(self._group.size())]
            wanted = [sum(piece.elements for piece in arriving.get(rank, ())) for rank in range(self._group.size())]
            received, pending = all_to_all(received, sizes, wanted, self._group, kind="owners")

        def wait() -> Iterator[torch.Tensor]:
            pending.wait()
            shapes = [shape for rank in sorted(arriving) for piece in arriving[rank] for shape in piece.shapes]
            flat = received.split([rows * columns for rows, columns in shapes])
            return (block.view(shape) for block, shape in zip(flat, shapes, strict=True))

        return wait


def rounds_of(parameters: Sequence[tuple[Boxes, int, tuple[Ranges, ...]]]) -> list[Round]:
    """Return all matrices with their owners, by shape, largest first, in rounds of about `AT_ONCE` elements an owner.

    parameters: of each its boxes, its columns, and the rows of its matrices.
    """
    known: dict[Hashable, tuple[Piece, ...]] = {}
    shapes: dict[tuple[int, int], dict[tuple[int, ...], list[tuple[int, tuple[Piece, ...]]]]] = {}
    for number, (boxes, columns, matrices) in enumerate(parameters):
        for rows in matrices:
            if (id(boxes), rows) not in known:  # layers have the same
                known[id(boxes), rows] = _pieces_of(boxes, rows)
            pieces = known[id(boxes), rows]
            sharing = tuple(sorted(rank for piece in pieces for rank in piece.ranks))
            shape = sum(stop - start for start, stop in rows), columns
            shapes.setdefault(shape, {}).setdefault(sharing, []).append((number, pieces))
    rounds, dealt = [], defaultdict(int)
    for shape in sorted(shapes, key=lambda sizes: -sizes[0] * sizes[1]):
        each = max(1, AT_ONCE // (shape[0] * shape[1]))
        turns: dict[int, list[Matrix]] = defaultdict(list)
        for sharing, matrices in shapes[shape].items():
            for place, (number, pieces) in enumerate(matrices):
                owner = sharing[dealt[sharing] % len(sharing)]
                dealt[sharing] += 1
                turns[place // (each * len(sharing))].append(Matrix(number, *shape, pieces, owner))
        rounds += [tuple(turns[turn]) for turn in sorted(turns)]
    return rounds


def _pieces_of(boxes: Boxes, rows: Ranges) -> tuple[Piece, ...]:
    """Return the parts of a matrix, the rows `rows` of a parameter, that boxes have."""
    pieces = ((tuple(common_parts(rows, Offsets(box.rows))), box, ranks) for box, ranks in boxes.items())
    return tuple(
        Piece(places, box.columns, ranks) for places, box, ranks in pieces if places and box.columns[0] < box.columns[1]
    )


def _boxes(parameter: torch.Tensor, ranks: tuple[int, ...], known: dict[Hashable, Boxes]) -> Boxes:
    """Return what each of the ranks, by its number among them, has of a parameter.

    Raises:
        ValueError: the parameter is on other ranks.
    """
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        mesh_shape, grid, placements = (1,) * bool(ranks), [ranks[0]], ()
    else:
        mesh_shape, placements = tuple(parameter.device_mesh.shape), parameter.placements
        grid = parameter.device_mesh.mesh.flatten().tolist()
    key = shape, mesh_shape, tuple(grid), placements
    if key not in known:
        if sorted(grid) != sorted(ranks):
            raise ValueError(f"a parameter lies on the ranks {grid}, and its owners are to be among {list(ranks)}")
        numbers = {rank: number for number, rank in enumerate(ranks)}
        found: dict[Box, list[int]] = defaultdict(list)
        for coordinate, rank in zip(product(*map(range, mesh_shape)), grid, strict=True):
            found[_box(shape, mesh_shape, coordinate, placements)].append(numbers[rank])
        known[key] = {box: tuple(sorted(numbers)) for box, numbers in found.items()}
    return known[key]


def _box(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """Return what a rank has: tensor parallelism cuts before FSDP, whose placement says so by its stride."""
    held = [(0, length) for length in shape]
    cuts = [cut for cut in zip(placements, mesh_shape, coordinate, strict=False) if hasattr(cut[0], "dim")]
    for placement, parts, place in sorted(cuts, key=lambda cut: hasattr(cut[0], "split_factor")):
        start, stop = held[placement.dim]
        step = -(-(stop - start) // parts)
        held[placement.dim] = min(start + place * step, stop), min(start + (place + 1) * step, stop)
    *leading, (first, last), columns = held
    strides = [shape[i + 1 : -1] for i in range(len(leading))]
    rows = []
    for places in product(*(range(*part) for part in leading)):
        before = sum(place * torch.Size(sizes).numel() for place, sizes in zip(places, strides, strict=True))
        rows.append((before + first, before + last))
    return Box(union(part for part in rows if part[0] < part[1]), columns)

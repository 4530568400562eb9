"""What a rank computes of linear attention between two exchanges: the recurrence over its own fragments.

A pass gives the maps of the fragments, then outputs from the states before them. In the backward it gives biases, then
gradients from those of the states behind. `ChunkedPass` is plain PyTorch; `linear_kernels.KernelPass` calls kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from longshard.context.execution.linear_chunks import (
    CHUNK,
    LONGEST_RUN,
    Chunks,
    Fragments,
    Given,
    Inputs,
    Tokens,
    joined,
    stacked,
    through_runs,
)
from longshard.context.execution.linear_pairs import BLOCK
from longshard.context.linear_scan import InOrder, aligned, fragments_of
from longshard.context.live import resolve
from longshard.context.planning.options import ContextParallelError
from longshard.sharding.rows import Axis, fetch
from longshard.sharding.tensors import wide_type


@dataclass(frozen=True)
class Place:
    """The fragments of a rank: runs of tokens that follow one another.

    lengths: of this rank's fragments; size: tokens of a chunk; axis: a row for each fragment of all ranks, in the order
    of the tokens, None for a whole sequence; rows: the rows of all ranks as they are given, and as they are computed
    with, which differ with deterministic algorithms.
    """

    lengths: tuple[int, ...]
    size: int
    device_type: str
    axis: Axis | None = None
    rows: tuple[Axis, Axis] | None = None

    @classmethod
    def of(cls, plan: torch.Tensor | None, q: torch.Tensor) -> "Place":
        if plan is None:
            return cls((q.shape[1],) if q.shape[1] else (), _size(q.shape[1]), q.device.type)
        live, _ = resolve(plan)
        live.calls += 1
        if live.chunk is not None:
            raise ContextParallelError(
                "linear attention got a sequence in chunks, whose states do not wait between chunks; give it whole"
            )
        rank = live.rank
        if q.shape[1] != (rows := live.layout.local_length(rank)):
            raise ContextParallelError(
                f"linear attention got {q.shape[1]} rows of the sequence and its plan has {rows} for this rank; cut "
                "the inputs by naming them in `context_parallel(buffers=...)`"
            )
        layout = live.layout
        group = live.mesh.get_group()
        rows = None
        if torch.are_deterministic_algorithms_enabled():
            layout = aligned(live.layout, CHUNK)
            rows = Axis(live.layout, group), Axis(layout, group)
        lengths = tuple(stop - start for start, stop in layout.ranges[rank])
        size = _size(max(lengths, default=1) if rows is None else layout.length)
        return cls(lengths, size, q.device.type, Axis(fragments_of(layout), group), rows)

    @property
    def sends(self) -> bool:
        """Whether some rank needs the state behind another one's fragment."""
        return self.axis is not None and self.axis.degree > 1 and self.axis.layout.length > 1

    @property
    def has_maps(self) -> bool:
        """Whether maps of fragments are sent, instead of states in order."""
        return self.sends and self.rows is None

    @cached_property
    def fragments(self) -> Fragments:
        """The chunks of each fragment."""
        return list(
            pairwise(
                accumulate((-(-length // self.size) for length in self.lengths), initial=0)
            )
        )

    @cached_property
    def run(self) -> int:
        """Chunks of a run of a fragment; see `Chunks`."""
        longest = max((end - first for first, end in self.fragments), default=1)
        most = LONGEST_RUN.get(self.device_type, longest)
        return (
            longest
            if longest <= most or torch.are_deterministic_algorithms_enabled()
            else math.isqrt(longest)
        )

    @property
    def has_runs(self) -> bool:
        """Whether some fragment has several runs."""
        return any(end - first > self.run for first, end in self.fragments)

    def ends(self, zeros: torch.Tensor, *, reverse: bool) -> Given:
        """Return zeros for all fragments, (B, F, H, K, V), or what goes from fragment to fragment in order."""
        known = Given(zeros)
        return (
            known
            if self.has_maps or not self.sends
            else InOrder(known.zero, self.axis, reverse=reverse)
        )

    def _moved(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Return rows (B, S, ...) as they are computed with, or back as they were given; collective."""
        if self.rows is None:
            return x
        source, target = self.rows[::-1] if back else self.rows
        return fetch(x, source, target.layout.ranges, 1)

    def chunked(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H, D) -> (B, H, N, C, D), each fragment filled up with zeros at its end."""
        x = self._moved(x)
        parts = [
            F.pad(part, (0, 0, 0, 0, 0, -part.shape[1] % self.size))
            for part in x.split(list(self.lengths), 1)
        ]
        rows = torch.cat(parts, 1) if parts else x
        chunks = rows.shape[1] // self.size
        return rows.unflatten(1, (chunks, self.size)).permute(0, 3, 1, 2, 4).contiguous()

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, N, C, D) -> (B, S, H, D), without what fills the fragments up."""
        rows = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
        both = zip(self.fragments, self.lengths, strict=True)
        parts = [rows[:, first * self.size :][:, :length] for (first, _), length in both]
        return self._moved(torch.cat(parts, 1) if parts else rows, back=True)


class ChunkedPass:
    """In chunks, by the products of `execution/linear_chunks.py`.

    shape: (B, F, H, K, V), of the states before the F fragments of a rank, which are in float32 at least.
    """

    def __init__(self, x: Tokens, place: Place) -> None:
        self._place = place
        self._heads = x.q.shape[2]
        self._scale = x.scale
        self._chunks = Chunks(_inputs(x, place), place.fragments, place.run)
        k = self._chunks.x.k
        v = self._chunks.x.v
        self.shape = k.shape[0], len(place.lengths), k.shape[1], k.shape[-1], v.shape[-1]

    @cached_property
    def zeros(self) -> torch.Tensor:
        return self._chunks.x.k.new_zeros(self.shape)

    @cached_property
    def _of_runs(self) -> list[torch.Tensor]:
        """The maps of the runs of each fragment."""
        return self._chunks.maps()

    def _maps_of_runs(self) -> Sequence[torch.Tensor | None]:
        return self._of_runs if self._place.has_runs else [None] * len(self._place.lengths)

    def maps(self) -> torch.Tensor:
        """Return the affine maps of the fragments, [bias | transition]: (B, F, H, K, V + K), or V + 1 diagonal."""
        x = self._chunks.x
        v_dim = self.shape[-1]
        columns = v_dim + (1 if x.beta is None else x.k.shape[-1])
        like = x.k.new_empty(*x.k.shape[:2], x.k.shape[-1], columns)
        return stacked([joined(maps, v_dim) for maps in self._of_runs], like)

    def forward(self, ends: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return outputs, (B, S, H, V), the states before fragments, and the state behind the last one."""
        before, behind = self._chunks.states(ends, self._maps_of_runs())
        out = self._place.rows_of(self._chunks.outputs(before))
        firsts = [before[:, :, first] for first, _ in self._place.fragments]
        entries = stacked(firsts, ends.zero)
        last = behind[:, -1] if behind.shape[1] else ends.zero
        return out, entries, last

    def begin_backward(self, dout: torch.Tensor, entries: torch.Tensor) -> None:
        """Take the gradient of the outputs, (B, S, H, V), and the states before fragments."""
        self._before, _ = self._chunks.states(Given(entries), self._maps_of_runs())
        self._dout = self._place.chunked(dout.to(entries.dtype))
        self._read = self._chunks.read(self._dout)

    @cached_property
    def _biases_of_runs(self) -> list[torch.Tensor]:
        return self._chunks.biases(self._read)

    @cached_property
    def _maps_back(self) -> Sequence[torch.Tensor | None]:
        """The maps of runs with the biases of the backward, see `_maps_of_runs`."""
        if not self._place.has_runs:
            return self._maps_of_runs()
        v_dim = self.shape[-1]
        both = zip(self._biases_of_runs, self._of_runs, strict=True)
        return [torch.cat((bias, maps[..., v_dim:]), -1) for bias, maps in both]

    def biases(self) -> torch.Tensor:
        """Return the gradients of the states before fragments, of `shape`, if those of the states behind are zero."""
        zero = Given(self.zeros).zero
        if not self._place.has_runs:
            return stacked([bias.squeeze(2) for bias in self._biases_of_runs], zero)
        maps = self._maps_back
        return stacked([through_runs(zero, x, reverse=True)[1] for x in maps], zero)

    def backward(self, ends: Given) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k, v, log_decay and, if there is one, beta, or anything in its place."""
        place = self._place
        chunks = self._chunks
        dadded, dbehind = chunks.adjoint(self._read, ends, self._maps_back)
        found = chunks.gradients(self._dout, self._before, dadded, dbehind)
        dq, dk, dv = (place.rows_of(x) for x in (found.q * self._scale, found.k, found.v))
        ddecay = place.rows_of(found.decay.flip(3).cumsum(3).flip(3))
        dbeta = dv if found.beta is None else place.rows_of(found.beta)
        dq, dk = (x.unflatten(2, (self._heads, -1)).sum(3) for x in (dq, dk))
        return dq, dk, dv, ddecay, dbeta


def _inputs(x: Tokens, place: Place) -> Inputs:
    """Return the tokens in chunks."""
    dtype = wide_type(x.v.dtype)
    shared = x.v.shape[2] // x.q.shape[2]
    q, k = (place.chunked(part.to(dtype).repeat_interleave(shared, 2)) for part in (x.q, x.k))
    decay = x.log_decay.to(dtype)
    decay = decay if decay.ndim == 4 else decay.unsqueeze(-1)
    document = None
    if x.positions is not None:
        document = (
            place.chunked((x.positions == 0).long()[..., None, None]).squeeze(-1).cumsum(-1)
        )
    return Inputs(
        q * x.scale,
        k,
        place.chunked(x.v.to(dtype)),
        place.chunked(decay).cumsum(3),
        None if x.beta is None else place.chunked(x.beta.to(dtype).unsqueeze(-1)),
        document,
    )


def _size(tokens: int) -> int:
    """Return the tokens of a chunk for fragments of at most so many: blocks by a power of two."""
    return min(CHUNK, BLOCK << (-(-tokens // BLOCK) - 1).bit_length())

"""The part of linear attention that one rank computes between two exchanges: the recurrence over its own fragments.

A pass computes the maps of the fragments, then the outputs from the states before them. In the backward it computes
biases, then gradients from the gradients of the states after the fragments. `ChunkedPass` is plain PyTorch;
`linear_kernels.KernelPass` calls kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from longshard.context.execution.linear_chunks import (
    CHUNK,
    LONGEST_RUN,
    Chunks,
    Fragments,
    Inputs,
    Tokens,
)
from longshard.context.execution.linear_kernels import KernelPass
from longshard.context.execution.linear_pairs import BLOCK
from longshard.context.execution.linear_states import KnownStates, joined, stacked, through_runs
from longshard.context.linear_scan import InOrder, aligned, fragments_of, states_before
from longshard.context.live import resolve
from longshard.context.planning.options import ContextParallelError
from longshard.sharding.rows import Axis, fetch
from longshard.sharding.tensors import wide_type


@dataclass(frozen=True)
class Place:
    """The fragments of a rank: runs of tokens that follow one another.

    Attributes:
        lengths: The number of tokens of each fragment of this rank.
        size: Number of tokens of a chunk.
        device_type: The type of the device.
        axis: Has a row for each fragment of all ranks, in the order of the tokens; None for a whole sequence.
        rows: The input rows of all ranks, and the rows that they compute with, which differ with deterministic
            algorithms; None if they are the same.
    """

    lengths: tuple[int, ...]
    size: int
    device_type: str
    axis: Axis | None = None
    rows: tuple[Axis, Axis] | None = None

    @classmethod
    def of(cls, plan: Tensor | None, q: Tensor) -> "Place":
        """Return the fragments of this rank. Counts a call of the plan.

        Args:
            plan: The handle, (B,) int64; None if the rows are the whole sequence.
            q: The queries of this rank's rows, (B, S, H, K).

        Raises:
            ContextParallelError: The plan is for a sequence in chunks, or did not cut the inputs.
        """
        tokens = q.shape[1]
        if plan is None:
            return cls((tokens,) if tokens else (), _size(tokens), q.device.type)
        live, _ = resolve(plan)
        live.calls += 1
        if live.chunk is not None:
            raise ContextParallelError(
                "linear attention got a sequence in chunks, but its states do not wait between chunks; give it whole"
            )
        rank = live.rank
        if tokens != (rows := live.layout.local_length(rank)):
            raise ContextParallelError(
                f"linear attention got {tokens} rows of the sequence and its plan has {rows} for this rank; "
                "cut the inputs by naming them in `context_parallel(buffers=...)`"
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
        """Whether some rank needs the state after a fragment of another rank."""
        return self.axis is not None and self.axis.degree > 1 and self.axis.layout.length > 1

    @property
    def has_maps(self) -> bool:
        """Whether ranks send the maps of fragments, instead of states one after another."""
        return self.sends and self.rows is None

    @cached_property
    def fragments(self) -> Fragments:
        """The range of each fragment among this rank's chunks, (first, end)."""
        return list(
            pairwise(
                accumulate((-(-length // self.size) for length in self.lengths), initial=0)
            )
        )

    @cached_property
    def run(self) -> int:
        """The number of chunks of a run of a fragment; see `Chunks`."""
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

    def ends(
        self, local: "ChunkedPass | KernelPass", maps: Tensor | None, *, reverse: bool
    ) -> KnownStates:
        """Return the states before fragments: computed by the maps, zeros, or states that `InOrder` sends and receives.

        If maps are given, it is a collective. The states of `InOrder` are sent and received at their use.

        Args:
            local: The pass over these fragments, whose states have the shape (B, F, H, K, V).
            maps: The maps of the fragments, (B, F, H, K, V + width); None if ranks send no maps.
            reverse: Whether states go from the last fragment to the first.
        """
        if maps is not None:
            return KnownStates(states_before(maps, self.axis, local.shape[-1], reverse=reverse))
        known = KnownStates(local.zeros)
        return InOrder(known.zero, self.axis, reverse=reverse) if self.sends else known

    def _moved(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Return input rows, (B, S, ...), as the rows to compute with; `back`: the opposite.

        With deterministic algorithms it is a collective, which moves the cuts to multiples of a chunk. Else it returns
        x.
        """
        if self.rows is None:
            return x
        source, target = self.rows[::-1] if back else self.rows
        return fetch(x, source, target.layout.ranges, 1)

    def chunked(self, x: Tensor) -> Tensor:
        """Return rows in chunks, (B, H, N, C, D); each fragment is filled up with zeros at its end. See `_moved`.

        Args:
            x: The rows, (B, S, H, D).
        """
        x = self._moved(x)
        parts = [
            F.pad(part, (0, 0, 0, 0, 0, -part.shape[1] % self.size))
            for part in x.split(list(self.lengths), 1)
        ]
        rows = torch.cat(parts, 1) if parts else x
        chunks = rows.shape[1] // self.size
        return rows.unflatten(1, (chunks, self.size)).permute(0, 3, 1, 2, 4).contiguous()

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the rows of chunks, (B, S, H, D), without the zeros that fill up the fragments. See `_moved`.

        Args:
            x: The chunks, (B, H, N, C, D).
        """
        rows = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
        both = zip(self.fragments, self.lengths, strict=True)
        parts = [rows[:, first * self.size :][:, :length] for (first, _), length in both]
        return self._moved(torch.cat(parts, 1) if parts else rows, back=True)


class ChunkedPass:
    """A pass in chunks, by the products of `execution/linear_chunks.py`.

    `shape` is (B, F, H, K, V), the shape of the states before the F fragments of a rank, which are in float32 at least.

    Args:
        x: The tokens of this rank.
        place: The fragments of this rank.
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
    def zeros(self) -> Tensor:
        """Zeros in the shape of the states, (B, F, H, K, V)."""
        return self._chunks.x.k.new_zeros(self.shape)

    @cached_property
    def _run_maps(self) -> list[Tensor]:
        """The maps of the runs of each fragment."""
        return self._chunks.maps()

    def _maps_if_runs(self) -> Sequence[Tensor | None]:
        """Return the maps of the runs of each fragment; None for each if all fragments are one run."""
        return self._run_maps if self._place.has_runs else [None] * len(self._place.lengths)

    def maps(self) -> Tensor:
        """Return the affine maps of the fragments, [bias | transition]: (B, F, H, K, V + K).

        A diagonal transition is one column: (B, F, H, K, V + 1).
        """
        x = self._chunks.x
        v_dim = self.shape[-1]
        columns = v_dim + (1 if x.beta is None else x.k.shape[-1])
        like = x.k.new_empty(*x.k.shape[:2], x.k.shape[-1], columns)
        return stacked([joined(maps, v_dim) for maps in self._run_maps], like)

    def forward(self, ends: KnownStates) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, (B, S, H, V), the states before fragments, and the state after the last fragment.

        `ends` gets the state after each fragment, and may exchange states with other ranks. With deterministic
        algorithms it is a collective: then the outputs go back to the ranks of the rows. The states before fragments
        are (B, F, H, K, V), as `begin_backward` takes them. Without a chunk, the last state is the state of zeros.

        Args:
            ends: The states before fragments.
        """
        before, after = self._chunks.states(ends, self._maps_if_runs())
        out = self._place.rows_of(self._chunks.outputs(before))
        firsts = [before[:, :, first] for first, _ in self._place.fragments]
        entries = stacked(firsts, ends.zero)
        last = after[:, -1] if after.shape[1] else ends.zero
        return out, entries, last

    def begin_backward(self, dout: Tensor, entries: Tensor) -> None:
        """Begin the backward: keep in this object what its next steps use.

        These are the states before chunks, the chunks of `dout` in the data type of `entries`, and their readings.

        Args:
            dout: The gradient of the outputs, (B, S, H, V).
            entries: The states before fragments, (B, F, H, K, V).
        """
        self._before, _ = self._chunks.states(KnownStates(entries), self._maps_if_runs())
        self._dout = self._place.chunked(dout.to(entries.dtype))
        self._read = self._chunks.read(self._dout)

    @cached_property
    def _run_biases(self) -> list[Tensor]:
        """The gradients of the states before the runs of each fragment, if the gradients after them are zero."""
        return self._chunks.biases(self._read)

    @cached_property
    def _maps_back(self) -> Sequence[Tensor | None]:
        """The maps of the runs of each fragment with the biases of the backward, see `_maps_if_runs`."""
        if not self._place.has_runs:
            return self._maps_if_runs()
        v_dim = self.shape[-1]
        both = zip(self._run_biases, self._run_maps, strict=True)
        return [torch.cat((bias, maps[..., v_dim:]), -1) for bias, maps in both]

    def biases(self) -> Tensor:
        """Return the gradients of the states before fragments, of `shape`, as if the states after them got none."""
        zero = KnownStates(self.zeros).zero
        if not self._place.has_runs:
            return stacked([bias.squeeze(2) for bias in self._run_biases], zero)
        maps = self._maps_back
        return stacked([through_runs(zero, x, reverse=True)[1] for x in maps], zero)

    def backward(self, ends: KnownStates) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, log_decay and beta; without beta, the last one has no meaning.

        With deterministic algorithms it is a collective, as `forward`.

        Args:
            ends: The gradients of the states after fragments.
        """
        place = self._place
        chunks = self._chunks
        dadded, dafter = chunks.adjoint(self._read, ends, self._maps_back)
        dx = chunks.gradients(self._dout, self._before, dadded, dafter)
        dq, dk, dv = (place.rows_of(x) for x in (dx.q * self._scale, dx.k, dx.v))
        ddecay = place.rows_of(dx.decay.flip(3).cumsum(3).flip(3))
        dbeta = dv if dx.beta is None else place.rows_of(dx.beta)
        dq, dk = (x.unflatten(2, (self._heads, -1)).sum(3) for x in (dq, dk))
        return dq, dk, dv, ddecay, dbeta


def _inputs(x: Tokens, place: Place) -> Inputs:
    """Return the tokens in chunks, in float32 at least: q with the scale, and decays as running sums within a chunk."""
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
    """Return the number of tokens of a chunk, for fragments of at most `tokens` tokens: BLOCK times a power of two."""
    return min(CHUNK, BLOCK << (-(-tokens // BLOCK) - 1).bit_length())

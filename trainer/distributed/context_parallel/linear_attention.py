"""Linear attention over a sequence that many ranks share, as one operator: a scan of states over the ranks.

A run of tokens that follow one another, a fragment, changes the state of a head by an affine map, S -> M S + B. Each
rank computes the map of each of its fragments. One exchange brings it the maps of all fragments before its own; it
folds them in the order of the tokens, and runs its own tokens from there:

    head_tail, 4 pieces on 2 ranks:   rank 0: fragments 0 3    wants the maps of 0 1 2, of which it has 0
                                      rank 1: fragments 1 2    wants the maps of 0 and 1

Bytes do not depend on the length: a map has K x (V + K) numbers a head, or K x (V + 1) without erasure. The backward is
the same from the end: a fragment's gradient of its entry state is M' times that of its exit, plus a bias. Maps and
states have float32 at least. See arXiv 2404.02882 (LASP-2 is 2502.07563) for simple decays.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from trainer.distributed.context_parallel.attention import add_autocast_rule
from trainer.distributed.context_parallel.execution.linear_chunks import (
    BLOCK,
    CHUNK,
    LONGEST_RUN,
    Chunks,
    Ends,
    Fragments,
    Inputs,
    joined,
    stacked,
    through_runs,
)
from trainer.distributed.context_parallel.linear_scan import Given, InOrder, aligned, fragments_of, states_before
from trainer.distributed.context_parallel.live import resolve
from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.distributed.sharding.rows import Axis, fetch


@torch.library.custom_op("trainer::linear_attention", mutates_args=())
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    plan: torch.Tensor | None,
    positions: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the recurrence of `execution/linear_chunks.py` over the whole sequence; a collective over the plan's mesh.

    q, k: (B, S, H, K), S this rank's rows; v: (B, S, G, V), H divides G; log_decay: (B, S, G) or (B, S, G, K), at most
    0; beta: (B, S, G), of the delta rule, None for no erasure; plan: the handle, (B,) int64, None if the rows are the
    whole sequence; positions: (B, S), 0 where a document begins, None for one document.
    -> scale times the outputs, as v; bytes of what the backward needs of the states; the state behind this
    rank's last row, (B, G, K, V). States are in float32 at least. Gradients flow through the outputs alone.

    Raises:
        ContextParallelError: inputs that do not fit each other, or a plan that did not cut them.
    """
    place = _Place.of(plan, q)
    chunks = Chunks(_inputs(q, k, v, log_decay, beta, positions, place, scale), place.run)
    of_runs = chunks.maps(place.fragments) if place.has_maps or place.has_runs else None
    maps = place.joined(of_runs, chunks) if place.has_maps else None
    ends = place.entries(chunks, maps)
    before, behind = chunks.states(place.fragments, ends, of_runs if place.has_runs else None)
    out = _rows(chunks.outputs(before), place).to(v.dtype)
    entries = stacked([before[:, :, first] for first, _ in place.fragments], ends.zero)
    kept = [entries] if maps is None else [entries, maps[..., v.shape[3] :]]
    last = behind[:, -1] if behind.shape[1] else entries.new_zeros(entries.shape[0], *entries.shape[2:])
    return out, torch.cat([x.reshape(-1) for x in kept]).view(torch.uint8), last.clone()


@torch.library.custom_op("trainer::linear_attention_backward", mutates_args=())
def _linear_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    plan: torch.Tensor | None,
    positions: torch.Tensor | None,
    kept: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v, log_decay and beta ((0,) without one)."""
    place = _Place.of(plan, q)
    chunks = Chunks(_inputs(q, k, v, log_decay, beta, positions, place, scale), place.run)
    v_dim, shape = v.shape[3], (q.shape[0], len(place.lengths), v.shape[2], q.shape[3])
    size = math.prod(shape) * v_dim
    kept = kept.view(torch.promote_types(v.dtype, torch.float32))
    entries, transitions = kept[:size].view(*shape, v_dim), kept[size:]
    of_runs = chunks.maps(place.fragments) if place.has_runs else None
    before, _ = chunks.states(place.fragments, Given(entries), of_runs)
    dout = _chunked(dout.to(before.dtype), place)
    read, exits = chunks.read(dout), place.ends(torch.zeros_like(entries), reverse=True)
    if place.has_maps or place.has_runs:
        biases = chunks.biases(place.fragments, read)
        if of_runs is not None:
            of_runs = [torch.cat((bias, x[..., v_dim:]), -1) for bias, x in zip(biases, of_runs, strict=True)]
        if place.has_maps:
            if of_runs is not None:
                biases = [through_runs(exits.zero, x, reverse=True)[1] for x in of_runs]
            else:
                biases = [bias.squeeze(2) for bias in biases]
            maps = torch.cat(
                (stacked(biases, exits.zero), transitions.view(*shape, 1 if beta is None else q.shape[3])), -1
            )
            exits = Given(states_before(maps, place.axis, v_dim, reverse=True))
    dadded, dbehind = chunks.adjoint(place.fragments, read, exits, of_runs)
    found = chunks.gradients(dout, before, dadded, dbehind)
    dq, dk, dv = (_rows(x, place) for x in (found.q * scale, found.k, found.v))
    ddecay = _rows(found.decay.flip(3).cumsum(3).flip(3), place)
    dbeta = dv.new_empty(0) if beta is None else _rows(found.beta, place).view(beta.shape)
    dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3) for x in (dq, dk))
    given = q, k, v, log_decay, v if beta is None else beta
    found = dq, dk, dv, ddecay.view(log_decay.shape), dbeta
    return tuple(x.to(like.dtype) for x, like in zip(found, given, strict=True))


@linear_attention.register_fake
def _(q, k, v, log_decay, beta, plan, positions, scale):
    dtype = torch.promote_types(v.dtype, torch.float32)
    last = v.new_empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    size = math.prod(last.shape) * last.itemsize if plan is None else torch.library.get_ctx().new_dynamic_size()
    return v.new_empty(v.shape), v.new_empty(size, dtype=torch.uint8), last


@_linear_attention_backward.register_fake
def _(dout, q, k, v, log_decay, beta, plan, positions, kept, scale):
    dbeta = v.new_empty(0) if beta is None else beta.new_empty(beta.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, log_decay)), dbeta


def _save(ctx, inputs, output) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.scale = scale


def _differentiate(ctx, dout, _dkept, _dlast):
    *inputs, kept = ctx.saved_tensors
    *gradients, dbeta = _linear_attention_backward(dout, *inputs, kept, ctx.scale)
    return *gradients, dbeta if inputs[4] is not None else None, None, None, None


linear_attention.register_autograd(_differentiate, setup_context=_save)

for _device_type in ("cpu", "cuda"):
    add_autocast_rule(torch.ops.trainer.linear_attention.default, _device_type, casts=())
    add_autocast_rule(torch.ops.trainer.linear_attention_backward.default, _device_type, casts=())


# ---- where the tokens of a rank are


@dataclass(frozen=True)
class _Place:
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
    def of(cls, plan: torch.Tensor | None, q: torch.Tensor) -> "_Place":
        if plan is None:
            return cls((q.shape[1],) if q.shape[1] else (), _size(q.shape[1]), q.device.type)
        live, _ = resolve(plan)
        live.calls += 1
        if live.chunk is not None:
            raise ContextParallelError(
                "linear attention got a sequence in chunks, whose states do not wait between chunks; give it whole"
            )
        rank = live.mesh.get_local_rank()
        if q.shape[1] != (rows := live.layout.local_length(rank)):
            raise ContextParallelError(
                f"linear attention got {q.shape[1]} rows of the sequence and its plan has {rows} for this rank; cut "
                "the inputs by naming them in `context_parallel(buffers=...)`"
            )
        layout, group, rows = live.layout, live.mesh.get_group(), None
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
        return list(pairwise(accumulate((-(-length // self.size) for length in self.lengths), initial=0)))

    @cached_property
    def run(self) -> int:
        """Chunks of a run of a fragment; see `Chunks`."""
        longest = max((end - first for first, end in self.fragments), default=1)
        most = LONGEST_RUN.get(self.device_type, longest)
        return longest if longest <= most or torch.are_deterministic_algorithms_enabled() else math.isqrt(longest)

    @property
    def has_runs(self) -> bool:
        """Whether some fragment has several runs."""
        return any(end - first > self.run for first, end in self.fragments)

    def joined(self, of_runs: list[torch.Tensor], chunks: Chunks) -> torch.Tensor:
        """Return the maps of this rank's fragments, (B, F, H, K, V + width), of those of their runs."""
        x = chunks.x
        columns = x.v.shape[-1] + (1 if x.beta is None else x.k.shape[-1])
        like = x.k.new_empty(*x.k.shape[:2], x.k.shape[-1], columns)
        return stacked([joined(maps, x.v.shape[-1]) for maps in of_runs], like)

    def entries(self, chunks: Chunks, maps: torch.Tensor | None) -> Ends:
        """Return the states before this rank's fragments, of all maps before if there are maps; collective."""
        x = chunks.x
        if maps is not None:
            return Given(states_before(maps, self.axis, x.v.shape[-1], reverse=False))
        shape = x.k.shape[0], len(self.lengths), x.k.shape[1], x.k.shape[-1], x.v.shape[-1]
        return self.ends(x.k.new_zeros(shape), reverse=False)

    def ends(self, zeros: torch.Tensor, *, reverse: bool) -> Ends:
        """Return zeros for all fragments, (B, F, H, K, V), or what goes from fragment to fragment in order."""
        known = Given(zeros)
        return known if self.has_maps or not self.sends else InOrder(known.zero, self.axis, reverse=reverse)

    def moved(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Return rows (B, S, ...) as they are computed with, or back as they were given; collective."""
        if self.rows is None:
            return x
        source, target = self.rows[::-1] if back else self.rows
        return fetch(x, source, target.layout.ranges, 1)


def _inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    positions: torch.Tensor | None,
    place: _Place,
    scale: float,
) -> Inputs:
    """Check the inputs of the operator, and return them in chunks."""
    alike = q.ndim == v.ndim == 4 and q.shape == k.shape and q.shape[:2] == v.shape[:2] and v.shape[2] % q.shape[2] == 0
    decays = (v.shape[:3], (*v.shape[:3], q.shape[-1]))
    if not alike or log_decay.shape not in decays or (beta is not None and beta.shape != v.shape[:3]):
        raise ContextParallelError(
            f"linear attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, decays "
            f"{tuple(log_decay.shape)} and beta {None if beta is None else tuple(beta.shape)}; give (B, S, H, K) "
            "twice, (B, S, G, V) with H dividing G, (B, S, G) or (B, S, G, K), and (B, S, G)"
        )
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = (_chunked(x.to(dtype).repeat_interleave(v.shape[2] // x.shape[2], 2), place) for x in (q, k))
    decay = log_decay.to(dtype) if log_decay.ndim == 4 else log_decay.to(dtype).unsqueeze(-1)
    document = None
    if positions is not None:
        document = _chunked((positions == 0).long()[..., None, None], place).squeeze(-1).cumsum(-1)
    return Inputs(
        q * scale,
        k,
        _chunked(v.to(dtype), place),
        _chunked(decay, place).cumsum(3),
        None if beta is None else _chunked(beta.to(dtype).unsqueeze(-1), place),
        document,
    )


def _size(tokens: int) -> int:
    """Return the tokens of a chunk for fragments of at most so many: blocks by a power of two."""
    return min(CHUNK, BLOCK << (-(-tokens // BLOCK) - 1).bit_length())


def _chunked(x: torch.Tensor, place: _Place) -> torch.Tensor:
    """(B, S, H, D) -> (B, H, N, C, D), each fragment filled up with zeros at its end."""
    x = place.moved(x)
    parts = [F.pad(part, (0, 0, 0, 0, 0, -part.shape[1] % place.size)) for part in x.split(list(place.lengths), 1)]
    rows = torch.cat(parts, 1) if parts else x
    chunks = rows.shape[1] // place.size
    return rows.unflatten(1, (chunks, place.size)).permute(0, 3, 1, 2, 4).contiguous()


def _rows(x: torch.Tensor, place: _Place) -> torch.Tensor:
    """(B, H, N, C, D) -> (B, S, H, D), without what fills the fragments up."""
    rows = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
    parts = [
        rows[:, first * place.size :][:, :length]
        for (first, _), length in zip(place.fragments, place.lengths, strict=True)
    ]
    return place.moved(torch.cat(parts, 1) if parts else rows, back=True)

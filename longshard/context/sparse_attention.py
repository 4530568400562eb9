"""Context-parallel sparse attention over latents as one operator: each query attends to the keys that it has chosen.

Queries stay on their rank. What a rank needs of a token of another rank is its latent, its rotated part and its index
key, some 700 numbers for DeepSeek-V3.2: one exchange collects them, and in the backward one exchange returns their
gradients, which the owners add up.

    forward    rows of all ranks -> index scores of this rank's queries -> choice -> attention to chosen rows
    backward   rows of all ranks again, the same choice -> gradients of chosen rows -> sums at their owners

A choice depends on no layout: `execution/sparse_rows.py` computes it, and says what is exact. As an operator it finds
its plan by the handle (`live.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longshard.context.attention import add_autocast_rules
from longshard.context.execution.chunks import ChunkRows
from longshard.context.execution.kernels.base import rows_first
from longshard.context.execution.sparse_rows import (
    Attended,
    Divergence,
    Index,
    Rows,
    add_rows,
    attend,
    attention_gradients,
    choose,
    chosen_rows,
    queries_at_a_time,
    visible_rows,
)
from longshard.context.live import LivePlan, layer_of, resolve
from longshard.context.planning.options import ContextParallelError
from longshard.sharding.ranges import Offsets
from longshard.sharding.rows import Axis, fetch, returned_rows
from longshard.sharding.tensors import wide, wide_type


class SparseSettings(NamedTuple):
    """The settings of one sparse attention. All fields are numbers: an operator takes them as a list."""

    scale: float
    """Factor of the scores."""
    per_query: int
    """Number of keys that a query attends to. 0: all keys that it sees."""
    learns: bool = False
    """Whether the indexer learns: then its loss is computed."""


class SparseResult(NamedTuple):
    """The results of one call of sparse attention."""

    output: torch.Tensor
    """(B, H, S, V). A query that sees no key has the output 0."""
    chosen: torch.Tensor
    """(B, S, per_query) int32, positions of the chosen keys in the sequence, ascending; -1 in places without a key."""
    loss: torch.Tensor
    """(B, S), the loss of the indexer at each query, in float32 at least; 0 unless it learns. Its gradient reaches
    the index alone."""


def sparse_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    up: torch.Tensor,
    index: Index,
    plan: torch.Tensor | None,
    settings: SparseSettings,
) -> SparseResult:
    """Return causal attention of this rank's queries to chosen keys of the whole sequence; a collective.

    Args:
        q: (B, H, S, N + P), S this rank's rows.
        latent: (B, S, R + P), from which `up` makes keys and values; see `execution/latent.py`.
        up: (H, N + V, R).
        index: Queries, keys and weights of the indexer for the same rows.
        plan: The handle, (B,) int64; None if the rows are the whole sequence.
        settings: The settings.

    Raises:
        ContextParallelError: The inputs do not fit each other, or the plan did not cut them.
        ContextParallelError: The plan's mask has a window that is not causal, or keys of another length.
    """
    settings = [float(x) for x in settings]
    return SparseResult(*operator(q, latent, up, list(index), plan, settings))


@torch.library.custom_op("longshard::sparse_attention", mutates_args=())
def operator(
    q: torch.Tensor,
    latent: torch.Tensor,
    up: torch.Tensor,
    index: Sequence[torch.Tensor],
    plan: torch.Tensor | None,
    settings: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `sparse_attention`.

    Args:
        q: As in `sparse_attention`, (B, H, S, N + P).
        latent: (B, S, R + P).
        up: (H, N + V, R).
        index: The tensors of `Index`: (B, S, J, D), (B, S, D) and (B, S, J).
        plan: The handle, (B,) int64; None if absent.
        settings: The fields of `SparseSettings`, in order.

    Returns:
        As `SparseResult`.
    """
    call = _Call.of(q, latent, up, index, plan, settings)
    rows = call.whole.collected(torch.cat((latent, index[1]), -1))
    chosen = q.new_empty(*latent.shape[:2], 0, dtype=torch.int32)
    if call.how.per_query:
        keys = rows[..., latent.shape[2] :]
        where = call.whole.visible, call.how.per_query, call.whole.length
        chosen = choose(call.index, keys, *where)
    out = rows_first(q, *q.shape[1:3], _value_dim(q, latent, up))
    loss = q.new_zeros(latent.shape[:2], dtype=wide_type(q.dtype))
    lse = q.new_empty(q.shape[:3], dtype=loss.dtype)
    for part, keys, found in call.parts(rows, chosen):
        out[:, :, part] = found.output.to(out.dtype)
        lse[:, :, part] = found.lse
        if call.how.learns:
            loss[:, part] = Divergence(call.index_at(part), keys, found).loss
    call.whole.show_scores(lse)
    return out, chosen, loss


@torch.library.custom_op("longshard::sparse_attention_backward", mutates_args=())
def _operator_backward(
    dout: torch.Tensor,
    dloss: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    up: torch.Tensor,
    index: Sequence[torch.Tensor],
    chosen: torch.Tensor,
    plan: torch.Tensor | None,
    settings: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, of latents, this rank's part of the gradient of `up`, and those of the index."""
    call = _Call.of(q, latent, up, index, plan, settings)
    rows = call.whole.collected(torch.cat((latent, index[1]), -1))
    dtype = wide_type(q.dtype)
    dq = rows_first(q, *q.shape[1:])
    dup = up.new_zeros(up.shape, dtype=dtype)
    drows = rows.new_zeros(rows.shape, dtype=dtype)
    dindex = [x.new_zeros(x.shape) for x in (index[0], index[2])]
    for part, keys, found in call.parts(rows, chosen):
        gradients = attention_gradients(
            wide(dout[:, :, part]),
            wide(q[:, :, part]),
            keys,
            found,
            wide(up),
            call.how.scale,
        )
        dq[:, :, part] = gradients.queries.to(dq.dtype)
        dup += gradients.weights
        added = gradients.rows
        key_gradient = added.new_zeros(*added.shape[:-1], index[1].shape[2])
        if call.how.learns:
            loss = Divergence(call.index_at(part), keys, found)
            of_index = loss.gradients(dloss[:, part])
            dindex[0][:, part] = of_index.queries.to(q.dtype)
            dindex[1][:, part] = of_index.weights.to(q.dtype)
            key_gradient = of_index.rows
        own = chosen[:, part] if call.how.per_query else None
        add_rows(drows, torch.cat((added, key_gradient), -1), own)
    returned = call.whole.returned(drows).to(latent.dtype)
    dlatent, dkeys = returned.split([latent.shape[2], index[1].shape[2]], -1)
    return dq, dlatent.clone(), dup.to(up.dtype), dindex[0], dkeys.clone(), dindex[1]


def _value_dim(q: torch.Tensor, latent: torch.Tensor, up: torch.Tensor) -> int:
    """Return V. Latents are (B, S, R + P)."""
    return up.shape[1] + latent.shape[2] - up.shape[2] - q.shape[3]


@dataclass(frozen=True)
class _Whole:
    """The rows of the whole sequence, of which this rank, or chunk, has some.

    Attributes:
        live: The open plan; None if this rank has all rows.
        sequences: The numbers of the sequences in the batch.
        layer: The layer, for a sequence in chunks.
        visible: First visible key of each query, and the end of its keys, on the host: (B, S, 2), or (1, S, 2).
        length: Number of tokens of the whole sequence.
    """

    live: LivePlan | None
    sequences: Sequence[int]
    layer: int
    visible: torch.Tensor
    length: int

    @classmethod
    def of(cls, plan: torch.Tensor | None, rows: int) -> "_Whole":
        """Return the rows for a call. Counts a call of the plan."""
        if plan is None:
            ends = torch.arange(1, rows + 1, device="cpu")
            visible = torch.stack((torch.zeros_like(ends), ends), -1)
            return cls(None, (), 0, visible[None], rows)
        live, sequences = resolve(plan)
        if rows != (expected := live.layout.local_length(live.rank)):
            raise ContextParallelError(
                f"sparse attention got {rows} rows of the sequence and its plan has {expected} for this rank; cut the "
                "inputs by naming them in `context_parallel(buffers=...)`"
            )
        live.calls += 1
        visible = live.visible(sequences)
        return cls(live, sequences, layer_of(plan), visible, live.layout.length)

    def show_scores(self, lse: torch.Tensor) -> None:
        """Pass the log-sum-exp, (B, H, S), to the plan's hooks."""
        if self.live is not None:
            self.live.show_scores(self.layer, lse, self.sequences)

    @property
    def _waiting(self) -> tuple[int, ChunkRows] | None:
        return None if self.live is None else self.live.chunk

    def collected(self, own: torch.Tensor) -> torch.Tensor:
        """Return all rows in the order of the sequence, (B, T, C); for a chunk, the rows up to its end."""
        if self.live is None:
            return own
        if self._waiting is None:
            return fetch(own, self._axis, self._everything, 1)
        number, waiting = self._waiting
        ranges = self.live.layout.ranges
        key = self.layer, number
        if number + 1 < len(ranges) and key not in waiting.rows:
            rows = own.transpose(0, 1).contiguous()
            waiting.rows[key] = Offsets(ranges[number]), waiting.keep(rows)
        before = [waiting.rows[self.layer, i][1] for i in range(number)]
        for kept in before:
            kept.fetch()
        return torch.cat([*(kept.take().transpose(0, 1) for kept in before), own], 1)

    def returned(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sums of the gradients of this rank's rows, (B, S, C), from gradients of all rows."""
        if self.live is None:
            return gradient
        if self._waiting is None:
            if self._axis.degree == 1:
                return gradient
            return returned_rows(gradient, self._axis, self._everything, 1)
        number, waiting = self._waiting
        ranges = self.live.layout.ranges
        *earlier, own = gradient.split(self.live.layout.lengths[: number + 1], 1)
        for i, part in enumerate(earlier):
            if part.shape[1]:
                waiting.add((self.layer, i), ranges[i], part.transpose(0, 1).contiguous())
        key = self.layer, number
        if waiting.rows.pop(key, None) is not None and key in waiting.gradients:
            own = own + waiting.gradients.pop(key).take().transpose(0, 1)
        return own

    @property
    def _axis(self) -> Axis:
        return Axis(self.live.layout, self.live.mesh.get_group())

    @property
    def _everything(self) -> tuple[tuple[tuple[int, int]], ...]:
        """For each rank, the whole sequence."""
        return (((0, self.length),),) * self.live.layout.degree


@dataclass(frozen=True)
class _Call:
    """One call of the operator, forward or backward."""

    q: torch.Tensor
    up: torch.Tensor
    latent_dim: int
    index: Index
    how: SparseSettings
    whole: _Whole

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
        index: Sequence[torch.Tensor],
        plan: torch.Tensor | None,
        settings: Sequence[float],
    ) -> "_Call":
        """Check the inputs of a call and return it."""
        scale, per_query, learns = settings
        index = Index(*index)
        rows = latent.shape[:2]
        fits = (
            (q.ndim, latent.ndim, up.ndim) == (4, 3, 3)
            and (q.shape[0], q.shape[2]) == rows
            and up.shape[0] == q.shape[1]
            and 0 < _value_dim(q, latent, up)
            and index.queries.shape == (*index.weights.shape, index.keys.shape[-1])
            and index.weights.shape[:2] == index.keys.shape[:2] == rows
        )
        if not fits:
            raise ContextParallelError(
                f"sparse attention got q {tuple(q.shape)}, latents {tuple(latent.shape)}, up {tuple(up.shape)} and an "
                f"index of {', '.join(str(tuple(x.shape)) for x in index)}. Give (B, H, S, N + P), (B, S, R + P), "
                "(H, N + V, R), (B, S, J, D), (B, S, D) and (B, S, J)"
            )
        how = SparseSettings(scale, int(per_query), bool(learns))
        return cls(q, up, latent.shape[2], index, how, _Whole.of(plan, rows[1]))

    def index_at(self, part: slice) -> Index:
        """Return the index of some queries, in a wide type; its keys are not used."""
        queries, keys, weights = self.index
        return Index(wide(queries[:, part]), keys, wide(weights[:, part]))

    def parts(
        self, rows: torch.Tensor, chosen: torch.Tensor
    ) -> Iterator[tuple[slice, Rows, Attended]]:
        """Yield parts of the queries, with the rows that they attend to and their attention."""
        per_query = self.how.per_query
        keys = per_query or rows.shape[1]
        options = {"own_rows": per_query > 0}
        size = queries_at_a_time(self.q, self.up, rows.shape[2], keys, **options)
        up = wide(self.up)
        for start in range(0, self.q.shape[2], size):
            part = slice(start, start + size)
            if per_query:
                seen = chosen_rows(rows, chosen[:, part])
            else:
                seen = visible_rows(rows, self.whole.visible[:, part])
            q = wide(self.q[:, :, part])
            yield part, seen, attend(q, seen, self.latent_dim, up, self.how.scale)


@operator.register_fake
def _(q, latent, up, index, plan, settings):
    batch, rows = latent.shape[:2]
    out = rows_first(q, *q.shape[1:3], _value_dim(q, latent, up))
    chosen = q.new_empty(batch, rows, int(settings[1]), dtype=torch.int32)
    return out, chosen, q.new_empty(batch, rows, dtype=wide_type(q.dtype))


@_operator_backward.register_fake
def _(dout, dloss, q, latent, up, index, chosen, plan, settings):
    others = (x.new_empty(x.shape) for x in (latent, up, *index))
    return rows_first(q, *q.shape[1:]), *others


def _save(ctx, inputs, output) -> None:
    q, latent, up, index, plan, ctx.settings = inputs
    chosen = output[1]
    ctx.save_for_backward(q, latent, up, *index, chosen, plan)
    ctx.mark_non_differentiable(chosen)


def _differentiate(ctx, dout: torch.Tensor, _dchosen: torch.Tensor, dloss: torch.Tensor):
    q, latent, up, *index, chosen, plan = ctx.saved_tensors
    *gradients, dqueries, dkeys, dweights = _operator_backward(
        dout, dloss, q, latent, up, index, chosen, plan, ctx.settings
    )
    return *gradients, [dqueries, dkeys, dweights], None, None


operator.register_autograd(_differentiate, setup_context=_save)

add_autocast_rules(torch.ops.longshard.sparse_attention.default)
add_autocast_rules(torch.ops.longshard.sparse_attention_backward.default)

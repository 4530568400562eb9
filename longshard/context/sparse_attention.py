"""Context-parallel sparse attention over latents as one operator: each query attends to the keys that it has chosen.

Queries stay on their rank. A rank needs the latent, the rotated part and the index key of each token of other ranks,
some 700 numbers for DeepSeek-V3.2. One exchange collects them. In the backward one exchange returns their gradients,
which the owners add up.

    forward    rows of all ranks -> index scores of this rank's queries -> choice -> attention to chosen rows
    backward   rows of all ranks again, the same choice -> gradients of chosen rows -> sums at their owners

A choice depends on no layout: `execution/sparse_rows.py` computes it. As an operator, sparse attention finds
its plan by the handle (`live.py`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshard.context.attention import add_autocast_rules
from longshard.context.execution.kernels.base import rows_first
from longshard.context.execution.latent import value_dim
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
    visible_rows,
)
from longshard.context.live import LivePlan, layer_of, resolve
from longshard.context.planning.mask import causal
from longshard.context.planning.options import ContextParallelError
from longshard.sharding.ranges import Wanted
from longshard.sharding.rows import Axis, fetch, returned_rows
from longshard.sharding.tensors import wide, wide_type

GATHERED_BYTES = 1 << 30
"""The most bytes of chosen rows and of their scores at a time. At least one query is computed at a time."""


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

    output: Tensor
    """(B, H, S, V). A query that sees no key has the output 0. A query with an index score that is not a number has an
    output that is not a number."""
    chosen: Tensor
    """(B, S, per_query) int32, positions of the chosen keys in the sequence, ascending; -1 in places without a key."""
    loss: Tensor
    """(B, S), the loss of the indexer at each query, in float32 at least; 0 unless it learns. Its gradient reaches
    the index alone."""


def sparse_attention(
    q: Tensor,
    latent: Tensor,
    up: Tensor,
    index: Index,
    plan: Tensor | None,
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
    """
    numbers = [float(x) for x in settings]
    return SparseResult(*operator([q, latent, up, *index], plan, numbers))


@torch.library.custom_op("longshard::sparse_attention", mutates_args=())
def operator(
    inputs: Sequence[Tensor], plan: Tensor | None, settings: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sparse_attention`. Return the fields of its `SparseResult`, in order.

    A collective, unless `plan` is None or is for a chunk.

    Args:
        inputs: q, latents and `up`, as in `sparse_attention`, (B, H, S, N + P), (B, S, R + P) and (H, N + V, R); and
            the tensors of `Index`, (B, S, J, D), (B, S, D) and (B, S, J).
        plan: The handle, (B,) int64; None if absent.
        settings: The fields of `SparseSettings`, in order.

    Returns:
        As `SparseResult`.
    """
    call = _Call(inputs, plan, settings)
    q, latent, up, *_ = inputs
    per_query = call.how.per_query
    chosen = q.new_empty(*latent.shape[:2], 0, dtype=torch.int32)
    if per_query:
        keys = call.rows[..., latent.shape[2] :]
        chosen = choose(call.index, keys, call.visible, int(settings[1]), call.length)
    out = rows_first(q, *q.shape[1:3], value_dim(q, latent, up))
    loss = q.new_zeros(latent.shape[:2], dtype=wide_type(q.dtype))
    lse = loss.new_empty(q.shape[:3])
    for part, keys, attended in call.parts(chosen[..., :per_query]):
        out[:, :, part] = attended.output.to(out.dtype)
        lse[:, :, part] = attended.lse
        if call.how.learns:
            loss[:, part] = Divergence(call.index, part, keys, attended).loss
    if per_query:  # a query that sees keys and has chosen none has a score that is not a number
        sees = call.visible.diff(dim=-1).squeeze(-1) > 0
        lost = sees.to(out.device) & (chosen < 0).all(-1)
        out.masked_fill_(lost[:, None, :, None], torch.nan)
    if call.live is not None:
        call.live.show_scores(call.layer, lse, call.sequences)
    return out, chosen, loss


@torch.library.custom_op("longshard::sparse_attention_backward", mutates_args=())
def _operator_backward(
    dout: Tensor,
    dloss: Tensor,
    inputs: Sequence[Tensor],
    chosen: Tensor,
    plan: Tensor | None,
    settings: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, of latents, of `up`, and of the index's queries, keys and weights.

    The gradient of `up` is this rank's part. A collective, unless `plan` is None or is for a chunk.
    """
    call = _Call(inputs, plan, settings)
    q, latent, up, *index = inputs
    chosen = chosen[..., : call.how.per_query]
    dq = rows_first(q, *q.shape[1:])
    dup = torch.zeros_like(call.up)
    drows = wide(call.rows).new_zeros(call.rows.shape)
    queries, keys, weights = (x.new_zeros(x.shape) for x in index)
    for part, seen, attended in call.parts(chosen):
        own = wide(dout[:, :, part]), wide(q[:, :, part]), seen, attended, call.up
        dq_part, dlatents, dup_part = attention_gradients(*own, call.how.scale)
        dq[:, :, part] = dq_part.to(dq.dtype)
        dup += dup_part
        dkeys = dlatents.new_zeros(*dlatents.shape[:-1], keys.shape[2])
        if call.how.learns:
            divergence = Divergence(call.index, part, seen, attended)
            queries[:, part], dkeys, weights[:, part] = divergence.gradients(dloss[:, part])
        add_rows(drows, torch.cat((dlatents, dkeys), -1), chosen[:, part])
    latent_sums, key_sums = call.returned(drows).tensor_split([latent.shape[2]], -1)
    dlatent = latent_sums.to(latent.dtype, copy=True)
    dkeys = key_sums.to(keys.dtype, copy=True)
    return dq, dlatent, dup.to(up.dtype), queries, dkeys, weights


class _Call:
    """One call of the operator, forward or backward. This rank, or chunk, has some rows of the whole sequence.

    Args:
        inputs: As for `operator`.
        plan: As for `operator`.
        settings: As for `operator`.

    Attributes:
        q: The queries, (B, H, S, N + P).
        up: (H, N + V, R), in a wide type.
        index: The index of this rank's rows.
        live: The open plan; None if this rank has all rows.
        sequences: The numbers of the sequences in the batch.
        layer: The layer, for a sequence in chunks.
        length: Number of tokens of the whole sequence.
        visible: First visible key of each query, and the end of its keys, on the host: (B, S, 2), or (1, S, 2).
        how: The settings.
        rows: Latents and index keys of the whole sequence, (B, T, R + P + D).

    Raises:
        ContextParallelError: The inputs do not fit each other, or the plan did not cut them.
    """

    live: LivePlan | None = None

    def __init__(
        self, inputs: Sequence[Tensor], plan: Tensor | None, settings: Sequence[float]
    ) -> None:
        """Count a call of the plan, and collect the rows of the whole sequence.

        A collective, unless there is no plan or the call is for a chunk.
        """
        self.q, latent, up, *index = inputs
        self.index = Index(*index)
        self._check(latent, up)
        self.up = wide(up)
        self._latent_dim = latent.shape[2]
        self.length = rows = latent.shape[1]
        if plan is None:
            self.visible = torch.from_numpy(causal(rows).intervals())
        else:
            live, self.sequences = resolve(plan)
            if rows != (expected := live.layout.local_length(live.rank)):
                raise ContextParallelError(
                    f"sparse attention got {rows} rows of the sequence and its plan has {expected} for "
                    "this rank; cut the inputs by naming them in `context_parallel(buffers=...)`"
                )
            live.calls += 1
            self.live = live
            self.layer = layer_of(plan)
            self.length = live.layout.length
            self.visible = live.visible(self.sequences)
        scale, per_query, learns = settings
        self.how = SparseSettings(scale, min(int(per_query), self.length), bool(learns))
        self.rows = self._collected(torch.cat((latent, self.index.keys), -1))

    def _check(self, latent: Tensor, up: Tensor) -> None:
        q = self.q
        index = self.index
        rows = latent.shape[:2]
        fits = (
            (q.ndim, latent.ndim, up.ndim) == (4, 3, 3)
            and (q.shape[0], q.shape[2]) == index.keys.shape[:2] == rows
            and up.shape[0] == q.shape[1]
            and index.queries.shape == (*rows, index.weights.shape[2], index.keys.shape[2])
        )
        if not fits:
            raise ContextParallelError(
                f"sparse attention got q {tuple(q.shape)}, latents {tuple(latent.shape)}, up {tuple(up.shape)} and "
                f"an index of {', '.join(str(tuple(x.shape)) for x in index)}. Give (B, H, S, N + P), "
                "(B, S, R + P), (H, N + V, R), (B, S, J, D), (B, S, D) and (B, S, J)"
            )

    def parts(self, chosen: Tensor) -> Iterator[tuple[slice, Rows, Attended]]:
        """Yield parts of the queries, with the rows that they attend to and their attention. chosen: (B, S, k)."""
        rows = self.rows
        per_query = self.how.per_query
        # all queries have the same rows if they choose none
        keys, row_channels = (per_query, rows.shape[2]) if per_query else (rows.shape[1], 0)
        channels = 2 * self.q.shape[1] + 3 * self.index.weights.shape[2] + row_channels
        query_bytes = rows.shape[0] * keys * channels * wide_type(self.q.dtype).itemsize
        size = max(GATHERED_BYTES // max(query_bytes, 1), 1)
        for start in range(0, self.q.shape[2], size):
            part = slice(start, start + size)
            seen = (
                chosen_rows(rows, chosen[:, part])
                if per_query
                else visible_rows(rows, self.visible[:, part])
            )
            q = wide(self.q[:, :, part])
            yield part, seen, attend(q, seen, self._latent_dim, self.up, self.how.scale)

    def _collected(self, own: Tensor) -> Tensor:
        """Return all rows in the order of the sequence, (B, T, C). They come from all ranks in one exchange.

        For a chunk nothing is exchanged: return the rows up to the end of the chunk, and hold its own rows for later
        chunks, until `returned` releases them.
        """
        if self.live is None:
            return own
        if self.live.chunk is None:
            return fetch(own, *self._wanted, 1)
        number, waiting = self.live.chunk
        ranges = self.live.layout.ranges
        if number + 1 < len(ranges):
            make = own.transpose(0, 1).contiguous
            waiting.hold((self.layer, number), ranges[number], make)
        before = [waiting.rows[self.layer, i][1] for i in range(number)]
        for kept in before:
            kept.fetch()
        return torch.cat([*(kept.take().transpose(0, 1) for kept in before), own], 1)

    def returned(self, gradient: Tensor) -> Tensor:
        """Return the sums of the gradients of this rank's rows, (B, S, C), from gradients of all rows in one exchange.

        For a chunk nothing is exchanged. The gradients of earlier chunks' rows are kept for these chunks. The result is
        the gradient of the chunk's own rows, with the gradients that later chunks have kept for it.
        """
        if self.live is None:
            return gradient
        if self.live.chunk is None:
            return returned_rows(gradient, *self._wanted, 1)
        number, waiting = self.live.chunk
        layout = self.live.layout
        *earlier, own = gradient.split(layout.lengths[: number + 1], 1)
        for i, part in enumerate(earlier):
            waiting.add((self.layer, i), layout.ranges[i], part.transpose(0, 1).contiguous())
        if (held := waiting.release((self.layer, number))) is not None:
            own = own + held[1].transpose(0, 1)
        return own

    @property
    def _wanted(self) -> tuple[Axis, Wanted]:
        """The sharded axis, and the rows that each rank wants: the whole sequence."""
        axis = Axis(self.live.layout, self.live.mesh.get_group())
        return axis, (((0, self.length),),) * axis.degree


@operator.register_fake
def _(inputs, plan, settings):
    q, latent, up, *_ = inputs
    batch, rows = latent.shape[:2]
    out = rows_first(q, *q.shape[1:3], value_dim(q, latent, up))
    chosen = q.new_empty(batch, rows, int(settings[1]), dtype=torch.int32)
    return out, chosen, q.new_empty(batch, rows, dtype=wide_type(q.dtype))


@_operator_backward.register_fake
def _(dout, dloss, inputs, chosen, plan, settings):
    q, *others = inputs
    others = (x.new_empty(x.shape) for x in others)
    return rows_first(q, *q.shape[1:]), *others


def _save(ctx, inputs, output) -> None:
    tensors, plan, ctx.settings = inputs
    chosen = output[1]
    ctx.save_for_backward(*tensors, chosen, plan)
    ctx.mark_non_differentiable(chosen)


def _differentiate(ctx, dout: Tensor, _dchosen: Tensor, dloss: Tensor):
    *inputs, chosen, plan = ctx.saved_tensors
    gradients = _operator_backward(dout, dloss, inputs, chosen, plan, ctx.settings)
    return [*gradients], None, None


operator.register_autograd(_differentiate, setup_context=_save)

add_autocast_rules(torch.ops.longshard.sparse_attention.default)
add_autocast_rules(torch.ops.longshard.sparse_attention_backward.default)

"""The parts of every execution: records of a step, the calls of a stage, and the sums of their results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from longshard.context.execution.kernels.base import (
    QKV,
    BackwardInputs,
    Kernel,
    OutLse,
    part,
    rows_first,
)
from longshard.context.execution.merging import Merge, merge
from longshard.context.planning.lowering import Launch, Launches
from longshard.context.planning.plan import Message, RankPlan, Stage
from longshard.sharding.exchange import Pending
from longshard.sharding.ranges import Offsets, Ranges, size
from longshard.sharding.rows import put_rows
from longshard.sharding.tensors import wide_type


class Item(NamedTuple):
    """One step of the execution: a stage, for some of the key/value heads.

    Attributes:
        stage: The stage.
        launches: The launches of the stage.
        kv_heads: The key/value heads.
    """

    stage: Stage
    launches: Launches
    kv_heads: slice


class Held(NamedTuple):
    """The K and V of a stage.

    Attributes:
        k: The keys, (B, heads, T, D), or latents, (B, 1, T, W).
        v: The values, (B, heads, T, D); with latents they have no width.
        rows: The buffer that k and v are views of; None for this rank's own K and V.
        places: The places of rows in the buffer; None for own K and V.
    """

    k: Tensor
    v: Tensor
    rows: Tensor | None = None
    places: Offsets | None = None


@dataclass
class Returning:
    """Gradients of keys and values that are sent to their owners, or to the next rank, which adds to them.

    Attributes:
        pending: The handle of the transfers.
        arriving: The messages to this rank, and their buffers.
        reduced: The sum of all ranks' gradients of own rows, if they are reduced by a collective. Else None.
        heads: The key/value heads; None if nothing returns.
    """

    pending: Pending = field(default_factory=Pending)
    arriving: list[tuple[Message, Tensor]] = field(default_factory=list)
    reduced: Tensor | None = None
    heads: slice | None = None

    def has_sums_of(self, item: Item, plan: RankPlan) -> bool:
        """Return whether exactly the rows of an item's stage arrive, so that its gradients can be added to them.

        Args:
            item: The item.
            plan: The plan of this rank.
        """
        if len(self.arriving) != 1 or self.reduced is not None or self.heads != item.kv_heads:
            return False
        ranges = self.arriving[0][0].ranges
        stage = item.stage
        return not plan.owns(ranges[0]) and stage.places.places(ranges) == ((0, stage.rows),)

    def add(
        self,
        stage: Stage | None,
        gradient: Tensor,
        own_gradient: Tensor,
        plan: RankPlan,
    ) -> None:
        """Wait, and add the received gradients to the gradients of own rows, or of the rows of a stage.

        Args:
            stage: The stage that is computed meanwhile; None after the last one.
            gradient: The gradients of the stage's rows, (T, *row_shape).
            own_gradient: The gradients of own rows, (T, *row_shape).
            plan: The plan of this rank.
        """
        self.pending.wait()
        if self.reduced is not None:
            own_gradient[:, :, :, self.heads].add_(self.reduced[: own_gradient.shape[0]])
        for message, buffer in self.arriving:
            places = plan.own
            target = own_gradient[:, :, :, self.heads]
            if not plan.owns(message.ranges[0]):
                places = stage.places
                target = gradient
            put_rows(target, places.places(message.ranges), buffer, add=True)


def query_heads(kv_heads: slice, q: Tensor, k: Tensor) -> slice:
    """Return the query heads that share some key/value heads.

    Args:
        kv_heads: The key/value heads.
        q: The queries, (B, H, S, D).
        k: The keys, (B, K, T, D).
    """
    group = q.shape[1] // k.shape[1]
    return slice(kv_heads.start * group, kv_heads.stop * group)


@dataclass(eq=False)
class Merged:
    """The running output and log-sum-exp of queries over the keys so far: (B, H, S, V), (B, H, S), in float32 at least.

    Queries that see no key have output 0 and log-sum-exp -inf. The result of a single call of all queries is kept as
    the kernel returned it: nothing is filled, copied or cast.

    Args:
        q: The queries, (B, H, S, D).
        value_dim: V; 0 means the size of the queries' heads.
        merge: Adds a part to the totals.
        merges: Whether some query gets the results of several calls. If not, the output has the dtype of the queries.
    """

    q: Tensor
    value_dim: int = 0
    merge: Merge = merge
    merges: bool = True
    _lone: OutLse | None = None
    _sums: OutLse | None = None

    @property
    def result(self) -> OutLse:
        """The output, in the memory order (B, S, H, V), and log-sum-exp; copied only if a kernel has another order."""
        if self._lone is None:
            return self._accumulated()
        out, lse = self._lone
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()

    def _accumulated(self) -> OutLse:
        if self._sums is None:
            b, h, s, d = self.q.shape
            dtype = wide_type(self.q.dtype)
            out_dtype = dtype if self.merges else self.q.dtype
            out = rows_first(self.q, h, s, self.value_dim or d, out_dtype)
            lse = self.q.new_empty(b, h, s, dtype=dtype)
            self._sums = out, lse
            if self._lone is None:
                out.zero_()
                lse.fill_(-torch.inf)
            else:
                for total, lone in zip(self._sums, self._lone, strict=True):
                    total.copy_(lone)
                self._lone = None
        return self._sums

    def add(self, heads: slice, rows: slice, out: Tensor, lse: Tensor, *, fresh: bool) -> None:
        """Merge the results of some heads and queries.

        Args:
            heads: The query heads.
            rows: The queries.
            out: Their output, (B, h, s, D).
            lse: Their log-sum-exp, (B, h, s).
            fresh: Whether these queries saw no key before.
        """
        out = out[..., : self.value_dim or self.q.shape[3]]
        if fresh and out.shape[:3] == self.q.shape[:3]:
            self._lone = out, lse
            return
        total_out, total_lse = (
            part(part(total, heads, 1), rows) for total in self._accumulated()
        )
        if fresh:
            total_out.copy_(out)
            total_lse.copy_(lse)
        else:
            self.merge(total_out, total_lse, out, lse)


def attend(
    total: Merged,
    inputs: QKV,
    heads: slice,
    launches: Launches,
    kernel: Kernel,
    scale: float,
) -> None:
    """Compute the calls of a stage and merge their results into `total`.

    Args:
        total: The running result.
        inputs: All rows of q, k, v of some query heads: (B, h, S, D), (B, k, T, D) twice.
        heads: These query heads.
        launches: The launches of the stage.
        kernel: The kernel.
        scale: The factor of the scores.
    """
    for launch in launches:
        out, lse = kernel.forward_many(*inputs, launch, scale=scale)
        for run in launch.q_runs:
            total.add(
                heads, run.rows, part(out, run.places), part(lse, run.places), fresh=run.fresh
            )


def add_parts(totals: QKV, parts: QKV, launch: Launch, *, sums: bool = False) -> None:
    """Add the gradients of a launch to the totals, in place. Rows that are fresh in the launch are overwritten.

    Args:
        totals: The totals of q, k and v.
        parts: The gradients of the launch.
        launch: The launch.
        sums: Whether the totals of keys have values already, so that no key is fresh.
    """
    runs = launch.q_runs, launch.kv_runs, launch.kv_runs
    for total, gradient, adjacent, has_values in zip(
        totals, parts, runs, (False, sums, sums), strict=True
    ):
        for run in adjacent:
            rows = part(total, run.rows)
            added = part(gradient, run.places)
            rows.copy_(added) if run.fresh and not has_values else rows.add_(added)


def lone_gradients(
    inputs: BackwardInputs, launches: Launches, kernel: Kernel, scale: float
) -> QKV | None:
    """Return dq, dk and dv as the kernel returns them, if one launch has all rows in their order; else None.

    Args:
        inputs: The inputs of the backward.
        launches: The launches of the stage.
        kernel: The kernel.
        scale: The factor of the scores.
    """
    if len(launches) != 1 or not launches[0].is_everything(
        inputs.q.shape[2], inputs.k.shape[2]
    ):
        return None
    return kernel.backward_many(inputs, launches[0], scale=scale)


def fold_batch(x: Tensor, plan: RankPlan) -> Tensor:
    """Return (B, H, S, ...) as (1, H, B * S, ...) if sequences have masks of their own, else unchanged.

    Args:
        x: The tensor, (B, H, S, ...).
        plan: The plan.
    """
    if plan.sequences == 1:
        return x
    b, h, s, *sizes = x.shape
    return x.transpose(1, 2).reshape(1, b * s, h, *sizes).transpose(1, 2)


def unfold_batch(x: Tensor, like: Tensor) -> Tensor:
    """Undo `fold_batch`. A result (B, H, S, D) has the memory order (B, S, H, D).

    Args:
        x: The folded tensor, (1, H, B * S, ...), or an unfolded one.
        like: A tensor of the shape (B, H, S, ...).

    Returns:
        (B, H, S, ...).
    """
    b, h, s = like.shape[:3]
    sizes = x.shape[3:]
    if not sizes:
        return x if x.shape == (b, h, s) else x.view(h, b, s).transpose(0, 1).contiguous()
    return x.transpose(1, 2).reshape(b, s, h, *sizes).transpose(1, 2)


def restore_shape(x: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the unfolded `x` with the shape and strides of `like`, and in its dtype unless `dtype` names another.

    `x` is returned itself if it has them already and shares its memory with no other tensor; else it is copied.

    Args:
        x: The folded tensor, (1, H, B * S, D), or an unfolded one.
        like: A tensor of the wanted form, (B, H, S, D).
        dtype: The type of the result; None means the type of `like`.

    Returns:
        (B, H, S, D).
    """
    x = unfold_batch(x, like)
    form = torch.empty_like(like, dtype=dtype, device="meta")
    # For an empty tensor, 0 == 0 bytes does not exclude sharing, and operators must not return views of one storage.
    owns_memory = x.numel() > 0 and x.untyped_storage().nbytes() == x.nbytes
    if owns_memory and (x.dtype, x.stride()) == (form.dtype, form.stride()):
        return x
    return torch.empty_like(like, dtype=dtype, device=x.device).copy_(x)


def row_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the shape of a token's keys and values as they are sent: (2, B, K, D), or (1, B, 1, W) of a latent.

    Args:
        k: The keys, (B, K, T, D), or latents, (B, 1, T, W).
        v: The values, (B, K, T, D); with latents they have no width.
    """
    return 2 if v.shape[3] else 1, *k.shape[:2], k.shape[3]


def pack(k: Tensor, v: Tensor, places: Ranges, into: Tensor | None = None) -> Tensor:
    """Return rows of K and V as (rows, *row_shape), contiguous. With `into`, fill its first rows and return all of it.

    Args:
        k: The keys, (B, K, T, D).
        v: The values, (B, K, T, D).
        places: The ranges of rows.
        into: The buffer to fill, (more rows, *row_shape); None if absent.
    """
    rows = k.new_empty(size(places), *row_shape(k, v)) if into is None else into
    offset = 0
    for start, stop in places:
        target = rows[offset : offset + stop - start]
        for piece, source in zip(unpack(target), (k, v), strict=True):
            if piece.shape[3]:
                piece.copy_(source[:, :, start:stop])
        offset += stop - start
    return rows


def unpack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V as views, (B, K, T, D).

    Args:
        rows: The packed rows, (T, *row_shape).
    """
    k, *others = rows.permute(1, 2, 3, 0, 4).unbind()
    return k, others[0] if others else k[..., :0]


def with_next(items: Sequence) -> Iterator[tuple]:
    """Yield each item with the next one, the last with None.

    Args:
        items: The items.
    """
    return zip(items, (*items[1:], None), strict=True)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> OutLse:
    """Return output and log-sum-exp with the share of the sinks.

    Args:
        out: The output, (B, H, S, D).
        lse: The log-sum-exp, (B, H, S).
        sinks: The logits of the sinks, (H,).
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


def sink_gradient(inputs: BackwardInputs, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, (H,), by these queries.

    Args:
        inputs: The inputs of the backward; output and log-sum-exp include the share of the sinks.
        sinks: The logits of the sinks, (H,).
    """
    lse = inputs.lse
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # The value of a sink is zero, so that the softmax's derivative consists of the mean term only.
    return (
        -(share * (inputs.dout.to(lse.dtype) * inputs.out).sum(-1)).sum((0, 2)).to(sinks.dtype)
    )

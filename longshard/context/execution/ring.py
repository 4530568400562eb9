"""Execution of a plan of stages, forward and backward: the ring, and all-gather, which has two stages.

K and V are sent as rows of one buffer, (rows, 2, B, K, D), unrepeated, in which any range of tokens is contiguous.
Latents are sent as (rows, 1, B, 1, W), and each tile computes its K and V from them (`latent.py`). The rows of the next
stage are sent while the tiles of a stage are computed, so that two such buffers are alive. Results are merged in
float32 at least.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshard.context.execution.kernels.base import (
    QKV,
    BackwardInputs,
    Kernel,
    OutLse,
    Terms,
    part,
)
from longshard.context.execution.latent import Expansion, value_dim
from longshard.context.execution.merging import Merge, merge
from longshard.context.execution.stages import (
    Held,
    Item,
    Merged,
    Returning,
    add_parts,
    attend,
    fold_batch,
    lone_gradients,
    pack,
    query_heads,
    restore_shape,
    row_shape,
    sink_gradient,
    unfold_batch,
    unpack,
    with_next,
    with_sinks,
)
from longshard.context.planning.heads import passes_of
from longshard.context.planning.lowering import Launches, LoweredPlan, fresh_rows
from longshard.context.planning.plan import RankPlan, Stage
from longshard.sharding.exchange import (
    Pending,
    Transfer,
    gather_shards,
    reduce_shards,
    send_receive,
)
from longshard.sharding.ranges import Offsets, Ranges, intersection
from longshard.sharding.rows import put_rows


@dataclass(frozen=True)
class StagedExecution:
    """A plan of stages, the kernel that computes its tiles, and the communicators of K/V and of dK/dV.

    Attributes:
        lowered: The plan with its launches.
        kernel: The kernel.
        group: The communicator of K/V.
        gradient_group: The communicator of dK/dV.
        heads_per_pass: Key/value heads that are sent at a time; 0 means all.
        gradient_dtype: The type of dK and dV when they are sent; None means the type of the log-sum-exp. Each rank adds
            to them in this type, so that bfloat16 rounds once on each rank.
        merge: Adds a partial result to a total.
    """

    lowered: LoweredPlan
    kernel: Kernel
    group: ProcessGroup
    gradient_group: ProcessGroup
    heads_per_pass: int = 0
    gradient_dtype: torch.dtype | None = None
    merge: Merge = merge

    @property
    def plan(self) -> RankPlan:
        """The plan."""
        return self.lowered.plan

    def forward(self, *qkv: Tensor, terms: Terms) -> OutLse:
        """Return the output, (B, H, S, dimension of the values), and the log-sum-exp, (B, H, S).

        A collective over the group, as `backward` is: ranks send each other K and V.

        Args:
            *qkv: This rank's rows: q (B, H, S, D), k and v (B, K, T, D).
            terms: The scale, and optional inputs.
        """
        scale, sinks, up = terms
        q, k, v = (fold_batch(x, self.plan) for x in qkv)
        expansion = None if up is None else Expansion(up, q.shape[3])
        out_dim = v.shape[3] if up is None else value_dim(q, k, up)
        total = Merged(q, out_dim, self.merge, merges=self.lowered.merges_outputs)
        own = held = Held(k, v)
        items = self._items(self.plan.forward, self.lowered.forward, k.shape[1])
        for item, following in items:
            incoming, pending = self._fetch(following, own, held)
            groups = (
                [query_heads(item.kv_heads, q, k)]
                if expansion is None
                else expansion.groups(held.k)
            )
            for heads in groups:
                keys = held[:2] if expansion is None else expansion.keys(held.k, heads)
                attend(
                    total, (part(q, heads, 1), *keys), heads, item.launches, self.kernel, scale
                )
            pending.wait()
            held = incoming
        out, lse = (unfold_batch(x, qkv[0]) for x in total.result)
        out = out.to(q.dtype)
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    def backward(
        self, inputs: BackwardInputs, terms: Terms, *, kv_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, and of the sinks and of `up` if there are any.

        K and V are sent again, and dK and dV are sent to their owners. The gradients of the sinks and of `up` are this
        rank's parts. Output and log-sum-exp include the share of the sinks, and so do the tiles' probabilities.

        Args:
            inputs: This rank's rows, (B, H, S, D) and (B, K, T, D).
            terms: The scale, and optional inputs.
            kv_dtype: The type of dk and dv, if the caller adds to them; None means the types of k and v.
        """
        scale, sinks, up = terms
        dsinks = () if sinks is None else (sink_gradient(inputs, sinks),)
        qkv = inputs.q, inputs.k, inputs.v
        types = None, kv_dtype, kv_dtype
        inputs = BackwardInputs(*(fold_batch(x, self.plan) for x in inputs))
        expansion = None if up is None else Expansion(up, inputs.q.shape[3], inputs.lse.dtype)
        lone = None
        if self.plan.degree == 1 and expansion is None:
            lone = lone_gradients(inputs, self.lowered.backward[0], self.kernel, scale)
        gradients = zip(
            lone or self._summed_gradients(inputs, scale, expansion), qkv, types, strict=True
        )
        dup = () if up is None else (expansion.gradient.to(up.dtype),)
        return *(restore_shape(x, like, dtype) for x, like, dtype in gradients), *dsinks, *dup

    def _summed_gradients(
        self, inputs: BackwardInputs, scale: float, expansion: Expansion | None
    ) -> QKV:
        """Return the gradients of q, k, v in the log-sum-exp's dtype; if no query sums gradients, dq has q's dtype."""
        _, q, k, v, _, lse = inputs
        launches = self.lowered.backward
        written = fresh_rows(
            run for launch in chain.from_iterable(launches) for run in launch.q_runs
        )
        dq_dtype = lse.dtype if self.lowered.adds_gradients else q.dtype
        dq = (torch.empty_like if written == q.shape[2] else torch.zeros_like)(
            q, dtype=dq_dtype
        )
        own = held = Held(k, v)
        own_gradient = _sums(own, k.shape[2], launches[0], lse.dtype)
        returning = Returning()
        items = self._items(self.plan.backward, launches, k.shape[1])
        for item, following in items:
            incoming, pending = self._fetch(following, own, held)
            heads = query_heads(item.kv_heads, q, k)
            item_inputs = inputs._replace(k=held.k, v=held.v)
            item_inputs = item_inputs.part(heads, slice(0, held.k.shape[1]), dim=1)
            dq_ = part(dq, heads, 1)
            if (
                expansion is None
                and len(item.launches) == 1
                and returning.has_sums_of(item, self.plan)
            ):
                parts = self.kernel.backward_many(item_inputs, item.launches[0], scale=scale)
                returning.pending.wait()  # the sums were sent while the kernel ran
                gradient = returning.arriving[0][1]
                add_parts((dq_, *unpack(gradient)), parts, item.launches[0], sums=True)
                del parts
            else:
                gradient = own_gradient
                if item.stage is not self.plan.backward[0]:
                    sent_dtype = self.gradient_dtype or lse.dtype
                    gradient = _sums(held, item.stage.rows, item.launches, sent_dtype)
                totals = dq_, *unpack(gradient)
                if expansion is None:
                    self._add_gradients(item_inputs, item.launches, totals, scale)
                else:
                    self._add_latent_gradients(item_inputs, item, totals, expansion, scale)
                returning.add(item.stage, gradient, own_gradient, self.plan)
            returning = self._return_gradients(item, gradient)
            pending.wait()
            held = incoming
        returning.add(None, own_gradient, own_gradient, self.plan)
        return dq, *unpack(own_gradient)

    def _add_gradients(
        self,
        inputs: BackwardInputs,
        launches: Launches,
        totals: QKV,
        scale: float,
    ) -> None:
        """Add the gradients of launches to the totals of queries, and of the rows that the stage holds."""
        for launch in launches:
            parts = self.kernel.backward_many(inputs, launch, scale=scale)
            add_parts(totals, parts, launch)

    def _add_latent_gradients(
        self,
        inputs: BackwardInputs,
        item: Item,
        totals: QKV,
        expansion: Expansion,
        scale: float,
    ) -> None:
        """Add an item's gradients in place: of q and latents to `totals`, of `up` to `expansion.gradient`."""
        dq, dlatent, _ = totals
        for heads in expansion.groups(inputs.k):
            keys = expansion.keys(inputs.k, heads)
            dout, q, _, _, out, lse = inputs.part(heads, slice(0, inputs.k.shape[1]), dim=1)
            dout, out = map(expansion.filled, (dout, out))
            head_inputs = BackwardInputs(dout, q, *keys, out, lse)
            sums = [torch.zeros_like(x, dtype=lse.dtype) for x in keys]
            self._add_gradients(head_inputs, item.launches, (part(dq, heads, 1), *sums), scale)
            expansion.add(*sums, inputs.k, heads, dlatent)

    def _items(
        self, stages: tuple[Stage, ...], launches: tuple[Launches, ...], kv_heads: int
    ) -> Iterator[tuple[Item, Item | None]]:
        """Yield the local stage for all heads, then the other stages for each pass of heads, each with the next one."""
        items = [Item(stages[0], launches[0], slice(0, kv_heads))]
        for heads in passes_of(kv_heads, self.heads_per_pass):
            items += [
                Item(*pair, slice(*heads))
                for pair in zip(stages[1:], launches[1:], strict=True)
            ]
        return with_next(items)

    def _fetch(self, following: Item | None, own: Held, held: Held) -> tuple[Held, Pending]:
        """Start the transfers for the next item; return its K and V, and the handle.

        own: K and V of this rank's rows. held: K and V of the present stage. If there is no next item, `held` is
        returned.
        """
        if following is None:
            return held, Pending()
        stage = following.stage
        heads = following.kv_heads
        sent = Held(part(own.k, heads, 1), part(own.v, heads, 1))
        rows = own.k.new_empty(stage.rows, *row_shape(*sent[:2]))
        incoming = Held(*unpack(rows), rows, stage.places)
        if stage.collective:
            return incoming, self._gather_rows(sent, rows, stage)
        transfers = []
        puts = []
        for message in stage.messages:
            if message.source == self.plan.rank:
                if self.plan.owns(message.ranges[0]):
                    departing = pack(sent.k, sent.v, self.plan.own.places(message.ranges))
                else:
                    departing = _rows_at(held.rows, held.places.places(message.ranges))
                transfers.append(Transfer(departing, message.target, is_send=True))
                continue
            places = stage.places.places(message.ranges)
            if len(places) == 1:
                buffer = rows[slice(*places[0])]
            else:
                buffer = rows.new_empty(message.rows, *rows.shape[1:])
                puts.append(partial(put_rows, rows, places, buffer, add=False))
            transfers.append(Transfer(buffer, message.source, is_send=False))
        return incoming, send_receive(
            transfers, self.group, kind="kv", arrived=lambda: [put() for put in puts]
        )

    def _return_gradients(self, item: Item, gradient: Tensor) -> Returning:
        """Start the transfers after an item of the backward; return their record, whose `add` waits and adds."""
        if item.stage.collective:
            reduced, pending = self._reduce_rows(gradient, item.stage)
            return Returning(pending, reduced=reduced, heads=item.kv_heads)
        transfers = []
        arriving = []
        for message in item.stage.home:
            if message.source == self.plan.rank:
                rows = _rows_at(gradient, item.stage.places.places(message.ranges))
                transfers.append(Transfer(rows, message.target, is_send=True))
            else:
                buffer = gradient.new_empty(message.rows, *gradient.shape[1:])
                transfers.append(Transfer(buffer, message.source, is_send=False))
                arriving.append((message, buffer))
        return Returning(
            send_receive(transfers, self.gradient_group, kind="dkv"),
            arriving,
            heads=item.kv_heads,
        )

    def _gather_rows(self, sent: Held, rows: Tensor, stage: Stage) -> Pending:
        """Start to gather every rank's K and V; on arrival, copy the rows that `stage` holds to `rows`."""
        own = sent.k.shape[2]
        padded = rows.new_empty(self.plan.longest, *rows.shape[1:])
        pack(sent.k, sent.v, ((0, own),), into=padded)
        padded[own:] = 0
        gathered, pending = gather_shards(padded, self.group, kind="kv")

        def arrived() -> None:
            for owner, there, here in self._pieces(stage):
                rows[here] = gathered[owner, there]

        return Pending([pending], [gathered], arrived)

    def _reduce_rows(self, gradient: Tensor, stage: Stage) -> tuple[Tensor, Pending]:
        """Start to sum all ranks' gradients of held rows at the owners.

        Return own rows' sums, (longest, *row_shape), valid once the handle has arrived, and the handle.
        """
        shards = gradient.new_zeros(self.plan.degree, self.plan.longest, *gradient.shape[1:])
        for owner, there, here in self._pieces(stage):
            shards[owner, there] = gradient[here]
        return reduce_shards(shards, self.gradient_group, kind="dkv")

    def _pieces(self, stage: Stage) -> Iterator[tuple[int, slice, slice]]:
        """Yield the other ranks' ranges that a stage holds: (owner, slice of its shard, slice of the stage rows)."""
        for owner, ranges in enumerate(
            self.plan.kv_layout.repeated(self.plan.sequences).ranges
        ):
            if owner == self.plan.rank:
                continue
            both = Offsets(ranges), stage.places
            for held in intersection(stage.held, ranges):
                yield owner, *(slice(*each.places([held])[0]) for each in both)


def _rows_at(rows: Tensor, places: Ranges) -> Tensor:
    """Return some rows of a buffer, contiguous; a view if they are adjacent."""
    parts = [rows[start:stop] for start, stop in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sums(held: Held, rows: int, launches: Launches, dtype: torch.dtype) -> Tensor:
    """Return a buffer for the gradients of a stage's rows, (rows, *row_shape).

    It is zeros if the launches do not write all of it, or if the rows are latents, to which each group of heads adds.
    """
    written = (
        fresh_rows(run for launch in launches for run in launch.kv_runs)
        if held.v.shape[3]
        else -1
    )
    new = held.k.new_empty if written == rows else held.k.new_zeros
    return new(rows, *row_shape(held.k, held.v), dtype=dtype)

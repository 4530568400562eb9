"""Exchange of heads (DeepSpeed Ulysses, arXiv 2309.14509): a rank attends with some heads of all rows.

One exchange takes queries, keys and values from "my rows of all heads" to "all rows of my heads". A second one takes
the output back. The backward does the same with the gradients. Key/value heads are replicated to the least common
multiple of their number and the degree, so that every degree that divides the query heads works; the gradients of all
copies are added up.

    2 ranks, 8 rows head-tail, 4 query heads, 1 key/value head (replicated: rank r works with copy r)

                   rank 0                  rank 1
    before         rows 01..67             rows ..2345..           each with q 0123, kv 0
      q  (B, 4, 4, D)  kv (B, 1, 4, D)     -> _to_heads ->
    between        rows 01234567           rows 01234567           rank 0: q 01, kv 0; rank 1: q 23, kv 0
      q  (B, 2, 8, D)  kv (B, 1, 8, D)     -> attention, of one rank or of a ring over groups (`hybrid`)
      out (B, 2, 8, D)                     -> _to_rows ->
    after          rows 01..67             rows ..2345..           each with out 0123
      out (B, 4, 4, D)

"All rows" are the whole sequence for `all_to_all`, and the rows of a head group for `hybrid`. Between the two exchanges
runs the plan of a ring, of one rank or of several.

All tensors travel side by side in rows of bytes (`travel.py`), each rank's part as one piece. So the number of copies
depends on the number of tensors and not on the number of ranks.

Shapes below: B batch; H query heads and K key/value heads in all, h and k of one rank in one pass; S and T this rank's
rows of queries and keys; R all rows of the head group; N ranks of the head group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.distributed.context_parallel.execution.kernels.base import BackwardInputs
from trainer.distributed.context_parallel.execution.ring import StagedExecution
from trainer.distributed.context_parallel.execution.stages import as_before, fold_batch, unfold_batch, with_next
from trainer.distributed.context_parallel.execution.travel import Bundle, Tensors
from trainer.distributed.context_parallel.planning.heads import HeadShare
from trainer.distributed.context_parallel.planning.plan import RankPlan
from trainer.distributed.sharding.exchange import Pending, all_to_all


@dataclass(frozen=True)
class HeadExchange:
    """The execution of a plan in which the ranks of `group` divide the heads.

    inner: the execution for all rows of this rank's heads; heads_per_pass: key/value heads of a rank that travel at a
    time, 0 for all.
    """

    plan: RankPlan
    group: dist.ProcessGroup
    inner: StagedExecution
    heads_per_pass: int = 0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with q: (B, H, S, D); k, v: (B, K, T, D), this rank's rows -> output as q, log-sum-exp (B, H, S)."""
        whole_q = q
        q, k, v = (fold_batch(x, self.plan) for x in (q, k, v))
        # (B, S, H, D) in memory, as the output projection reads it
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        passes = HeadShare.passes(q.shape[1], k.shape[1], self.plan.head_degree, self.heads_per_pass)
        keys = [_replicated(x, passes[0].copies) for x in (k, v)]
        returning: list[_Returning] = []
        # (B, h, R, D), twice (B, k, R, D)
        for share, (all_q, all_k, all_v) in self._received([q], keys, passes, kind="qkv"):
            results = self.inner.forward(all_q, all_k, all_v, scale)  # (B, h, R, D), (B, h, R)
            returning.append(_return_rows([*results], [], [out, lse], share, self, kind="out"))
        for each in returning:
            each.put()
        return unfold_batch(out, whole_q), unfold_batch(lse, whole_q)

    def backward(self, given: BackwardInputs, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k, v; all inputs are exchanged again."""
        inputs = given.q, given.k, given.v
        dout, q, k, v, out, lse = (fold_batch(x, self.plan) for x in given)
        passes = HeadShare.passes(q.shape[1], k.shape[1], self.plan.head_degree, self.heads_per_pass)
        copies = passes[0].copies
        keys = [_replicated(x, copies) for x in (k, v)]
        # Gradients of a head's copies are added up in float32; without copies they are complete when they are sent.
        gradient_dtype = lse.dtype if copies > 1 else q.dtype
        dq = torch.empty_like(q)
        dkeys = [torch.empty_like(x, dtype=gradient_dtype) for x in keys]
        returning: list[_Returning] = []
        for share, received in self._received([q, dout, out, lse], keys, passes, kind="qkv_dout"):
            all_q, all_dout, all_out, all_lse, *all_kv = received
            inside = BackwardInputs(all_dout, all_q, *all_kv, all_out, all_lse)  # (B, h, R, ...), keys (B, k, R, D)
            all_dq, *all_dkv = self.inner.backward(inside, scale, gradient_dtype)
            returning.append(_return_rows([all_dq], all_dkv, [dq, *dkeys], share, self, kind="dqkv"))
        for each in returning:
            each.put()
        dk, dv = (x if copies == 1 else x.unflatten(1, (-1, copies)).sum(2) for x in dkeys)
        return tuple(as_before(x, like) for x, like in zip((dq, dk, dv), inputs, strict=True))

    def _received(
        self, queries: Tensors, keys: Tensors, passes: list[HeadShare], *, kind: str
    ) -> Iterator[tuple[HeadShare, Tensors]]:
        """Yield all rows of this rank's heads, pass by pass; the next pass travels meanwhile."""
        incoming = _send_heads(queries, keys, passes[0], self, kind=kind)
        for share, following in with_next(passes):
            arrived = incoming
            if following is not None:
                incoming = _send_heads(queries, keys, following, self, kind=kind)
            yield share, arrived.assembled()


def _replicated(x: torch.Tensor, copies: int) -> torch.Tensor:
    """Return keys or values with `copies` of each head: (B, K, T, D) -> (B, K x copies, T, D)."""
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def _by_rank(queries: Tensors, keys: Tensors, share: HeadShare, degree: int) -> tuple[Tensors, Tensors]:
    """Return views of each rank's heads of a pass: (B, H, S, ...) -> (N, S, B, h, ...)."""

    def of(x: torch.Tensor, heads: slice) -> torch.Tensor:
        return x.unflatten(1, (degree, -1))[:, :, heads].movedim((1, 3), (0, 1))

    return [of(x, share.own_queries) for x in queries], [of(x, share.own_keys) for x in keys]


@dataclass
class _Incoming:
    """All rows of this rank's heads, under way."""

    bundle: Bundle
    received: torch.Tensor
    pending: Pending

    def assembled(self) -> Tensors:
        """Wait, and return all rows of this rank's heads: (B, h, R, ...) for each tensor."""
        self.pending.wait()
        return [rows.movedim(0, 2) for rows in self.bundle.in_sequence(self.received)]


def _send_heads(queries: Tensors, keys: Tensors, share: HeadShare, run: HeadExchange, *, kind: str) -> _Incoming:
    """Start the exchange from my rows of all heads, (B, H, S, ...), to all rows of my heads."""
    degree, here = run.plan.head_degree, run.group.rank()
    queries, keys = _by_rank(queries, keys, share, degree)
    bundle = Bundle.of([x[0] for x in queries], [x[0] for x in keys], run.plan.head_group_layouts)
    wire = queries[0].new_empty(degree, bundle.size(here), dtype=torch.uint8)
    for view, x in zip(bundle.views(wire, here), (*queries, *keys), strict=True):
        view.copy_(x)
    sizes = [bundle.size(rank) for rank in range(degree)]
    received, pending = all_to_all(wire.view(-1), [bundle.size(here)] * degree, sizes, run.group, kind=kind)
    return _Incoming(bundle, received, pending)


@dataclass
class _Returning:
    """My rows of each rank's heads, under way, and the tensors (N, S, B, h, ...) into which they belong."""

    bundle: Bundle
    received: torch.Tensor
    pending: Pending
    into: Tensors
    rank: int

    def put(self) -> None:
        """Wait, and write the rows into their tensors."""
        self.pending.wait()
        for target, view in zip(self.into, self.bundle.views(self.received, self.rank), strict=True):
            target.copy_(view)


def _return_rows(
    queries: Tensors, keys: Tensors, into: Tensors, share: HeadShare, run: HeadExchange, *, kind: str
) -> _Returning:
    """Start the exchange from all rows of my heads, (B, h, R, ...), to my rows of all heads, for the tensors `into`."""
    degree, here = run.plan.head_degree, run.group.rank()
    queries, keys = ([x.movedim(2, 0) for x in each] for each in (queries, keys))  # (R, B, h, ...)
    bundle = Bundle.of(queries, keys, run.plan.head_group_layouts)
    sizes = [bundle.size(rank) for rank in range(degree)]
    wire = bundle.by_rank([*queries, *keys])
    received, pending = all_to_all(wire, sizes, [bundle.size(here)] * degree, run.group, kind=kind)
    of_queries, of_keys = _by_rank(into[: len(queries)], into[len(queries) :], share, degree)
    return _Returning(bundle, received.view(degree, bundle.size(here)), pending, [*of_queries, *of_keys], here)

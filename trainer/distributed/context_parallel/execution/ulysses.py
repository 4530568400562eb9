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
runs the plan of a ring, of one rank or of several. All tensors for another rank are packed into one piece of bytes; a
rank's own part is not moved.

Shapes below: B batch; H query heads and K key/value heads in all, h and k of one rank in one pass; S and T this rank's
rows of queries and keys; R all rows of the head group; N ranks of the head group.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.distributed.context_parallel.execution.kernels.base import BackwardInputs
from trainer.distributed.context_parallel.execution.ring import StagedExecution
from trainer.distributed.context_parallel.execution.stages import as_before, fold_batch, unfold_batch, with_next
from trainer.distributed.context_parallel.planning.heads import HeadShare, aligned
from trainer.distributed.context_parallel.planning.plan import RankPlan
from trainer.distributed.sharding.exchange import Pending, all_to_all
from trainer.distributed.sharding.ranges import Offsets, Ranges

# The tensors that go to one rank, or come from it
Pieces = list[torch.Tensor]


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
        returning: list[_Arrival] = []
        passes = HeadShare.passes(q.shape[1], k.shape[1], self.plan.head_degree, self.heads_per_pass)
        # (B, h, R, D), twice (B, k, R, D)
        for share, (all_q, all_k, all_v) in self._received([q], [k, v], passes, kind="qkv"):
            results = self.inner.forward(all_q, all_k, all_v, scale)  # (B, h, R, D), (B, h, R)
            returning.append(_to_rows([*results], [], [out, lse], share, self, kind="out"))
        for arrival in returning:
            arrival.put()
        return unfold_batch(out, whole_q), unfold_batch(lse, whole_q)

    def backward(self, given: BackwardInputs, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k, v; all inputs are exchanged again."""
        inputs = given.q, given.k, given.v
        dout, q, k, v, out, lse = (fold_batch(x, self.plan) for x in given)
        passes = HeadShare.passes(q.shape[1], k.shape[1], self.plan.head_degree, self.heads_per_pass)
        # Gradients of a head's copies are added up in float32; without copies they are complete when they are sent.
        gradient_dtype = lse.dtype if passes[0].copies > 1 else q.dtype
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=gradient_dtype) for x in (k, v))
        returning: list[_Arrival] = []
        for share, received in self._received([q, dout, out, lse], [k, v], passes, kind="qkv_dout"):
            all_q, all_dout, all_out, all_lse, *all_kv = received
            inside = BackwardInputs(all_dout, all_q, *all_kv, all_out, all_lse)  # (B, h, R, ...), keys (B, k, R, D)
            all_dq, *all_dkv = self.inner.backward(inside, scale, gradient_dtype)
            returning.append(_to_rows([all_dq], all_dkv, [dq, dk, dv], share, self, kind="dqkv"))
        for arrival in returning:
            arrival.put()
        return tuple(as_before(x, like) for x, like in zip((dq, dk, dv), inputs, strict=True))

    def _received(
        self, queries: Pieces, keys: Pieces, passes: list[HeadShare], *, kind: str
    ) -> Iterator[tuple[HeadShare, Pieces]]:
        """Yield all rows of this rank's heads, pass by pass; the next pass travels meanwhile."""
        incoming = _to_heads(queries, keys, passes[0], self, kind=kind)
        for share, following in with_next(passes):
            arrived = incoming
            if following is not None:
                incoming = _to_heads(queries, keys, following, self, kind=kind)
            yield share, arrived.assembled(self.plan)


@dataclass
class _Arrival:
    """Pieces under way, pieces[source][tensor], and the tensors `into` which they belong.

    n_queries: how many of the tensors have a row for each query; the others have a row for each key.
    """

    pieces: list[Pieces]
    pending: Pending
    n_queries: int
    share: HeadShare
    into: Pieces | None = None

    def assembled(self, plan: RankPlan) -> Pieces:
        """Wait, and return all rows of this rank's heads: (B, h, R, ...) for each tensor."""
        self.pending.wait()
        whole = []
        for number, parts in enumerate(zip(*self.pieces, strict=True)):  # N x (B, h, S of that rank, ...)
            layout = plan.head_group_layouts[number >= self.n_queries]
            b, heads, _, *rest = parts[0].shape
            x = parts[0].new_empty(b, heads, layout.length, *rest)
            for part, ranges in zip(parts, layout.ranges, strict=True):
                places = Offsets(ranges)
                for start, stop in ranges:
                    x[:, :, start:stop] = part[:, :, places(start) : places(start) + stop - start]
            whole.append(x)
        return whole

    def put(self) -> None:
        """Wait, and write results into (B, H, S, ...); add gradients of keys over the head's copies."""
        self.pending.wait()
        for rank, parts in enumerate(self.pieces):
            for number, (part, target) in enumerate(zip(parts, self.into, strict=True)):
                if number < self.n_queries:
                    target[:, self.share.queries(rank)] = part  # (B, h, S, ...)
                    continue
                for head, rows in zip(self.share.keys(rank), part.unbind(1), strict=True):
                    target[:, head] += rows  # (B, T, D)


def _to_heads(queries: Pieces, keys: Pieces, share: HeadShare, run: HeadExchange, *, kind: str) -> _Arrival:
    """Start the exchange from my rows of all heads, (B, H, S, ...), to all rows of my heads."""
    ranks = range(run.plan.head_degree)
    # To rank r: its heads, of my rows.
    sent = [[x[:, share.queries(r)] for x in queries] + [x[:, share.keys(r)] for x in keys] for r in ranks]
    # From rank r: as many heads, of its rows.
    shapes = []
    for r in ranks:
        n_q, n_kv = (layout.local_length(r) for layout in run.plan.head_group_layouts)
        lengths = [n_q] * len(queries) + [n_kv] * len(keys)
        shapes.append([(*x.shape[:2], n, *x.shape[3:]) for x, n in zip(sent[0], lengths, strict=True)])
    pieces, pending = _exchange(sent, shapes, run.group, kind=kind)
    return _Arrival(pieces, pending, len(queries), share)


def _to_rows(
    queries: Pieces, keys: Pieces, into: Pieces, share: HeadShare, run: HeadExchange, *, kind: str
) -> _Arrival:
    """Start the exchange from all rows of my heads, (B, h, R, ...), to my rows of all heads, for the tensors `into`."""
    ranks = range(run.plan.head_degree)
    q_ranges, kv_ranges = (layout.ranges for layout in run.plan.head_group_layouts)
    # To rank r: its rows, of my heads.
    sent = [[_rows(x, q_ranges[r]) for x in queries] + [_rows(x, kv_ranges[r]) for x in keys] for r in ranks]
    if run.heads_per_pass:  # a view would keep all rows of this pass alive until the last pass returns
        here = run.group.rank()
        sent[here] = [x.clone() for x in sent[here]]
    # From every rank: my rows, of its heads.
    shapes = [[(x.shape[0], y.shape[1], *x.shape[2:]) for x, y in zip(into, sent[0], strict=True)]] * len(sent)
    pieces, pending = _exchange(sent, shapes, run.group, kind=kind)
    return _Arrival(pieces, pending, len(queries), share, into)


def _rows(x: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Return the rows of these ranges, (B, h, R, ...) -> (B, h, S, ...); a view if they are adjacent."""
    parts = [x[:, :, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat([x[:, :, :0], *parts], dim=2)


def _exchange(
    sent: list[Pieces], shapes: list[list[tuple]], group: dist.ProcessGroup, *, kind: str
) -> tuple[list[Pieces], Pending]:
    """Start sending sent[r] to rank r; the tensors from rank r have shapes[r], and the dtypes of the sent ones."""
    here, types = group.rank(), [x.dtype for x in sent[0]]
    own = sent[here]
    sent, shapes = ([[] if rank == here else x for rank, x in enumerate(one)] for one in (sent, shapes))
    send_sizes = [sum(aligned(x.nbytes) for x in pieces) for pieces in sent]
    sizes = [[math.prod(shape) * t.itemsize for shape, t in zip(rank, types, strict=False)] for rank in shapes]
    buffer = torch.empty(sum(send_sizes), dtype=torch.uint8, device=own[0].device)
    place = 0
    for pieces in sent:
        for x in pieces:
            buffer[place : place + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
            place += aligned(x.nbytes)
    received, pending = all_to_all(buffer, send_sizes, [sum(map(aligned, r)) for r in sizes], group, kind=kind)
    arrived, place = [], 0
    for rank_sizes, rank_shapes in zip(sizes, shapes, strict=True):
        pieces = []
        for count, shape, t in zip(rank_sizes, rank_shapes, types, strict=False):
            pieces.append(received[place : place + count].view(t).view(shape))
            place += aligned(count)
        arrived.append(pieces)
    arrived[here] = own
    return arrived, pending

"""Runs a plan with an exchange of heads (DeepSpeed Ulysses, arXiv 2309.14509): a rank has some heads of all rows.

One exchange takes queries, keys and values from "my rows of all heads" to "all rows of my heads", one takes the output
back; the backward does the same with the gradients. Key/value heads are replicated to the least common multiple of
their number and the degree, so that every degree that divides the query heads works; their gradients are added up.

    2 ranks, 4 query heads, 1 key/value head       rank 0        rank 1
    before                                         q 0123 kv 0   q 0123 kv 0     half the rows each
    after                                          q 01   kv 0   q 23   kv 0     all rows

"All rows" are the whole sequence for `all_to_all`, and those of a group of neighbours for `hybrid`: between the two
exchanges runs the plan of a ring, of one rank or of several.

What goes to another rank is packed into one piece of bytes, tensors of any type side by side; a rank's own stays.
"""

import math
from dataclasses import dataclass

import torch

from trainer.distributed.context_parallel.cost import HeadShare, aligned
from trainer.distributed.context_parallel.execution import (
    Execution,
    as_before,
    in_line,
    out_of_line,
    with_next,
)
from trainer.distributed.context_parallel.ring import staged_backward, staged_forward
from trainer.distributed.sharding.exchange import Pending, all_to_all
from trainer.distributed.sharding.ranges import Offsets, Ranges

# What goes to, or comes from, one rank
Pieces = list[torch.Tensor]


def exchanged_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Execution, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (B, H, S, D); k, v: (B, K, T, D), this rank's rows -> output as q, log-sum-exp (B, H, S)."""
    whole_q = q
    q, k, v = (in_line(x, run.plan) for x in (q, k, v))
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    returning: list[_Arrival] = []
    passes = _passes(q, k, run)
    incoming = _to_heads([q], [k, v], passes[0], run, kind="qkv")
    for share, following in with_next(passes):
        arrived = incoming
        if following is not None:
            incoming = _to_heads([q], [k, v], following, run, kind="qkv")
        all_q, all_k, all_v = arrived.assembled(run)
        results = staged_forward(all_q, all_k, all_v, run.inner, scale)
        returning.append(_to_rows([*results], [], [out, lse], share, run, kind="out"))
    for arrival in returning:
        arrival.put()
    return out_of_line(out, whole_q), out_of_line(lse, whole_q)


def exchanged_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    run: Execution,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v; a function of its arguments alone: everything is exchanged again."""
    inputs = q, k, v
    dout, q, k, v, out, lse = (in_line(x, run.plan) for x in (dout, q, k, v, out, lse))
    passes = _passes(q, k, run)
    # Gradients of one head's copies are added up, in float32; without copies they are complete when they leave.
    gradient_dtype = lse.dtype if passes[0].copies > 1 else q.dtype
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=gradient_dtype) for x in (k, v))
    returning: list[_Arrival] = []
    incoming = _to_heads([q, dout, out, lse], [k, v], passes[0], run, kind="qkv_dout")
    for share, following in with_next(passes):
        arrived = incoming
        if following is not None:
            incoming = _to_heads([q, dout, out, lse], [k, v], following, run, kind="qkv_dout")
        all_q, all_dout, all_out, all_lse, *all_kv = arrived.assembled(run)
        given = all_dout, all_q, *all_kv, all_out, all_lse
        all_dq, *all_dkv = staged_backward(*given, run.inner, scale, gradient_dtype)
        results = [all_dq], all_dkv
        returning.append(_to_rows(*results, [dq, dk, dv], share, run, kind="dqkv"))
    for arrival in returning:
        arrival.put()
    return tuple(as_before(x, like) for x, like in zip((dq, dk, dv), inputs, strict=True))


def _passes(q: torch.Tensor, k: torch.Tensor, run: Execution) -> list[HeadShare]:
    return HeadShare.passes(q.shape[1], k.shape[1], run.plan.head_degree, run.heads_per_pass)


@dataclass
class _Arrival:
    """Pieces under way, one list for each source, and where they belong."""

    pieces: list[Pieces]
    pending: Pending
    n_queries: int
    """How many of the tensors have a row per query; the others have one per key."""
    share: HeadShare
    into: Pieces | None = None

    def assembled(self, run: Execution) -> Pieces:
        """Whole sequences of this rank's heads: (B, heads, S, ...) for each tensor."""
        self.pending.wait()
        whole = []
        for number, parts in enumerate(zip(*self.pieces, strict=True)):
            layout = run.layouts[number >= self.n_queries]
            b, heads, _, *rest = parts[0].shape
            x = parts[0].new_empty(b, heads, layout.seq_len, *rest)
            for part, ranges in zip(parts, layout.ranges, strict=True):
                places = Offsets(ranges)
                for start, stop in ranges:
                    x[:, :, start:stop] = part[:, :, places(start) : places(start) + stop - start]
            whole.append(x)
        return whole

    def put(self) -> None:
        """Results into the rows of all heads: queries' as they are, keys' added to what other copies gave."""
        self.pending.wait()
        for rank, parts in enumerate(self.pieces):
            for number, (part, target) in enumerate(zip(parts, self.into, strict=True)):
                if number < self.n_queries:
                    target[:, self.share.queries(rank)] = part
                    continue
                for head, rows in zip(self.share.keys(rank), part.unbind(1), strict=True):
                    target[:, head] += rows


def _to_heads(queries: Pieces, keys: Pieces, share: HeadShare, run: Execution, *, kind: str) -> _Arrival:
    """Start the exchange from my rows of all heads to all rows of my heads."""
    sent, shapes = [], []
    for rank in range(run.plan.head_degree):
        sent.append([x[:, share.queries(rank)] for x in queries] + [x[:, share.keys(rank)] for x in keys])
        lengths = [run.layouts[0].length(rank)] * len(queries) + [run.layouts[1].length(rank)] * len(keys)
        shapes.append([(x.shape[0], x.shape[1], n, *x.shape[3:]) for x, n in zip(sent[0], lengths, strict=True)])
    pieces, pending = _exchange(sent, shapes, run, kind=kind)
    return _Arrival(pieces, pending, len(queries), share)


def _to_rows(queries: Pieces, keys: Pieces, into: Pieces, share: HeadShare, run: Execution, *, kind: str) -> _Arrival:
    """Start the exchange from all rows of my heads to my rows of all heads, which belong `into` these."""
    sent = [
        [_rows(x, run.layouts[0].ranges[rank]) for x in queries] + [_rows(x, run.layouts[1].ranges[rank]) for x in keys]
        for rank in range(run.plan.head_degree)
    ]
    if run.heads_per_pass:  # a view would keep all rows of this pass alive until the last one is back
        here = run.group.rank()
        sent[here] = [x.clone() for x in sent[here]]
    shapes = [[(x.shape[0], y.shape[1], *x.shape[2:]) for x, y in zip(into, sent[0], strict=True)]] * len(sent)
    pieces, pending = _exchange(sent, shapes, run, kind=kind)
    return _Arrival(pieces, pending, len(queries), share, into)


def _rows(x: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    parts = [x[:, :, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat([x[:, :, :0], *parts], dim=2)


def _exchange(
    sent: list[Pieces], shapes: list[list[tuple]], run: Execution, *, kind: str
) -> tuple[list[Pieces], Pending]:
    """Start sending each rank its pieces; those of other ranks come in these shapes, and the types of the sent ones."""
    here, types = run.group.rank(), [x.dtype for x in sent[0]]
    own = sent[here]
    sent, shapes = ([[] if rank == here else x for rank, x in enumerate(one)] for one in (sent, shapes))
    send_sizes = [sum(aligned(x.nbytes) for x in pieces) for pieces in sent]
    counts = [[math.prod(shape) * t.itemsize for shape, t in zip(rank, types, strict=False)] for rank in shapes]
    buffer = torch.empty(sum(send_sizes), dtype=torch.uint8, device=own[0].device)
    place = 0
    for pieces in sent:
        for x in pieces:
            buffer[place : place + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
            place += aligned(x.nbytes)
    receive_sizes = [sum(map(aligned, rank)) for rank in counts]
    received, pending = all_to_all(buffer, send_sizes, receive_sizes, run.group, kind=kind)
    arrived, place = [], 0
    for rank, rank_shapes in zip(counts, shapes, strict=True):
        pieces = []
        for count, shape, t in zip(rank, rank_shapes, types, strict=False):
            pieces.append(received[place : place + count].view(t).view(shape))
            place += aligned(count)
        arrived.append(pieces)
    arrived[here] = own
    return arrived, pending

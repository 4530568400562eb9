"""Runs a plan: ring attention, forward and backward.

K and V travel as rows of one buffer, (rows, 2, B, K, D), unrepeated: any range of tokens is a contiguous piece of it.
Two such buffers are alive, the one that is worked on and the one that arrives. Results are merged in float32 at least.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.distributed.context_parallel.kernels import Kernel
from trainer.distributed.context_parallel.plan import Message, RankPlan, Stage, Tile
from trainer.distributed.exchange import Pending, Transfer, send_receive
from trainer.distributed.layout import Range


@dataclass(frozen=True)
class RingContext:
    """What a rank needs to run its plan: the schedule, its rank, whom it talks to, what computes."""

    plan: RankPlan
    rank: int
    group: dist.ProcessGroup
    kernel: Kernel


@dataclass(frozen=True)
class _Rows:
    """Some ranges of the sequence, one after another in dimension 0 of a buffer."""

    ranges: tuple[Range, ...]
    data: torch.Tensor

    def piece(self, message: Message) -> torch.Tensor | None:
        """The rows of a message, as a view; None if they are not here."""
        offset = 0
        for start, stop in self.ranges:
            if start <= message.start < stop:
                return self.data[offset + message.start - start : offset + message.stop - start]
            offset += stop - start
        return None


def ring_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingContext, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (B, H, S, D); k, v: (B, K, S, D), this rank's rows -> output as q, log-sum-exp (B, H, S)."""
    total = _Merged(q)
    own = held = _Rows(ring.plan.forward[0].held, _pack(k, v))
    for stage, following in _with_next(ring.plan.forward):
        incoming, pending = _fetch(following, own, held, ring)
        for tile in stage.tiles:
            keys, values = _unpack(held.data, tile.kv)
            rows = slice(*tile.q)
            out, lse = ring.kernel.forward(q[:, :, rows], keys, values, causal=tile.causal, scale=scale)
            total.add(rows, out, lse)
        pending.wait()
        held = incoming
    return total.out.to(q.dtype), total.lse


def ring_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ring: RingContext,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v; a function of its arguments alone. K and V travel again, dK and dV come home."""
    stages = ring.plan.backward
    dq = torch.zeros_like(q, dtype=lse.dtype)
    own = held = _Rows(stages[0].held, _pack(k, v))
    own_gradient = _Rows(own.ranges, torch.zeros_like(own.data, dtype=lse.dtype))
    arrived: list[tuple[Message, torch.Tensor]] = []
    homeward = Pending((), ())
    for stage, following in _with_next(stages):
        incoming, pending = _fetch(following, own, held, ring)
        gradient = own_gradient
        if held is not own:
            gradient = _Rows(held.ranges, torch.zeros_like(held.data, dtype=lse.dtype))
        for tile in stage.tiles:
            _add_tile_gradient(tile, dout, q, held.data, out, lse, dq, gradient.data, ring.kernel, scale)
        homeward.wait()
        _add_arrived(arrived, gradient, own_gradient)
        arrived, homeward = _send_home(stage, gradient, ring)
        pending.wait()
        held = incoming
    homeward.wait()
    _add_arrived(arrived, own_gradient, own_gradient)
    dk, dv = _unpack(own_gradient.data, (0, own_gradient.data.shape[0]))
    # Copies, because an operator may not return two views of one buffer.
    return dq.to(q.dtype), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


class _Merged:
    """Running output and log-sum-exp of the queries over the keys seen so far."""

    def __init__(self, q: torch.Tensor) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        b, h, s, d = q.shape
        # (B, S, H, D) in memory: the output projection reads it so
        self.out = q.new_zeros(b, s, h, d, dtype=dtype).transpose(1, 2)
        self.lse = q.new_full((b, h, s), -torch.inf, dtype=dtype)

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a tile's result for some of the queries; rows that saw no key yet, or now, count for nothing."""
        old = self.lse[:, :, rows]
        new = torch.logaddexp(old, lse)
        nothing = new.isneginf()
        keep, take = ((part - new).exp().masked_fill(nothing, 0.0).unsqueeze(-1) for part in (old, lse))
        self.out[:, :, rows].mul_(keep).add_(out * take)
        self.lse[:, :, rows] = new


def _add_tile_gradient(
    tile: Tile,
    dout: torch.Tensor,
    q: torch.Tensor,
    held: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dkv: torch.Tensor,
    kernel: Kernel,
    scale: float,
) -> None:
    """Add one tile's gradients to dq (B, H, S, D) and dkv (rows, 2, B, K, D)."""
    rows = slice(*tile.q)
    keys, values = _unpack(held, tile.kv)
    dout, q, out, lse = (x[:, :, rows] for x in (dout, q, out, lse))
    tile_dq, *tile_dkv = kernel.backward(dout, q, keys, values, out, lse, causal=tile.causal, scale=scale)
    dq[:, :, rows] += tile_dq
    for total, part in zip(_unpack(dkv, tile.kv), tile_dkv, strict=True):
        total += part


def _fetch(following: Stage | None, own: _Rows, held: _Rows, ring: RingContext) -> tuple[_Rows, Pending]:
    """Start what travels for the next stage: (what will be held then, handle)."""
    if following is None:
        return held, Pending((), ())
    incoming = _Rows(following.held, own.data.new_empty(following.rows, *own.data.shape[1:]))
    transfers = []
    for message in following.messages:
        if message.source == ring.rank:
            piece = own.piece(message)
            transfers.append(Transfer(held.piece(message) if piece is None else piece, message.target, is_send=True))
        else:
            transfers.append(Transfer(incoming.piece(message), message.source, is_send=False))
    return incoming, send_receive(transfers, ring.group, kind="ring_kv")


def _send_home(stage: Stage, gradient: _Rows, ring: RingContext) -> tuple[list[tuple[Message, torch.Tensor]], Pending]:
    """Start what travels after a stage of the backward: (what will have arrived then, handle)."""
    transfers, arriving = [], []
    for message in stage.home:
        if message.source == ring.rank:
            transfers.append(Transfer(gradient.piece(message), message.target, is_send=True))
        else:
            buffer = gradient.data.new_empty(message.rows, *gradient.data.shape[1:])
            transfers.append(Transfer(buffer, message.source, is_send=False))
            arriving.append((message, buffer))
    return arriving, send_receive(transfers, ring.group, kind="ring_dkv")


def _add_arrived(arrived: list[tuple[Message, torch.Tensor]], gradient: _Rows, own_gradient: _Rows) -> None:
    """Add gradients that others have summed so far, in the plan's order."""
    for message, buffer in arrived:
        target = own_gradient.piece(message)
        (gradient.piece(message) if target is None else target).add_(buffer)


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(B, K, S, D) twice -> (S, 2, B, K, D), contiguous."""
    b, heads, s, d = k.shape
    rows = k.new_empty(s, 2, b, heads, d)
    for target, source in zip(_unpack(rows, (0, s)), (k, v), strict=True):
        target.copy_(source)
    return rows


def _unpack(rows: torch.Tensor, part: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (B, K, T, D) of K and V in some rows of a buffer."""
    k, v = rows[slice(*part)].permute(1, 2, 3, 0, 4)
    return k, v


def _with_next(stages: tuple[Stage, ...]) -> zip:
    return zip(stages, (*stages[1:], None), strict=True)

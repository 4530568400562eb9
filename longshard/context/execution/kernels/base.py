"""The interface of kernels, which compute the tiles of a launch, forward and backward.

Of each tile: (queries, keys, values) -> (output, log-sum-exp).

Shapes: q (B, H, S, D); k, v (B, K, T, D), K divides H; lse (B, H, S), in float32 at least. No tile is empty, and every
query of a tile sees a key: on an empty tile the CPU kernel would end the process, and without a key it would return 0.

The backward gets the output and the log-sum-exp of the WHOLE attention, of which the tile is a part. So it computes the
probabilities of the whole, and the gradients of all tiles add up (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from typing import NamedTuple, Protocol

import torch

from longshard.context.planning.capabilities import Capabilities
from longshard.context.planning.lowering import Call, Launch
from longshard.context.planning.mask import Relation

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q (B, H, S, D), k and v (B, K, T, D), or their gradients."""


OutLse = tuple[torch.Tensor, torch.Tensor]
"""Output (B, H, S, D) and log-sum-exp (B, H, S) of attention."""


def part(x: torch.Tensor, place: slice, dim: int = 2) -> torch.Tensor:
    """Return a slice of a dimension, by default of the rows; x itself if that is all of it, which takes no time."""
    start = place.start
    stop = place.stop
    return x if start == 0 and stop == x.shape[dim] else x.narrow(dim, start, stop - start)


class BackwardInputs(NamedTuple):
    """Inputs of a backward: q, out and its gradient dout (B, H, S, D), k and v (B, K, T, D), lse (B, H, S)."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def part(self, queries: slice, keys: slice, dim: int = 2) -> "BackwardInputs":
        """Return the inputs of some queries and keys: of some rows (dim 2), or of some heads (dim 1)."""
        places = queries, queries, keys, keys, queries, queries
        parts = (part(x, place, dim) for x, place in zip(self, places, strict=True))
        return BackwardInputs(*parts)


class Terms(NamedTuple):
    """What attention is computed with beside q, k and v.

    sinks: (H,) logits of one more key of each head, whose share is in output and log-sum-exp. up: (H, N + V, R), with
    which k is a latent (B, 1, T, W) and v has no width; the output is then (B, H, S, V).
    """

    scale: float
    sinks: torch.Tensor | None = None
    up: torch.Tensor | None = None

    def of(self, heads: slice) -> "Terms":
        """Return the terms of some heads."""
        return Terms(self.scale, *(None if x is None else x[heads] for x in self[1:]))


class Kernel(Protocol):
    """A kernel: forward and backward of the calls of a launch, whose relations its capabilities allow."""

    name: str
    capabilities: Capabilities

    def forward_many(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch, *, scale: float
    ) -> OutLse:
        """Return output and lse of a launch. Their rows are the rows of its calls, one call after another.

        q, k, v: all rows.
        """

    def backward_many(self, given: BackwardInputs, launch: Launch, *, scale: float) -> QKV:
        """Return dq, dk and dv of a launch, to be added up. Their rows are as in `forward_many`.

        Gradients of repeated key/value heads are summed. given: all rows, out and lse over all keys.
        """


class OneTile:
    """A kernel of one tile, (q, k, v, relation, scale) -> (out, lse), whose launches have one call each."""

    def forward_many(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch, *, scale: float
    ) -> OutLse:
        (call,) = launch.calls
        keys = slice(*call.kv)
        inputs = part(q, slice(*call.q)), part(k, keys), part(v, keys)
        return self.forward(*inputs, relation=call.relation, scale=scale)

    def backward_many(self, given: BackwardInputs, launch: Launch, *, scale: float) -> QKV:
        (call,) = launch.calls
        inputs = given.part(slice(*call.q), slice(*call.kv))
        return self.backward(inputs, relation=call.relation, scale=scale)


class ManyTiles:
    """A kernel of many tiles, for which one tile is a launch of one call."""

    def forward(self, q, k, v, *, relation, scale):
        return self.forward_many(q, k, v, _one_call(q, k, relation), scale=scale)

    def backward(self, given: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        return self.backward_many(given, _one_call(given.q, given.k, relation), scale=scale)


def _one_call(q: torch.Tensor, k: torch.Tensor, relation: Relation) -> Launch:
    return Launch((Call((0, q.shape[2]), (0, k.shape[2]), relation, fresh=True),))


def rows_first(
    like: torch.Tensor, heads: int, rows: int, width: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return an uninitialised (B, heads, rows, width) in the memory order (B, rows, heads, width).

    The output projection reads outputs in this order. like: (B, ...); dtype: by default the dtype of `like`.
    """
    return like.new_empty(like.shape[0], rows, heads, width, dtype=dtype).transpose(1, 2)


def hidden_pairs(relation: Relation, n: int, m: int, device: torch.device) -> torch.Tensor:
    """Return (n, m) bool, true for pairs that the relation hides."""
    ones = torch.ones(n, m, dtype=torch.bool, device=device)
    hidden = torch.zeros_like(ones)
    if relation.upper:
        hidden |= ones.triu(m - n + 1)
    if relation.lower:
        hidden |= ones.tril(-1)
    return hidden


def repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key/value heads for the query heads that share them: (B, K, T, D) -> (B, heads, T, D)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def summed(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Sum repeated heads: the adjoint of `repeated`."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)

"""The interface of kernels, which compute the tiles of a launch, forward and backward.

For each tile: (queries, keys, values) -> (output, log-sum-exp).

Shapes: q (B, H, S, D); k, v (B, K, T, D), K divides H; lse (B, H, S), in float32 at least. No tile is empty, and every
query of a tile sees a key: on an empty tile the CPU kernel would end the process, and without a key it would return 0.

The backward gets the output and the log-sum-exp of the WHOLE attention. So it computes the probabilities of the whole
attention, and the gradients of all tiles add up (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from longshard.context.planning.capabilities import CAPABILITIES, Capabilities
from longshard.context.planning.lowering import Call, Launch
from longshard.context.planning.mask import Relation

QKV = tuple[Tensor, Tensor, Tensor]
"""q (B, H, S, D), k and v (B, K, T, D), or their gradients."""


OutLse = tuple[Tensor, Tensor]
"""Output (B, H, S, D) and log-sum-exp (B, H, S) of attention."""


def part(x: Tensor, place: slice, dim: int = 2) -> Tensor:
    """Return a slice of a dimension; the tensor itself if the slice is all of it, which takes no time.

    Args:
        x: The tensor, any shape.
        place: The slice.
        dim: The dimension, by default the rows.
    """
    start = place.start
    stop = place.stop
    return x if start == 0 and stop == x.shape[dim] else x.narrow(dim, start, stop - start)


class BackwardInputs(NamedTuple):
    """Inputs of a backward.

    Attributes:
        dout: The gradient of the output, (B, H, S, D).
        q: The queries, (B, H, S, D).
        k: The keys, (B, K, T, D).
        v: The values, (B, K, T, D).
        out: The output, (B, H, S, D).
        lse: The log-sum-exp, (B, H, S).
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def part(self, queries: slice, keys: slice, dim: int = 2) -> "BackwardInputs":
        """Return the inputs of some queries and keys.

        Args:
            queries: The slice of queries.
            keys: The slice of keys.
            dim: 2 for slices of rows, 1 for slices of heads.
        """
        places = queries, queries, keys, keys, queries, queries
        parts = (part(x, place, dim) for x, place in zip(self, places, strict=True))
        return BackwardInputs(*parts)


class Terms(NamedTuple):
    """The inputs of attention other than q, k and v.

    Attributes:
        scale: The factor of the scores.
        sinks: (H,) logits of one more key of each head; output and log-sum-exp include its share. None if absent.
        up: (H, N + V, R), with which k is a latent, (B, 1, T, W), and v has no width. The output is then (B, H, S, V).
            None if absent.
    """

    scale: float
    sinks: Tensor | None = None
    up: Tensor | None = None

    def of(self, heads: slice) -> "Terms":
        """Return the terms of some heads.

        Args:
            heads: The heads.
        """
        return Terms(self.scale, *(None if x is None else x[heads] for x in self[1:]))


class Kernel:
    """A kernel: forward and backward of the calls of a launch, whose relations its capabilities allow.

    A kernel of one tile has `forward` and `backward`; each of its launches has one call. A kernel of many tiles has
    `forward_many` and `backward_many`; one tile is a launch of one call.

    Attributes:
        name: The name of the kernel.
    """

    name: str

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the kernel can do."""
        return CAPABILITIES[self.name]

    def forward(self, q, k, v, *, relation, scale) -> OutLse:
        """Return output, (B, H, S, D), and log-sum-exp, (B, H, S), of one tile.

        Args:
            q: The queries, (B, H, S, D).
            k: The keys, (B, K, T, D).
            v: The values, (B, K, T, D).
            relation: Which keys each query sees.
            scale: The factor of the scores.
        """
        return self.forward_many(q, k, v, _one_call(q, k, relation), scale=scale)

    def backward(self, inputs: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        """Return dq, dk and dv of one tile.

        Args:
            inputs: The rows of the tile; output and log-sum-exp are over all keys.
            relation: Which keys each query sees.
            scale: The factor of the scores.
        """
        return self.backward_many(inputs, _one_call(inputs.q, inputs.k, relation), scale=scale)

    def forward_many(
        self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, *, scale: float
    ) -> OutLse:
        """Return output, (B, H, rows, D), and log-sum-exp, (B, H, rows), of a launch.

        Their rows are the queries of its calls, one call after another. This default is for kernels that compute one
        tile at a time: the launch must have exactly one call.

        Args:
            q: All queries, (B, H, S, D).
            k: All keys, (B, K, T, D).
            v: All values, (B, K, T, D).
            launch: The launch.
            scale: The factor of the scores.
        """
        (call,) = launch.calls
        keys = slice(*call.kv)
        inputs = part(q, slice(*call.q)), part(k, keys), part(v, keys)
        return self.forward(*inputs, relation=call.relation, scale=scale)

    def backward_many(self, inputs: BackwardInputs, launch: Launch, *, scale: float) -> QKV:
        """Return dq, dk and dv of a launch, which the caller adds up. Their rows are as in `forward_many`.

        Gradients of repeated key/value heads are summed.

        Args:
            inputs: All rows; output and log-sum-exp are over all keys.
            launch: The launch.
            scale: The factor of the scores.
        """
        (call,) = launch.calls
        inputs = inputs.part(slice(*call.q), slice(*call.kv))
        return self.backward(inputs, relation=call.relation, scale=scale)


def _one_call(q: Tensor, k: Tensor, relation: Relation) -> Launch:
    return Launch((Call((0, q.shape[2]), (0, k.shape[2]), relation, fresh=True),))


def rows_first(
    like: Tensor, heads: int, rows: int, width: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return an uninitialised (B, heads, rows, width) in the memory order (B, rows, heads, width).

    The output projection reads outputs in this order.

    Args:
        like: A tensor (B, ...), for its device and type.
        heads: Number of heads.
        rows: Number of rows.
        width: Size of a head.
        dtype: The type; None means the type of `like`.
    """
    return like.new_empty(like.shape[0], rows, heads, width, dtype=dtype).transpose(1, 2)


def hidden_pairs(relation: Relation, n: int, m: int, device: torch.device) -> Tensor:
    """Return which pairs of n queries and m keys a relation hides, (n, m) bool.

    Args:
        relation: The relation.
        n: Number of queries.
        m: Number of keys.
        device: The device of the result.
    """
    ones = torch.ones(n, m, dtype=torch.bool, device=device)
    hidden = torch.zeros_like(ones)
    if relation.upper:
        hidden |= ones.triu(m - n + 1)
    if relation.lower:
        hidden |= ones.tril(-1)
    return hidden


def repeated(x: Tensor, heads: int) -> Tensor:
    """Return key/value heads, repeated for the query heads that share them: (B, heads, T, D).

    Args:
        x: Keys or values, (B, K, T, D).
        heads: Number of query heads.
    """
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def summed(x: Tensor, kv_heads: int) -> Tensor:
    """Return the sum of repeated heads, (B, K, T, D): the adjoint of `repeated`.

    Args:
        x: Gradients of repeated heads, (B, heads, T, D).
        kv_heads: K.
    """
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)

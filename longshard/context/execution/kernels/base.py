"""The interface of kernels, which compute one tile: (queries, keys, values) -> (output, log-sum-exp), and its backward.

Shapes: q (B, H, S, D); k, v (B, K, T, D), K divides H; lse (B, H, S), in float32 at least. No tile is empty, and every
query of a tile sees a key: on an empty tile the CPU kernel would end the process, and without a key it would return 0.

The backward gets the output and the log-sum-exp of the WHOLE attention, of which the tile is a part. So it computes the
probabilities of the whole, and the gradients of all tiles add up (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from typing import NamedTuple, Protocol

import torch

from longshard.context.planning.capabilities import Capabilities
from longshard.context.planning.mask import Relation

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q (B, H, S, D), k and v (B, K, T, D), or their gradients."""


class BackwardInputs(NamedTuple):
    """Inputs of a backward: q, out and its gradient dout (B, H, S, D), k and v (B, K, T, D), lse (B, H, S)."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


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
    """A kernel: forward and backward of one tile, of a relation that its capabilities allow."""

    name: str
    capabilities: Capabilities

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        relation: Relation,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, as q, and lse."""

    def backward(self, given: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        """Return dq, dk, dv. Gradients of repeated key/value heads are summed."""


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

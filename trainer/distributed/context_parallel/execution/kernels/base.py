"""The interface of kernels, which compute one tile: (queries, keys, values) -> (output, log-sum-exp), and its backward.

Shapes: q (B, H, S, D); k, v (B, K, T, D), K divides H; lse (B, H, S), in float32 at least. Where values have a size of
their own, V, the output has it too; `PaddedValues` is for kernels that take one size. No tile is empty, and every
query of a tile sees a key: on an empty tile the CPU kernel would end the process, and without a key it would return 0.

The backward gets the output and the log-sum-exp of the WHOLE attention, of which the tile is a part. So it computes the
probabilities of the whole, and the gradients of all tiles add up (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from trainer.distributed.context_parallel.planning.capabilities import Capabilities
from trainer.distributed.context_parallel.planning.mask import Relation

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


class Kernel(Protocol):
    """A kernel: forward and backward of one tile, of a relation that its capabilities allow."""

    name: str
    capabilities: Capabilities

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, relation: Relation, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, as q, and lse."""

    def backward(self, *given: torch.Tensor, relation: Relation, scale: float) -> QKV:
        """Return dq, dk, dv; given: `BackwardInputs`. Gradients of repeated key/value heads are summed."""


class PaddedValues:
    """A kernel of one size of heads, for values of a smaller one: they are filled up with zeros."""

    def __init__(self, kernel: Kernel, value_dim: int) -> None:
        self._kernel, self._value_dim = kernel, value_dim
        self.name, self.capabilities = kernel.name, kernel.capabilities

    def forward(self, q, k, v, **settings):
        return self._cut(self._kernel.forward(q, k, _filled(v, q), **settings))

    def forward_many(self, q, k, v, launch, **settings):
        return self._cut(self._kernel.forward_many(q, k, _filled(v, q), launch, **settings))

    def backward(self, dout, q, k, v, out, lse, **settings):
        return self._cut_gradients(
            self._kernel.backward(_filled(dout, q), q, k, _filled(v, q), _filled(out, q), lse, **settings)
        )

    def backward_many(self, given, launch, **settings):
        filled = {name: _filled(getattr(given, name), given.q) for name in ("dout", "v", "out")}
        return self._cut_gradients(self._kernel.backward_many(given._replace(**filled), launch, **settings))

    def _cut(self, results: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = results
        return out[..., : self._value_dim], lse

    def _cut_gradients(self, gradients: QKV) -> QKV:
        dq, dk, dv = gradients
        return dq, dk, dv[..., : self._value_dim]


def _filled(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, like.shape[3] - x.shape[3]))


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

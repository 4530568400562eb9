"""The kernel of CPUs, and the definition of attention for any device. Interface and shapes: see `base.py`."""

import torch
from torch import Tensor

from longshard.context.execution.kernels.base import (
    QKV,
    BackwardInputs,
    Kernel,
    hidden_pairs,
    repeated,
    summed,
)
from longshard.context.planning.mask import Relation
from longshard.sharding.tensors import wide_type

_aten = torch.ops.aten


class CpuFlash(Kernel):
    """PyTorch's flash attention for CPUs, with grouped heads. Diagonals that are not of a square become a mask."""

    name = "cpu_flash"

    def forward(self, q, k, v, *, relation, scale):
        """Return output and log-sum-exp of one tile.

        Args:
            q: The queries, (B, H, S, D).
            k: The keys, (B, K, T, D).
            v: The values, (B, K, T, D).
            relation: Which keys each query sees.
            scale: The factor of the scores.
        """
        causal, mask = self._mask(q, k, relation)
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )

    def backward(self, inputs: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        """Return dq, dk and dv of one tile.

        Args:
            inputs: The rows of the tile.
            relation: Which keys each query sees.
            scale: The factor of the scores.
        """
        causal, mask = self._mask(inputs.q, inputs.k, relation)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, causal, attn_mask=mask, scale=scale
        )

    @staticmethod
    def _mask(q: Tensor, k: Tensor, relation: Relation) -> tuple[bool, Tensor | None]:
        """Return the kernel's own `is_causal`, and an additive mask in q's dtype, (S, T), -inf for hidden pairs.

        If `is_causal` says all, the mask is None.
        """
        square = q.shape[2] == k.shape[2]
        if relation is Relation.FULL or (relation is Relation.CAUSAL and square):
            return relation is Relation.CAUSAL, None
        hidden = hidden_pairs(relation, q.shape[2], k.shape[2], q.device)
        return False, q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


class Math(Kernel):
    """Attention by its definition, in float32 at least: the reference, and the kernel if no other one can compute it.

    Args:
        softcap: c of scores c * tanh(score / c); 0 means none.
    """

    name = "math"

    def __init__(self, softcap: float = 0.0) -> None:
        self._softcap = softcap

    def forward(self, q, k, v, *, relation, scale):
        """Return output and log-sum-exp of one tile.

        Args:
            q: The queries, (B, H, S, D).
            k: The keys, (B, K, T, D).
            v: The values, (B, K, T, D).
            relation: Which keys each query sees.
            scale: The factor of the scores.
        """
        scores = self._scores(q, k, relation, scale)
        lse = scores.logsumexp(-1)
        values = repeated(v, q.shape[1]).to(scores.dtype)
        return ((scores - lse[..., None]).exp() @ values).to(q.dtype), lse

    def backward(self, inputs: BackwardInputs, *, relation: Relation, scale: float) -> QKV:
        """Return dq, dk and dv of one tile.

        Args:
            inputs: The rows of the tile.
            relation: Which keys each query sees.
            scale: The factor of the scores.
        """
        dout, q, k, v, out, lse = inputs
        scores = self._scores(q, k, relation, scale)
        p = (scores - lse[..., None]).exp()
        dout, out, q_, k_, v_ = (x.to(p.dtype) for x in (dout, out, q, k, v))
        dp = dout @ repeated(v_, q.shape[1]).mT
        ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * scale
        if self._softcap:  # a hidden pair has p = 0
            ds = ds * (1 - (scores.clamp(min=-self._softcap) / self._softcap).square())
        dk = summed(ds.mT @ q_, k.shape[1])
        dv = summed(p.mT @ dout, k.shape[1])
        dq = ds @ repeated(k_, q.shape[1])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, relation: Relation, scale: float) -> Tensor:
        dtype = wide_type(q.dtype)
        scores = q.to(dtype) @ repeated(k, q.shape[1]).to(dtype).mT * scale
        if self._softcap:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        if relation is not Relation.FULL:
            scores = scores.masked_fill(
                hidden_pairs(relation, *scores.shape[-2:], q.device), -torch.inf
            )
        return scores

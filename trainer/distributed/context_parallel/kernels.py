"""One tile of attention: (queries, keys, values) -> (output, log-sum-exp), and its backward. The only file that knows
which kernel computes it, but for those of GPUs in `kernels_cuda.py`.

Shapes: q (B, H, S, D); k, v (B, K, T, D), K divides H; lse (B, H, S), in float32 at least. No tile is empty, and every
query of a tile sees a key: the CPU kernel would kill the process on the first, and give 0 for the second.

The backward is given the output and the log-sum-exp of the WHOLE attention, of which the tile is a part: probabilities
are then those of the whole, and the gradients of all tiles add up (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from typing import Protocol

import torch

from trainer.distributed.context_parallel.lowering import CAPABILITIES, Capabilities, able_kernels
from trainer.distributed.context_parallel.mask import Relation

_aten = torch.ops.aten


class Kernel(Protocol):
    """Forward and backward of one tile, of a relation that the capabilities allow."""

    name: str
    capabilities: Capabilities

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, relation: Relation, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> output as q, lse."""
        ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        relation: Relation,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> dq, dk, dv, with the gradients of repeated key/value heads summed."""
        ...


class CpuFlash:
    """PyTorch's flash attention for CPUs, with grouped heads; a diagonal that it does not know is a mask."""

    name = "cpu_flash"
    capabilities = CAPABILITIES["cpu_flash"]

    def forward(self, q, k, v, *, relation, scale):
        causal, mask = self._mask(q, k, relation)
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    def backward(self, dout, q, k, v, out, lse, *, relation, scale):
        causal, mask = self._mask(q, k, relation)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )

    @staticmethod
    def _mask(q: torch.Tensor, k: torch.Tensor, relation: Relation) -> tuple[bool, torch.Tensor | None]:
        """(the kernel's own switch, mask in q's dtype)."""
        square = q.shape[2] == k.shape[2]
        if relation is Relation.FULL or (relation is Relation.CAUSAL and square):
            return relation is Relation.CAUSAL, None
        hidden = hidden_pairs(relation, q.shape[2], k.shape[2], q.device)
        return False, q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


class Math:
    """Attention as its definition, in at least float32; the reference, and what runs where no kernel fits."""

    name = "math"
    capabilities = CAPABILITIES["math"]

    def forward(self, q, k, v, *, relation, scale):
        scores = self._scores(q, k, relation, scale)
        lse = scores.logsumexp(-1)
        values = repeated(v, q.shape[1]).to(scores.dtype)
        return ((scores - lse[..., None]).exp() @ values).to(q.dtype), lse

    def backward(self, dout, q, k, v, out, lse, *, relation, scale):
        p = (self._scores(q, k, relation, scale) - lse[..., None]).exp()
        dout, out, q_, k_, v_ = (x.to(p.dtype) for x in (dout, out, q, k, v))
        dp = dout @ repeated(v_, q.shape[1]).transpose(-1, -2)
        ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * scale
        dk = summed(ds.transpose(-1, -2) @ q_, k.shape[1])
        dv = summed(p.transpose(-1, -2) @ dout, k.shape[1])
        dq = ds @ repeated(k_, q.shape[1])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(q: torch.Tensor, k: torch.Tensor, relation: Relation, scale: float) -> torch.Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(dtype) @ repeated(k, q.shape[1]).to(dtype).transpose(-1, -2) * scale
        if relation is not Relation.FULL:
            scores = scores.masked_fill(hidden_pairs(relation, *scores.shape[-2:], q.device), -torch.inf)
        return scores


def choose_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, name: str = "auto", *, bands: bool = False
) -> Kernel:
    """The kernel of that name, or with `auto` the fastest, for tensors of this kind; bands: a sliding window is used.

    Raises:
        ConfigError: a kernel that cannot do it; the sentence names those that can.
    """
    from trainer.distributed.context_parallel.kernels_cuda import CUDA_KERNELS

    able = able_kernels(name, device_type, str(dtype).removeprefix("torch."), head_dim, bands=bands)
    kernels = {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Math())}
    return kernels[able[0] if name == "auto" else name]


def hidden_pairs(relation: Relation, n: int, m: int, device: torch.device) -> torch.Tensor:
    """(n, m) bool, true for pairs that the relation does not show."""
    ones = torch.ones(n, m, dtype=torch.bool, device=device)
    hidden = torch.zeros_like(ones)
    if relation.upper:
        hidden |= ones.triu(m - n + 1)
    if relation.lower:
        hidden |= ones.tril(-1)
    return hidden


def repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, K, T, D) -> (B, heads, T, D), each key/value head repeated for the query heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def summed(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Adjoint of `repeated`."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)

"""One tile of attention: (queries, keys, values) -> (output, log-sum-exp), and its backward. The only file that knows
which kernel computes it.

Shapes: q (B, H, S, D); k, v (B, K, T, D), K divides H; lse (B, H, S), in float32 at least. A causal tile is square.
No tile is empty: the CPU kernel would kill the process.

The backward is given the output and the log-sum-exp of the WHOLE attention, of which the tile is a part: probabilities
are then those of the whole, and the gradients of all tiles add up (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from typing import Protocol

import torch

from trainer.config.errors import ConfigError

_aten = torch.ops.aten


class Kernel(Protocol):
    """Forward and backward of one tile."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
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
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> dq, dk, dv, with the gradients of repeated key/value heads summed."""
        ...


class CpuFlash:
    """PyTorch's flash attention for CPUs: float64, float32, bfloat16, grouped heads."""

    def forward(self, q, k, v, *, causal, scale):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=scale)

    def backward(self, dout, q, k, v, out, lse, *, causal, scale):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=None, scale=scale
        )


class CudaFlash:
    """PyTorch's flash attention for GPUs: bfloat16 and float16. Grouped heads are repeated here, after their travel."""

    def forward(self, q, k, v, *, causal, scale):
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]

    def backward(self, dout, q, k, v, out, lse, *, causal, scale):
        kv_heads = k.shape[1]
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        # Without dropout the random state is not read, and without nested tensors there are no cumulative lengths.
        state = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *state, scale=scale
        )
        return dq, _summed(dk, kv_heads), _summed(dv, kv_heads)


class Math:
    """Attention as its definition, in at least float32; the reference, and what runs where no kernel fits."""

    def forward(self, q, k, v, *, causal, scale):
        scores = self._scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        values = _repeated(v, q.shape[1]).to(scores.dtype)
        return ((scores - lse[..., None]).exp() @ values).to(q.dtype), lse

    def backward(self, dout, q, k, v, out, lse, *, causal, scale):
        p = (self._scores(q, k, causal, scale) - lse[..., None]).exp()
        dout, out, q_, k_, v_ = (x.to(p.dtype) for x in (dout, out, q, k, v))
        dp = dout @ _repeated(v_, q.shape[1]).transpose(-1, -2)
        ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * scale
        dk = _summed(ds.transpose(-1, -2) @ q_, k.shape[1])
        dv = _summed(p.transpose(-1, -2) @ dout, k.shape[1])
        dq = ds @ _repeated(k_, q.shape[1])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(dtype) @ _repeated(k, q.shape[1]).to(dtype).transpose(-1, -2) * scale
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores


def choose_kernel(device_type: str, dtype: torch.dtype) -> Kernel:
    """The fastest kernel for tensors of this kind.

    Raises:
        ConfigError: float16 on a CPU, for which there is no kernel.
    """
    if device_type == "cuda":
        return CudaFlash() if dtype in (torch.bfloat16, torch.float16) else Math()
    if dtype == torch.float16:
        raise ConfigError("attention in float16 has no kernel on a CPU; use bfloat16 or float32")
    return CpuFlash()


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, K, T, D) -> (B, heads, T, D), each key/value head repeated for the query heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Adjoint of `_repeated`."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)

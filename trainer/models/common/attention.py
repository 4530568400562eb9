"""Grouped-query attention; its inner part is what context parallelism replaces."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainer.models.common.rotary import apply_rope


class InnerAttention(nn.Module):
    """Causal scaled dot product attention, of all tokens or a sliding window: the part that a plan may replace.

    A window, and sinks, are a dense mask here, (S, S); `parallelize` puts planned attention in their place.
    """

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__()
        self.sliding_window = sliding_window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        plan: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: (B, H, S, D); k, v: (B, K, S, D), K divides H; sinks: (H,) -> (B, H, S, D).

        Local attention has no use for a plan.
        """
        grouped = q.shape[1] != k.shape[1]
        if sinks is None and self.sliding_window is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        if self.sliding_window is not None:
            visible = visible.triu(1 - self.sliding_window)
        mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
        if sinks is not None:  # one more key and value, zeros, first in line
            k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))
            column = sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[2], 1)
            mask = torch.cat((column, mask.expand(q.shape[1], -1, -1)), dim=2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


class AttentionSinks(nn.Module):
    """One logit a head, of a key that every token sees and that gives nothing (as in GPT-OSS)."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self) -> torch.Tensor:
        """(H,): tensor parallelism leaves each rank those of its heads."""
        return self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    rotate: `apply_rope`, or another that takes its arguments.
    """

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        sliding_window: int | None = None,
        sinks: bool = False,
        bias: bool = False,
        rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = apply_rope,
    ) -> None:
        super().__init__()
        self.head_dim, self.rotate = head_dim, rotate
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=bias)
        self.sinks = AttentionSinks(n_heads) if sinks else None
        self.inner_attention = InnerAttention(sliding_window)

    def forward(
        self, x: torch.Tensor, freqs_cis: torch.Tensor, attention_plan: torch.Tensor | None = None
    ) -> torch.Tensor:
        # The number of heads is read off the projections: tensor parallelism leaves each rank some of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        freqs_cis = freqs_cis.narrow(-3, 0, q.shape[2])
        q, k = self.rotate(q, freqs_cis), self.rotate(k, freqs_cis)  # (B, H, S, D), (B, K, S, D)
        sinks = self.sinks() if self.sinks is not None else None
        out = self.inner_attention(q, k, v, sinks=sinks, plan=attention_plan)
        return self.wo(out.transpose(1, 2).flatten(2))  # (B, S, dim)

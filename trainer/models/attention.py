"""Grouped-query attention, whose inner part context parallelism replaces."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from longshard.context.execution.kernels.flash import newer_flash
from longshard.context.execution.latent import expanded
from longshard.context.planning.capabilities import FLASH2_BROKEN, INDEX_LIMIT, call_elements
from trainer.models.initialization import fill
from trainer.models.rotary import apply_rope
from trainer.models.short_convolution import ShortConvolution
from trainer.models.weights import Weights

_CUDNN, _FLASH, *_OTHERS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


_GPU = "cuda"


@torch.compiler.assume_constant_result
def _gpu_backends(head_dim: int) -> list[SDPBackend]:
    """Return PyTorch's attention back ends on GPUs, the fastest first; the first one that can do a call computes it."""
    if newer_flash(head_dim):
        return [_FLASH, _CUDNN, *_OTHERS]
    return [_CUDNN, *_OTHERS] if head_dim in FLASH2_BROKEN else [_CUDNN, _FLASH, *_OTHERS]


class InnerAttention(nn.Module):
    """Causal scaled dot product attention. `ContextParallelAttention` replaces it by planned attention.

    Sliding windows, sinks and soft-caps of scores exist in planned attention only.
    """

    def __init__(self, sliding_window: int | None = None, softcap: float | None = None) -> None:
        super().__init__()
        self.sliding_window, self.softcap = sliding_window, softcap

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        plan: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: (B, H, S, D); k, v: (B, K, S, D), K divides H; sinks: (H,) -> (B, H, S, D). It does not use the plan.

        up: (H, N + V, R), with which k is a latent (B, 1, S, R + P), D = N + P, and the output is (B, H, S, V).

        Raises:
            RuntimeError: a sliding window, sinks or a soft-cap, without a plan.
        """
        if sinks is not None or self.sliding_window is not None or self.softcap is not None:
            raise RuntimeError(
                "a sliding window, attention sinks and a soft-cap need planned attention; apply "
                "`ContextParallelAttention` to this module, on a mesh of one rank if need be, and run the model inside "
                "`context_parallel(...)`"
            )
        if up is None:
            return _causal(q, k, v, scale)
        k, v = expanded(k, up, q.shape[3])
        # the fastest kernels take one size of heads
        filled = F.pad(v, (0, q.shape[3] - v.shape[3]))
        return _causal(q, k, filled, scale)[..., : v.shape[3]]


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> torch.Tensor:
    options = {"is_causal": True, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if q.device.type != _GPU:
        return F.scaled_dot_product_attention(q, k, v, **options)
    batch, heads, rows, head_dim = q.shape
    # adapters may train one of them
    has_gradients = q.requires_grad or k.requires_grad or v.requires_grad
    if has_gradients and heads * call_elements(batch, rows, 1, head_dim) >= INDEX_LIMIT:
        raise RuntimeError(
            f"the gradients of plain attention over {batch} x {rows:,} tokens and {heads} heads would be wrong: "
            "kernels of GPUs count elements with 32 bits; apply `ContextParallelAttention` to this module, on a mesh "
            "of one rank if need be, which computes fewer heads at a time"
        )
    with sdpa_kernel(_gpu_backends(head_dim), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, **options)


class AttentionSinks(Weights):
    """(H,): one logit a head, of a key without a value that every token sees (as in GPT-OSS)."""

    def init_parameter(
        self, name: str, parameter: torch.Tensor, generator: torch.Generator
    ) -> None:
        parameter.zero_()


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    softcap, scale: of the scores, the scale by default `head_dim ** -0.5`; short_conv_kernel: tokens of a
    `ShortConvolution`, 0 for none; bias: of queries, keys and values; qk_norm: builds a norm of some width for the
    query and the key of each head (arXiv 2302.05442), whose weights the heads share, None for no norm; norm_all_heads:
    it is one norm over the queries, or keys, of all heads; rotate: `apply_rope`, or a function with the same arguments,
    None for no rotation; gate: whether the output of each head is multiplied by a sigmoid (arXiv 2505.06708), whose
    rows in `wq` follow those of the head's query; branches: of the model, see `initialization.draw`.
    """

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        sliding_window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
        short_conv_kernel: int = 0,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: Callable[[int], nn.Module] | None = None,
        norm_all_heads: bool = False,
        rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = apply_rope,
        gate: bool = False,
        branches: int = 1,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.rotate = rotate
        self.branches = branches
        self.gate = gate
        self.wq = nn.Linear(dim, n_heads * head_dim * (2 if gate else 1), bias=bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=output_bias)
        self.norm_all_heads = norm_all_heads
        self.q_norm, self.k_norm = (
            None if qk_norm is None else qk_norm(head_dim * (heads if norm_all_heads else 1))
            for heads in (n_heads, n_kv_heads)
        )
        self.sinks = AttentionSinks(n_heads) if sinks else None
        sizes = n_heads * head_dim, n_kv_heads * head_dim
        self.short_conv = (
            ShortConvolution(*sizes, short_conv_kernel) if short_conv_kernel else None
        )
        self.inner_attention = InnerAttention(sliding_window, softcap)

    def forward(
        self,
        x: torch.Tensor,
        freqs_cis: torch.Tensor | None,
        attention_plan: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        **of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        """x: (B, S, dim) -> the same shape. freqs_cis: None if nothing is rotated. positions: (B, S) within packed
        documents, for the short convolution.

        of_adapters: passed to the linear modules, see `transforms/lora.py`.
        """
        q, k, v = (w(x, **of_adapters) for w in (self.wq, self.wk, self.wv))
        if self.gate:
            q, gate = (
                part.flatten(-2) for part in q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
            )
        if self.short_conv is not None:
            q, k, v = self.short_conv(q, k, v, positions=positions, plan=attention_plan)
        if self.norm_all_heads:
            q = self.q_norm(q)
            k = self.k_norm(k)
        # -1: with tensor parallelism each rank has some of the heads.
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)) for p in (q, k, v))  # (B, S, H, D)
        if self.q_norm is not None and not self.norm_all_heads:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.rotate is not None:
            freqs_cis = freqs_cis.narrow(-3, 0, q.shape[1])
            # one after another, and under the same names: what goes in is freed
            q = self.rotate(q, freqs_cis)
            k = self.rotate(k, freqs_cis)
        # (B, H, S, D), (B, K, S, D) twice
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        sinks = self.sinks() if self.sinks is not None else None
        out = self.inner_attention(q, k, v, scale=self.scale, sinks=sinks, plan=attention_plan)
        out = out.transpose(1, 2).flatten(2)
        return self.wo(out * gate.sigmoid() if self.gate else out, **of_adapters)  # (B, S, dim)

    def init_parameter(
        self, name: str, parameter: torch.Tensor, generator: torch.Generator
    ) -> None:
        fill(name, parameter, generator, branches=self.branches if name == "wo.weight" else 1)

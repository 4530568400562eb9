"""The Llama 3 decoder as single-device code. B batch, S sequence, H query heads, K key/value heads, D head size.

"The Llama 3 Herd of Models" (arXiv 2407.21783); RoPE: arXiv 2104.09864, on adjacent pairs as in Meta's checkpoints.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from trainer.models.llama3.args import RopeScaling, TransformerArgs


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Angle per position of each pair of a head: (D / 2,) float64, on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = theta**-exponents
    if scaling is None:
        return frequencies
    # Turns within the original context: many keep their frequency, few are stretched, between them a linear ramp.
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = ramp.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def precompute_freqs_cis(args: TransformerArgs, dtype: torch.dtype) -> torch.Tensor:
    """Cosine and sine of every position's angles: (max_seq_len, D / 2, 2).

    Angles are float64: in float32 they are off by 3e-2 at a million tokens.
    """
    positions = torch.arange(args.max_seq_len, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling))
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(dtype)


def apply_rope(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """Rotate each adjacent pair of x: (B, H, S, D) by freqs_cis: (S, D / 2, 2) or, per row, (B, S, D / 2, 2)."""
    freqs_cis = freqs_cis.unsqueeze(-4)  # over the heads
    even, odd = x.to(freqs_cis.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = freqs_cis.unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def build_norm(args: TransformerArgs) -> nn.Module:
    """RMSNorm, LayerNorm with a weight only, or LayerNorm without parameters (np_layernorm, as in OLMo)."""
    if args.norm_type == "rmsnorm":
        return nn.RMSNorm(args.dim, eps=args.norm_eps)
    return nn.LayerNorm(args.dim, eps=args.norm_eps, elementwise_affine=args.norm_type == "layernorm", bias=False)


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
    """Grouped-query attention with RoPE."""

    def __init__(self, args: TransformerArgs, sliding_window: int | None) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)
        self.sinks = AttentionSinks(args.n_heads) if args.attention_sinks else None
        self.inner_attention = InnerAttention(sliding_window)

    def forward(
        self, x: torch.Tensor, freqs_cis: torch.Tensor, attention_plan: torch.Tensor | None = None
    ) -> torch.Tensor:
        # The number of heads is read off the projections: tensor parallelism leaves each rank some of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        freqs_cis = freqs_cis.narrow(-3, 0, q.shape[2])
        q, k = apply_rope(q, freqs_cis), apply_rope(k, freqs_cis)  # (B, H, S, D), (B, K, S, D)
        sinks = self.sinks() if self.sinks is not None else None
        out = self.inner_attention(q, k, v, sinks=sinks, plan=attention_plan)
        return self.wo(out.transpose(1, 2).flatten(2))  # (B, S, dim)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_hidden_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, args: TransformerArgs, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(args)
        self.attention = Attention(args, args.window_of_layer(layer))
        self.ffn_norm = build_norm(args)
        self.feed_forward = FeedForward(args)

    def forward(
        self, x: torch.Tensor, freqs_cis: torch.Tensor, attention_plan: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis, attention_plan)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """The decoder. `forward` gives hidden states; `output`, the projection to logits, is called by the loss.

    A pipeline stage has some of the modules, and None in the place of embedding, norm or output that it lacks.
    """

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        # A dictionary keeps the layers' names when a pipeline stage drops some of them.
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args, i) for i in range(args.n_layers)})
        self.norm = build_norm(args)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("freqs_cis", torch.empty(args.max_seq_len, args.head_dim // 2, 2), persistent=False)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_plan: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """tokens: (B, S) -> hidden: (B, S, dim). positions: (B, S), each below max_seq_len; by default 0 to S - 1.

        attention_plan: what context-parallel attention is to do; see `context_parallel`. A pipeline stage that lacks
        the embedding takes hidden states in the place of tokens.
        """
        freqs_cis = self.freqs_cis if positions is None else self.freqs_cis[positions]
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, freqs_cis, attention_plan)
        return x if self.norm is None else self.norm(x)

    def init_buffers(self, device: torch.device) -> None:
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        self.freqs_cis = precompute_freqs_cis(self.args, dtype).to(device)

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        """Norms one; sinks zero; embeddings of unit scale; small logits; matrices keep the scale of what they multiply,
        and the last ones of the residual branches shrink with depth."""
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("sinks.weight") else 1.0)
        else:
            parameter.normal_(0.0, self._init_std(name, fan_in=parameter.shape[1]), generator=generator)

    def _init_std(self, name: str, fan_in: int) -> float:
        if name == "tok_embeddings.weight":
            # Tied, the same matrix makes the logits, which must start small.
            return 0.02 if self.args.tie_embeddings else 1.0
        if name == "output.weight":
            return 1.0 / fan_in
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
            return 1.0 / math.sqrt(fan_in * 2 * self.args.n_layers)
        return 1.0 / math.sqrt(fan_in)

"""Layers of linear attention: a state of fixed size in the place of the keys and values of all tokens."""

import torch
import torch.nn.functional as F
from torch import nn

from trainer.distributed.context_parallel.linear_attention import linear_attention
from trainer.families.args import LinearArgs
from trainer.models.initialization import draw, start
from trainer.models.short_convolution import InnerConvolution, Taps


class InnerLinearAttention(nn.Module):
    """The recurrence over whole sequences, or with a plan over those of all ranks. It has no parameters."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        *,
        scale: float,
        positions: torch.Tensor | None = None,
        plan: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shapes as of `linear_attention` -> (B, S, G, V)."""
        return linear_attention(q, k, v, log_decay, beta, plan, positions, scale)[0]


class OfHeads(nn.Module):
    """One number for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self) -> torch.Tensor:
        """Return (H,): with tensor parallelism, the numbers of this rank's heads."""
        return self.weight


class Decay(nn.Module):
    """Logarithms of decays: -e^a_log * softplus(x + dt_bias), in float32 at least (Mamba, arXiv 2312.00752).

    Its parameters are never rounded to the type of the computation: e^a_log multiplies what is summed over all tokens.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.a_log, self.dt_bias = OfHeads(heads), OfHeads(heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, H) -> the same shape."""
        a_log, dt_bias = self.a_log(), self.dt_bias()
        dtype = torch.promote_types(x.dtype, torch.promote_types(a_log.dtype, torch.float32))
        return -a_log.to(dtype).exp() * F.softplus(x.to(dtype) + dt_bias.to(dtype))

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        if name == "a_log.weight":
            parameter.uniform_(0.01, 16.0, generator=generator).log_()
        else:
            parameter.fill_(1.0)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next: short convolutions, normalised keys, a gated norm.

    The rows of `in_qkvz` are, for each key head, its query, its key, and the values and gates of its value heads, and
    those of `in_ba` what `beta` and the decays of its value heads are computed from: so that tensor parallelism divides
    both by key heads.
    """

    def __init__(self, dim: int, args: LinearArgs, *, norm_eps: float, branches: int = 1) -> None:
        super().__init__()
        self.args, self.branches, self.shared = args, branches, args.value_heads // args.key_heads
        keys, values = args.key_heads * args.key_dim, args.value_heads * args.value_dim
        self.in_qkvz = nn.Linear(dim, 2 * (keys + values), bias=False)
        self.in_ba = nn.Linear(dim, 2 * args.value_heads, bias=False)
        self.q_conv, self.k_conv, self.v_conv = (Taps(channels, args.kernel) for channels in (keys, keys, values))
        self.inner_convolution = InnerConvolution()
        self.decay = Decay(args.value_heads)
        self.inner_attention = InnerLinearAttention()
        self.norm = nn.RMSNorm(args.value_dim, eps=norm_eps)
        self.wo = nn.Linear(values, dim, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        freqs_cis: torch.Tensor | None = None,
        attention_plan: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        **of_adapters: torch.Tensor,
    ) -> torch.Tensor:
        """As `Attention`: x: (B, S, dim) -> the same shape. Nothing is rotated."""
        args, shared = self.args, self.shared
        sizes = args.key_dim, args.key_dim, shared * args.value_dim, shared * args.value_dim
        heads = self.in_qkvz(x, **of_adapters).unflatten(-1, (-1, sum(sizes)))  # -1: of this tensor-parallel rank
        *qkv, z = (part.flatten(2) for part in heads.split(sizes, -1))
        b, a = self.in_ba(x, **of_adapters).unflatten(-1, (-1, 2, shared)).unbind(-2)
        taps = torch.cat((self.q_conv(), self.k_conv(), self.v_conv()))
        mixed = F.silu(self.inner_convolution(torch.cat(qkv, -1), taps, positions=positions, plan=attention_plan))
        q, k, v = mixed.split([part.shape[-1] for part in qkv], -1)
        q, k = (_normalised(part.unflatten(-1, (-1, args.key_dim))) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, args.value_dim)) for part in (v, z))
        beta, log_decay = b.flatten(2).sigmoid(), self.decay(a.flatten(2))
        how = {"scale": args.key_dim**-0.5, "positions": positions, "plan": attention_plan}
        out = self.inner_attention(q, k, v, log_decay, beta, **how)
        return self.wo((self.norm(out) * F.silu(z)).flatten(2), **of_adapters)

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        if parameter.ndim == 1:
            start(name, parameter)
        else:
            draw(parameter, generator, branches=self.branches if name == "wo.weight" else 1)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Return each head's vector over its length, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)

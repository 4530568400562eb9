"""Layers of linear attention: a state of fixed size in the place of the keys and values of all tokens."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel

from longshard.context.convolution import ContextParallelConvolution
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.linear_attention import linear_attention
from longshard.context.planning.options import ContextParallelOptions
from trainer.families.layers import NormArgs
from trainer.families.linear_args import GatedDeltaArgs, KimiDeltaArgs, LinearArgs, MambaArgs
from trainer.models.cached import Cached
from trainer.models.initialization import Branch
from trainer.models.norms import NormOfHeads
from trainer.models.short_convolution import InnerConvolution, Taps
from trainer.models.weights import Weights
from trainer.parallel.tensor_parallel import (
    LocalParameter,
    Replicated,
    ShardedNorm,
    Styles,
    sequence_gathered,
)


class InnerLinearAttention(Cached):
    """The recurrence over whole sequences, or with a plan over those of all ranks. It has no parameters."""

    def forward(self, tokens: Tokens, plan: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs of the recurrence, (B, S, G, V).

        Args:
            tokens: the inputs, as for `linear_attention`.
            plan: the handle of the open plan; None without context parallelism.
        """
        return linear_attention(tokens, plan)[0]


class Decay(nn.Module):
    """Logarithms of decays, -e^a_log * step, with step = softplus(x + dt_bias) (Mamba, arXiv 2312.00752).

    channels: of a head, which have decays of their own. The parameters are in float32 at least, and never rounded to
    the type of the computation: e^a_log multiplies what is summed over all tokens.
    """

    float32_at_least = True

    def __init__(self, heads: int, channels: int = 1) -> None:
        super().__init__()
        self.channels = channels
        self.a_log = Weights(heads)
        self.dt_bias = Weights(heads * channels)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (B, S, H * channels) -> logarithms and steps, (B, S, H), or (B, S, H, channels) of several."""
        rate = self.a_log()
        dt_bias = self.dt_bias()
        dtype = torch.promote_types(x.dtype, torch.promote_types(rate.dtype, torch.float32))
        step = F.softplus(x.to(dtype) + dt_bias.to(dtype))
        rate = rate.to(dtype).exp()
        if self.channels > 1:
            step = step.unflatten(-1, (-1, self.channels))
            rate = rate.unsqueeze(-1)
        return -rate * step, step

    def init_parameter(
        self, name: str, parameter: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name == "a_log.weight":
            parameter.uniform_(0.01, 16.0, generator=generator).log_()
        else:
            parameter.fill_(1.0)


class LinearAttention(Branch):
    """What the layers share: matrices, short convolutions, decays, the recurrence, and the parts of ranks.

    divided: modules whose rows belong to heads, of which tensor-parallel ranks have a part; whole: modules that each
    rank has whole, and uses for its own heads; first: matrices before one that is divided.
    """

    divided: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    norm_style: ParallelStyle = SequenceParallel(sequence_dim=2, use_local_output=True)
    """Of the norm of (B, S, H, D)."""

    def __init__(
        self, dim: int, args: LinearArgs, norms: NormArgs, *, branches: int = 1
    ) -> None:
        super().__init__()
        self.args, self.branches = args, branches
        for name, (rows, columns) in args.linear_shapes(dim).items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))
        for name, channels in args.convolved().items():
            self.add_module(f"{name}_conv", Taps(channels, args.kernel))
            if args.convolution_bias:
                self.add_module(f"{name}_bias", Weights(channels))
        self.inner_convolution = InnerConvolution()
        self.inner_attention = InnerLinearAttention()
        self.add_own_parts(args, norms)

    def add_own_parts(self, args: LinearArgs, norms: NormArgs) -> None:
        """Make the modules that a kind of linear attention has beside projections and convolutions."""
        raise NotImplementedError

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
        where = {"positions": positions, "plan": attention_plan}
        return self.wo(self.mixed(x, where, **of_adapters).to(x.dtype), **of_adapters)

    def mixed(
        self, x: torch.Tensor, where: dict[str, Any], **of_adapters: torch.Tensor
    ) -> torch.Tensor:
        """x: (B, S, dim) -> the input of the output projection. where: positions and plan of inner modules."""
        raise NotImplementedError

    def convolve(
        self, parts: Sequence[torch.Tensor], where: dict[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Return each part, (B, S, C), behind its convolution and SiLU."""
        names = self.args.convolved()
        taps = torch.cat([self.get_submodule(f"{name}_conv")() for name in names])
        mixed = self.inner_convolution.run(torch.cat([*parts], -1), taps, **where)
        if self.args.convolution_bias:
            mixed = mixed + torch.cat([self.get_submodule(f"{name}_bias")() for name in names])
        return F.silu(mixed).split([part.shape[-1] for part in parts], -1)

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide its heads, by the names of its modules."""
        styles = sequence_gathered() | {"norm": self.norm_style}
        for name in self.divided:
            is_linear = isinstance(self.get_submodule(name), nn.Linear)
            styles[name] = ColwiseParallel() if is_linear else LocalParameter()
        styles |= {name: Replicated(is_local=True) for name in self.whole}
        return styles | {name: Replicated(is_local=False) for name in self.first}

    def context_parallel_styles(self, options: ContextParallelOptions, ranks: int) -> Styles:
        """Return how `ranks` context-parallel ranks share a sequence: the recurrence asks for its plan itself."""
        return {"inner_convolution": ContextParallelConvolution()} if ranks > 1 else {}

    def init_parameter(
        self, name: str, parameter: torch.Tensor, generator: torch.Generator
    ) -> None:
        if name.endswith("_bias.weight"):
            parameter.zero_()
        else:
            super().init_parameter(name, parameter, generator)


class GatedDeltaNet(LinearAttention):
    """Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next: short convolutions, normalised keys, a gated norm.

    The rows of `in_qkvz` are, for each key head, its query, its key, and the values and gates of its value heads, and
    those of `in_ba` what `beta` and the decays of its value heads are computed from: so that tensor parallelism divides
    both by key heads.
    """

    divided = "in_qkvz", "in_ba", "q_conv", "k_conv", "v_conv", "decay.a_log", "decay.dt_bias"

    def add_own_parts(self, args: GatedDeltaArgs, norms: NormArgs) -> None:
        self.decay = Decay(args.value_heads)
        self.norm = nn.RMSNorm(args.value_dim, eps=norms.eps)

    def mixed(
        self, x: torch.Tensor, where: dict[str, Any], **of_adapters: torch.Tensor
    ) -> torch.Tensor:
        args = self.args
        shared = self.args.value_heads // self.args.key_heads
        sizes = args.key_dim, args.key_dim, shared * args.value_dim, shared * args.value_dim
        # -1: of this tensor-parallel rank
        heads = self.in_qkvz(x, **of_adapters).unflatten(-1, (-1, sum(sizes)))
        *qkv, z = (part.flatten(2) for part in heads.split(sizes, -1))
        b, a = self.in_ba(x, **of_adapters).unflatten(-1, (-1, 2, shared)).unbind(-2)
        q, k, v = self.convolve(qkv, where)
        q, k = (_normalised(part.unflatten(-1, (-1, args.key_dim))) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, args.value_dim)) for part in (v, z))
        beta = b.flatten(2).sigmoid()
        log_decay, _ = self.decay(a.flatten(2))
        tokens = Tokens(q, k, v, log_decay, beta, where["positions"], args.key_dim**-0.5)
        out = self.inner_attention.run(tokens, where["plan"])
        return (self.norm(out) * F.silu(z)).flatten(2)

    def rows_of_heads(self) -> dict[str, list[int]]:
        """Return the numbers of rows that each head has in a parameter, one for each of its matrices."""
        args = self.args
        values = args.value_heads // args.key_heads * args.value_dim
        return {"in_qkvz.weight": [args.key_dim, args.key_dim, values, values]}


class KimiDeltaAttention(LinearAttention):
    """Kimi Delta Attention (arXiv 2510.26692): the delta rule, with a decay for each channel of a key."""

    divided = (
        "wq",
        "wk",
        "wv",
        "wb",
        "f_b",
        "g_b",
        "q_conv",
        "k_conv",
        "v_conv",
        "decay.a_log",
        "decay.dt_bias",
    )
    first = "f_a", "g_a"

    def add_own_parts(self, args: KimiDeltaArgs, norms: NormArgs) -> None:
        self.decay = Decay(args.heads, args.head_dim)
        self.norm = nn.RMSNorm(args.head_dim, eps=norms.eps)

    def mixed(
        self, x: torch.Tensor, where: dict[str, Any], **of_adapters: torch.Tensor
    ) -> torch.Tensor:
        qkv = self.convolve([w(x, **of_adapters) for w in (self.wq, self.wk, self.wv)], where)
        q, k, v = (part.unflatten(-1, (-1, self.args.head_dim)) for part in qkv)
        log_decay, _ = self.decay(self.f_b(self.f_a(x, **of_adapters), **of_adapters))
        beta = self.wb(x, **of_adapters).sigmoid()
        q, k = _normalised(q), _normalised(k)
        tokens = Tokens(q, k, v, log_decay, beta, where["positions"], self.args.head_dim**-0.5)
        out = self.inner_attention.run(tokens, where["plan"])
        gate = self.g_b(self.g_a(x, **of_adapters), **of_adapters).unflatten(
            -1, (-1, self.args.head_dim)
        )
        return (self.norm(out) * gate.sigmoid()).flatten(2)


class Mamba2(LinearAttention):
    """Mamba-2 (arXiv 2405.21060): a state space model with a decay for each head; groups of heads share keys, queries.

    What the papers call C, B and x are queries, keys and values, which here are multiplied by the step.
    """

    norm_style = ShardedNorm()  # over all heads

    def add_own_parts(self, args: MambaArgs, norms: NormArgs) -> None:
        self.decay = Decay(args.heads)
        self.skip = Weights(args.heads)
        self.norm_eps = norms.eps
        values = args.heads * args.head_dim
        self.norm = NormOfHeads(values, eps=norms.eps) if args.groups == 1 else Weights(values)
        kinds = ("conv", "bias") if args.convolution_bias else ("conv",)
        of_groups = "in_b", "in_c", *(f"{part}_{kind}" for part in "bc" for kind in kinds)
        of_heads = (
            "in_z",
            "in_x",
            "in_dt",
            "skip",
            "decay.a_log",
            "decay.dt_bias",
            *(f"x_{kind}" for kind in kinds),
        )
        self.whole = of_groups if args.groups == 1 else ()
        self.divided = of_heads if args.groups == 1 else (*of_heads, *of_groups, "norm")

    def mixed(
        self, x: torch.Tensor, where: dict[str, Any], **of_adapters: torch.Tensor
    ) -> torch.Tensor:
        matrices = self.in_z, self.in_x, self.in_b, self.in_c, self.in_dt
        z, *parts, dt = (w(x, **of_adapters) for w in matrices)
        values, keys, queries = self.convolve(parts, where)
        values = values.unflatten(-1, (-1, self.args.head_dim))
        keys, queries = (
            part.unflatten(-1, (-1, self.args.state_dim)) for part in (keys, queries)
        )
        log_decay, step = self.decay(dt)
        steps = values * step.unsqueeze(-1)
        tokens = Tokens(queries, keys, steps, log_decay, None, where["positions"], 1.0)
        out = self.inner_attention.run(tokens, where["plan"])
        out = (out + values * self.skip().unsqueeze(-1)).flatten(2)
        return self._normed(out * F.silu(z.to(out.dtype)))

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, S, H * head_dim), normed over all channels of a group."""
        if self.args.groups == 1:
            return self.norm(x)
        size = self.args.heads * self.args.head_dim // self.args.groups
        return (
            F.rms_norm(x.unflatten(-1, (-1, size)), (size,), eps=self.norm_eps).flatten(2)
            * self.norm()
        )


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Return each head's vector over its length, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)

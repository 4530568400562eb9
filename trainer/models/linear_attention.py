"""Layers of linear attention: a state of fixed size replaces the keys and values of all tokens.

The kinds are Gated DeltaNet, Kimi Delta Attention and Mamba-2. Each computes queries, keys, values and decays of its
tokens in `mixed`; `longshard.context.linear_attention` computes the recurrence, with a plan over all ranks.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel

from longshard.context.convolution import ContextParallelConvolution
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.linear_attention import linear_attention
from longshard.context.planning.options import ContextParallelOptions
from longshard.sharding.tensors import wide, wide_type
from trainer.families.layers import NormArgs
from trainer.families.linear_args import GatedDeltaArgs, KimiDeltaArgs, LinearArgs, MambaArgs
from trainer.models.cached import Cached
from trainer.models.initialization import Branch, Filled, Weights
from trainer.models.norms import NormOfHeads
from trainer.models.short_convolution import InnerConvolution, Taps
from trainer.parallel.tensor_parallel import (
    LOCAL_COPY,
    LOCAL_PARAMETER,
    REPLICATED,
    SHARDED_NORM,
    Styles,
    sequence_gathered,
)

Where = Mapping[str, Tensor | None]
"""Positions and plan of the tokens."""


class Decay(nn.Module):
    """Logarithms of decays, -e^a_log * step, with step = softplus(x + dt_bias) (Mamba, arXiv 2312.00752).

    The parameters are in float32 or wider, and are never rounded to the dtype of the computation, because e^a_log
    multiplies a sum over all tokens.

    Args:
        heads: H.
        channels: Number of decays of a head.
    """

    float32_at_least = True

    def __init__(self, heads: int, channels: int = 1) -> None:
        super().__init__()
        self.channels = channels
        self.a_log = Weights(heads)
        self.dt_bias = Weights(heads * channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the decays, and the steps, both in float32 or wider.

        Each has the shape (B, S, H), or (B, S, H, channels) with several channels.

        Args:
            x: (B, S, H * channels).
        """
        rate = self.a_log()
        dt_bias = self.dt_bias()
        dtype = torch.promote_types(x.dtype, wide_type(rate.dtype))
        step = F.softplus(x.to(dtype) + dt_bias.to(dtype))
        rate = rate.to(dtype).exp()
        if self.channels > 1:
            step = step.unflatten(-1, (-1, self.channels))
            rate = rate.unsqueeze(-1)
        return -rate * step, step

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Draw `a_log` as the logarithm of uniform numbers between 0.01 and 16; set `dt_bias` to one.

        Args:
            name: Name of the parameter in this module.
            parameter: 1-D, filled in place.
            generator: The source of random numbers.
        """
        if name == "a_log.weight":
            parameter.uniform_(0.01, 16.0, generator=generator).log_()
        else:
            parameter.fill_(1.0)


class InnerLinearAttention(Cached):
    """The recurrence over whole sequences, or with a plan over the sequences of all ranks. It has no parameters."""

    def forward(self, tokens: Tokens, plan: Tensor | None = None) -> Tensor:
        """Return the outputs of the recurrence, (B, S, G, V).

        Args:
            tokens: The inputs, as for `linear_attention`.
            plan: The handle of the open plan, any shape. None without context parallelism.
        """
        return linear_attention(tokens, plan)[0]


class LinearAttention(Branch):
    """The shared parts of all kinds: matrices, short convolutions, decays, the recurrence, and the division over ranks.

    The rows of linear modules and of `Weights` belong to heads, and tensor-parallel ranks divide the rows. Two
    attributes name the modules that are not divided. `whole`: the rows serve all heads, and each rank uses the whole
    module for its own heads. `first`: the matrices before a divided one.

    Args:
        dim: Channels of the hidden states.
        args: The sizes of this kind.
        norms: The model's norms.
        branches: Residual branches of the model, see `initialization.draw`.
    """

    whole: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    norm_style: ParallelStyle = SequenceParallel(sequence_dim=2, use_local_output=True)
    """Tensor-parallel style of the norm, whose input is (B, S, H, D)."""

    def __init__(self, dim: int, args: LinearArgs, norms: NormArgs, *, branches: int) -> None:
        super().__init__()
        self.args = args
        self.branches = branches
        for name, (rows, columns) in args.linear_shapes(dim).items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))
        for name, channels in args.convolved().items():
            self.add_module(f"{name}_conv", Taps(channels, args.kernel))
            if args.convolution_bias:
                self.add_module(f"{name}_bias", Filled(channels, 0.0))
        self.inner_convolution = InnerConvolution()
        self.inner_attention = InnerLinearAttention()
        self.add_own_parts(args, norms)

    def add_own_parts(self, args: LinearArgs, norms: NormArgs) -> None:
        """Make the modules of this kind other than projections and convolutions.

        Args:
            args: The sizes of this kind.
            norms: The model's norms.
        """
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor | None = None,
        attention_plan: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        **adapter_inputs: Tensor,
    ) -> Tensor:
        """Return the output, (B, S, dim). Nothing is rotated.

        Args:
            x: (B, S, dim).
            freqs_cis: Not used.
            attention_plan: Handle of the open plan. None without a plan.
            positions: (B, S), positions within packed documents. None if documents are not masked.
            **adapter_inputs: Passed to the linear modules, see `transforms/lora.py`.
        """
        where = {"positions": positions, "plan": attention_plan}
        return self.wo(self.mixed(x, where, **adapter_inputs).to(x.dtype), **adapter_inputs)

    def mixed(self, x: Tensor, where: Where, **adapter_inputs: Tensor) -> Tensor:
        """Return the input of the output projection, (B, S, channels).

        Args:
            x: (B, S, dim).
            where: `positions` and `plan` for inner modules.
            **adapter_inputs: Passed to the linear modules.
        """
        raise NotImplementedError

    def convolve(self, parts: Sequence[Tensor], where: Where) -> tuple[Tensor, ...]:
        """Return each part after its convolution, bias and SiLU, (B, S, C).

        Args:
            parts: Inputs of the convolutions, (B, S, C) each, in the order of `args.convolved()`.
            where: `positions` and `plan` for the convolution.
        """
        names = self.args.convolved()
        taps = torch.cat([self.get_submodule(f"{name}_conv")() for name in names])
        mixed = self.inner_convolution.run(torch.cat([*parts], -1), taps, **where)
        if self.args.convolution_bias:
            mixed = mixed + torch.cat([self.get_submodule(f"{name}_bias")() for name in names])
        return F.silu(mixed).split([part.shape[-1] for part in parts], -1)

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide the heads, by names of modules."""
        styles = {"norm": self.norm_style}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                styles[name] = ColwiseParallel()
            elif isinstance(module, Weights):
                styles[name] = LOCAL_PARAMETER
        styles |= dict.fromkeys(self.whole, LOCAL_COPY) | dict.fromkeys(self.first, REPLICATED)
        return styles | sequence_gathered()

    def context_parallel_styles(self, options: ContextParallelOptions, ranks: int) -> Styles:
        """Return how context-parallel ranks share a sequence. The recurrence looks up its plan itself.

        Args:
            options: Not used.
            ranks: Number of context-parallel ranks.
        """
        return {"inner_convolution": ContextParallelConvolution()} if ranks > 1 else {}


class GatedDeltaNet(LinearAttention):
    """Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next: short convolutions, normalised keys, a gated norm.

    The rows of `in_qkvz` are, for each key head: its query, its key, and the values and gates of its value heads. The
    rows of `in_ba` are, for each key head, the inputs of `beta` and of the decays of its value heads. So tensor
    parallelism divides both matrices by key heads. In Qwen3.5 each of these six parts has a matrix of its own, head
    after head.
    """

    def add_own_parts(self, args: GatedDeltaArgs, norms: NormArgs) -> None:
        """Make the decays and the gated norm.

        Args:
            args: The sizes of Gated DeltaNet.
            norms: The model's norms.
        """
        self.decay = Decay(args.value_heads)
        self.norm = nn.RMSNorm(args.value_dim, eps=norms.eps)

    def mixed(self, x: Tensor, where: Where, **adapter_inputs: Tensor) -> Tensor:
        """Return the gated norm of the recurrence, (B, S, value heads * value_dim).

        Args:
            x: (B, S, dim).
            where: `positions` and `plan` for inner modules.
            **adapter_inputs: Passed to the linear modules.
        """
        args = self.args
        *qkv, z, b, a = self._projected(x, **adapter_inputs)
        q, k, v = self.convolve(qkv, where)
        q, k = (_normalised(part.unflatten(-1, (-1, args.key_dim))) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, args.value_dim)) for part in (v, z))
        log_decay, _ = self.decay(a)
        tokens = Tokens(q, k, v, log_decay, b.sigmoid(), where["positions"], args.key_dim**-0.5)
        out = self.inner_attention.run(tokens, where["plan"])
        return (self.norm(out) * F.silu(z)).flatten(2)

    def _projected(self, x: Tensor, **adapter_inputs: Tensor) -> Sequence[Tensor]:
        """Return queries, keys, values, gates, and the inputs of beta and of decays, (B, S, channels) each."""
        if not self.args.by_head:
            matrices = self.in_q, self.in_k, self.in_v, self.in_z, self.in_beta, self.in_decay
            return [matrix(x, **adapter_inputs) for matrix in matrices]
        sizes = self._rows_of_key_head()
        # -1: the key heads of this tensor-parallel rank
        heads = self.in_qkvz(x, **adapter_inputs).unflatten(-1, (-1, sum(sizes)))
        shared = self.args.value_heads // self.args.key_heads
        gates = self.in_ba(x, **adapter_inputs).unflatten(-1, (-1, 2, shared)).unbind(-2)
        return [part.flatten(2) for part in (*heads.split(sizes, -1), *gates)]

    def _rows_of_key_head(self) -> list[int]:
        args = self.args
        values = args.value_heads // args.key_heads * args.value_dim
        return [args.key_dim, args.key_dim, values, values]

    def rows_of_heads(self) -> dict[str, list[int]]:
        """Return the rows of one head in each divided parameter, by name of the parameter.

        The list has one number of rows for each kind of matrix in the parameter.
        """
        if self.args.by_head:
            return {"in_qkvz.weight": self._rows_of_key_head()}
        keys, values = [self.args.key_dim], [self.args.value_dim]
        return {
            "in_q.weight": keys,
            "in_k.weight": keys,
            "in_v.weight": values,
            "in_z.weight": values,
        }


class KimiDeltaAttention(LinearAttention):
    """Kimi Delta Attention (arXiv 2510.26692): the delta rule, with a decay for each channel of a key."""

    first = "f_a", "g_a"

    def add_own_parts(self, args: KimiDeltaArgs, norms: NormArgs) -> None:
        """Make the decays and the gated norm.

        Args:
            args: The sizes of Kimi Delta Attention.
            norms: The model's norms.
        """
        self.decay = Decay(args.heads, args.head_dim)
        self.norm = nn.RMSNorm(args.head_dim, eps=norms.eps)

    def mixed(self, x: Tensor, where: Where, **adapter_inputs: Tensor) -> Tensor:
        """Return the gated norm of the recurrence, (B, S, heads * head_dim).

        Args:
            x: (B, S, dim).
            where: `positions` and `plan` for inner modules.
            **adapter_inputs: Passed to the linear modules.
        """
        qkv = self.convolve(
            [w(x, **adapter_inputs) for w in (self.wq, self.wk, self.wv)], where
        )
        q, k, v = (part.unflatten(-1, (-1, self.args.head_dim)) for part in qkv)
        log_decay, _ = self.decay(self.f_b(self.f_a(x, **adapter_inputs), **adapter_inputs))
        beta = self.wb(x, **adapter_inputs).sigmoid()
        q, k = _normalised(q), _normalised(k)
        tokens = Tokens(q, k, v, log_decay, beta, where["positions"], self.args.head_dim**-0.5)
        out = self.inner_attention.run(tokens, where["plan"])
        gate = self.g_b(self.g_a(x, **adapter_inputs), **adapter_inputs).unflatten(
            -1, (-1, self.args.head_dim)
        )
        return (self.norm(out) * gate.sigmoid()).flatten(2)


class Mamba2(LinearAttention):
    """Mamba-2 (arXiv 2405.21060): a state space model with a decay for each head.

    A group of heads shares keys and queries.

    C, B and x of the paper are the queries, keys and values here; the values are multiplied by the step.
    """

    norm_style = SHARDED_NORM  # over all heads

    def add_own_parts(self, args: MambaArgs, norms: NormArgs) -> None:
        """Make the decays, the skip connection and the norm.

        With one group, also set `whole`, the modules that tensor-parallel ranks do not divide.

        Args:
            args: The sizes of Mamba-2.
            norms: The model's norms.
        """
        self.decay = Decay(args.heads)
        self.skip = Weights(args.heads)
        self.norm_eps = norms.eps
        values = args.heads * args.head_dim
        self.norm = NormOfHeads(values, eps=norms.eps) if args.groups == 1 else Weights(values)
        if args.groups == 1:
            kinds = ("conv", "bias") if args.convolution_bias else ("conv",)
            self.whole = "in_b", "in_c", *(f"{part}_{kind}" for part in "bc" for kind in kinds)

    def mixed(self, x: Tensor, where: Where, **adapter_inputs: Tensor) -> Tensor:
        """Return the norm of the gated recurrence, (B, S, H * head_dim).

        Args:
            x: (B, S, dim).
            where: `positions` and `plan` for inner modules.
            **adapter_inputs: Passed to the linear modules.
        """
        matrices = self.in_z, self.in_x, self.in_b, self.in_c, self.in_dt
        z, *parts, dt = (w(x, **adapter_inputs) for w in matrices)
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

    def _normed(self, x: Tensor) -> Tensor:
        """Return x normed over all channels of a group, (B, S, H * head_dim)."""
        args = self.args
        if args.groups == 1:
            return self.norm(x)
        size = args.heads * args.head_dim // args.groups
        return (
            F.rms_norm(x.unflatten(-1, (-1, size)), (size,), eps=self.norm_eps).flatten(2)
            * self.norm()
        )


def _normalised(x: Tensor) -> Tensor:
    """Divide the vector of each head by its length, in float32 or wider."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

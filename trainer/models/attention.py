"""Grouped-query attention. Context parallelism replaces its inner part."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import SequenceParallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from longshard.context.attention import ContextParallelAttention
from longshard.context.convolution import ContextParallelConvolution
from longshard.context.execution.kernels.flash import newer_flash
from longshard.context.execution.latent import expanded
from longshard.context.planning.capabilities import FLASH2_BROKEN, INDEX_LIMIT, call_elements
from longshard.context.planning.options import ContextParallelOptions
from trainer.families.layers import NormArgs
from trainer.families.mixers import AttentionArgs, SharedKeysArgs
from trainer.models.cached import Cached
from trainer.models.initialization import Branch, Filled
from trainer.models.norms import NormOfHeads, build_rms_norm
from trainer.models.rotary import apply_rope, apply_rope_to_halves
from trainer.models.short_convolution import ShortConvolution
from trainer.parallel.tensor_parallel import (
    LOCAL_PARAMETER,
    SHARDED_NORM,
    Styles,
    sequence_gathered,
)

_CUDNN, _FLASH, *_OTHERS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


_GPU = "cuda"


@torch.compiler.assume_constant_result
def _gpu_backends(head_dim: int) -> list[SDPBackend]:
    """Return PyTorch's attention back ends on GPUs, the fastest first.

    The first one that supports a call computes it.
    """
    if newer_flash(head_dim):
        return [_FLASH, _CUDNN, *_OTHERS]
    return [_CUDNN, *_OTHERS] if head_dim in FLASH2_BROKEN else [_CUDNN, _FLASH, *_OTHERS]


class InnerAttention(Cached):
    """Causal scaled dot product attention. `ContextParallelAttention` replaces it by planned attention.

    Sliding windows, sinks and soft-caps of scores exist in planned attention only.

    Args:
        sliding_window: Number of tokens that a query sees, itself included. None without a window.
        softcap: Bound of the scores. None without a bound.
    """

    def __init__(self, sliding_window: int | None = None, softcap: float | None = None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.softcap = softcap

    def planned(self, options: ContextParallelOptions) -> ContextParallelAttention:
        """Return the style that replaces this module by planned attention with the same window and soft-cap.

        This module is not changed.

        Args:
            options: The options of planned attention, for `keep_exchanged`.
        """
        return ContextParallelAttention(
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            keep_exchanged=options.keep_exchanged,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        plan: Tensor | None = None,
        up: Tensor | None = None,
    ) -> Tensor:
        """Return attention to the same and all earlier tokens of a sequence.

        Args:
            q: (B, H, S, D).
            k: (B, K, S, D), K divides H. With `up` a latent, (B, 1, S, R + P), D = N + P.
            v: (B, K, S, D). Not used with `up`.
            scale: Factor of the scores; by default 1 / sqrt(D).
            sinks: (H,). They need planned attention.
            plan: Not used.
            up: (H, N + V, R): computes keys and values from the latent; letters as in `LatentAttention`.

        Returns:
            (B, H, S, D); with `up` (B, H, S, V).

        Raises:
            RuntimeError: A sliding window, sinks or a soft-cap needs planned attention; or gradients have more elements
                than the kernels of GPUs can count.
        """
        if sinks is not None or self.sliding_window is not None or self.softcap is not None:
            raise RuntimeError(
                "a sliding window, attention sinks and a soft-cap need planned attention. Apply "
                "`ContextParallelAttention` to this module, on a mesh of one rank if need be, and run the model inside "
                "`context_parallel(...)`"
            )
        if up is None:
            return _causal(q, k, v, scale)
        k, v = expanded(k, up, q.shape[3])
        # the fastest kernels need the same head size for keys and values
        filled = F.pad(v, (0, q.shape[3] - v.shape[3]))
        return _causal(q, k, filled, scale)[..., : v.shape[3]]


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    options = {"is_causal": True, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if q.device.type != _GPU:
        return F.scaled_dot_product_attention(q, k, v, **options)
    batch, heads, rows, head_dim = q.shape
    # with adapters, only one of them may need gradients
    has_gradients = q.requires_grad or k.requires_grad or v.requires_grad
    if has_gradients and heads * call_elements(batch, rows, 1, head_dim) >= INDEX_LIMIT:
        raise RuntimeError(
            f"the gradients of plain attention over {batch} x {rows:,} tokens and {heads} heads would be wrong: "
            "kernels of GPUs count elements with 32 bits; apply `ContextParallelAttention` to this module, on a mesh "
            "of one rank if need be, which computes fewer heads at a time"
        )
    with sdpa_kernel(_gpu_backends(head_dim), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, **options)


class Attention(Branch):
    """Grouped-query attention with rotary positions.

    Args:
        dim: Channels of the hidden states.
        args: Numbers of heads, and the optional parts.
        norms: The model's norms. Queries and keys have an RMSNorm with this epsilon and offset; heads share its
            weights.
        rotate: `apply_rope`, or a function with the same arguments, (B, S, H, D) and a table.
        branches: Residual branches of the model, see `initialization.draw`.
    """

    def __init__(
        self,
        dim: int,
        args: AttentionArgs,
        norms: NormArgs,
        *,
        rotate: Callable[[Tensor, Tensor], Tensor] = apply_rope,
        branches: int = 1,
    ) -> None:
        super().__init__()
        self.args = args
        self.head_dim = args.head_dim
        if args.keys_are_values:
            rotate = apply_rope_to_halves
        self.rotate = None if args.rope_theta == 0 else rotate
        self.branches = branches
        queries, keys = args.sizes
        self.wq = nn.Linear(dim, queries * (1 + args.gate), bias=args.bias)
        self.wk = nn.Linear(dim, keys, bias=args.bias)
        self.wv = None if args.keys_are_values else nn.Linear(dim, keys, bias=args.bias)
        self.wo = nn.Linear(queries, dim, bias=args.output_bias)
        self.eps = norms.eps
        self.q_norm = self.k_norm = None
        if args.norm_all_heads:
            self.q_norm = NormOfHeads(queries, eps=norms.eps)
            self.k_norm = NormOfHeads(keys, eps=norms.eps)
        elif args.qk_norm:
            self.q_norm = build_rms_norm(norms, args.head_dim)
            self.k_norm = build_rms_norm(norms, args.head_dim)
        # one logit per head, (H,), of a key without a value that every token sees (as in GPT-OSS)
        self.sinks = Filled(args.n_heads, 0.0) if args.sinks else None
        kernel = args.short_conv_kernel
        self.short_conv = ShortConvolution(queries, keys, kernel) if kernel else None
        self.inner_attention = InnerAttention(args.window, args.softcap)
        self.gives_keys = False
        """Whether later layers share the keys and values."""

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor | None,
        attention_plan: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        **adapter_inputs: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the output, (B, S, dim). With `gives_keys` the keys and the values follow, (B, K, S, D) each.

        Args:
            x: (B, S, dim).
            freqs_cis: Rotary table. None if the layer rotates nothing.
            attention_plan: Handle of the open plan. None without a plan.
            positions: (B, S), positions within packed documents, for the short convolution.
            **adapter_inputs: Passed to the linear modules, see `transforms/lora.py`.
        """
        q = self.wq(x, **adapter_inputs)
        k = self.wk(x, **adapter_inputs)
        v = k if self.wv is None else self.wv(x, **adapter_inputs)
        if self.args.gate:
            q, gate = (
                part.flatten(-2) for part in q.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
            )
        if self.short_conv is not None:
            q, k, v = self.short_conv(q, k, v, positions=positions, plan=attention_plan)
        if self.args.norm_all_heads:
            q = self.q_norm(q)
            k = self.k_norm(k)
        # -1: with tensor parallelism each rank has some of the heads.
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)) for p in (q, k, v))  # (B, S, H, D)
        if self.q_norm is not None and not self.args.norm_all_heads:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.args.value_norm:
            v = F.rms_norm(v, (self.head_dim,), eps=self.eps)
        if self.rotate is not None:
            freqs_cis = freqs_cis.narrow(-3, 0, q.shape[1])
            # one after the other, and under the same names: so the unrotated tensors are freed early
            q = self.rotate(q, freqs_cis)
            k = self.rotate(k, freqs_cis)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, S, D), (B, K, S, D)
        out = self._attended(q, k, v, attention_plan)
        out = out * gate.sigmoid() if self.args.gate else out
        out = self.wo(out, **adapter_inputs)  # (B, S, dim)
        return (out, k, v) if self.gives_keys else out

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, attention_plan: Tensor | None
    ) -> Tensor:
        """Return the output of all heads, (B, S, H * D). q: (B, H, S, D). k, v: (B, K, S, D)."""
        sinks = None if self.sinks is None else self.sinks()
        out = self.inner_attention.run(
            q, k, v, scale=self.args.scale, sinks=sinks, plan=attention_plan
        )
        return out.transpose(1, 2).flatten(2)

    def rows_of_heads(self) -> dict[str, list[int]]:
        """Return the numbers of rows that one head has in each parameter.

        A parameter with several matrices has one number for each of them.
        """
        size = self.head_dim
        others = {f"{name}.weight": [size] for name in self._keys_and_values()}
        return {"wq.weight": [size] * (1 + self.args.gate), **others}

    def _keys_and_values(self) -> list[str]:
        """Return the modules that make keys and values."""
        return [name for name in ("wk", "wv") if getattr(self, name) is not None]

    @property
    def queries(self) -> nn.Linear:
        """The module that makes queries."""
        return self.wq

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide the heads, by names of modules."""
        styles = sequence_gathered("wq", *self._keys_and_values())
        for name in ("sinks", "short_conv.q", "short_conv.k", "short_conv.v"):
            if getattr(self, name.partition(".")[0]) is not None:
                styles[name] = LOCAL_PARAMETER
        if self.q_norm is not None:
            # The norm is over all heads, or over D of (B, S, H, D). Each rank has the gradient of its own heads.
            norm = (
                SHARDED_NORM
                if self.args.norm_all_heads
                else SequenceParallel(sequence_dim=2, use_local_output=True)
            )
            styles["q_norm"] = norm
            if self.k_norm is not None:
                styles["k_norm"] = norm
        return styles

    def context_parallel_styles(self, options: ContextParallelOptions, ranks: int) -> Styles:
        """Return how context-parallel ranks share a sequence, by names of modules. One style plans attention.

        Args:
            options: Options of planned attention.
            ranks: Number of context-parallel ranks; with one rank, the short convolution has no style.
        """
        styles = {"inner_attention": self.inner_attention.planned(options)}
        if self.short_conv is not None and ranks > 1:
            styles["short_conv.inner_convolution"] = ContextParallelConvolution()
        return styles


class SharedKeysAttention(Attention):
    """Attention of queries to the keys and values of an earlier layer.

    Args:
        dim: As in `Attention`.
        args: The record.
        norms: As in `Attention`.
        branches: As in `Attention`.
    """

    def __init__(
        self, dim: int, args: SharedKeysArgs, norms: NormArgs, *, branches: int
    ) -> None:
        super().__init__(dim, args, norms, branches=branches)
        self.wk = self.wv = self.k_norm = None

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor | None,
        attention_plan: Tensor | None = None,
        *,
        keys: Sequence[Tensor],
        positions: Tensor | None = None,
        **adapter_inputs: Tensor,
    ) -> Tensor:
        """Return the output, (B, S, dim).

        Args:
            x: (B, S, dim).
            freqs_cis: Rotary table. None if the layer rotates nothing.
            attention_plan: Handle of the open plan. None without a plan.
            keys: Rotated keys, and values, of the earlier layer, (B, K, S, D) each.
            positions: Not used.
            **adapter_inputs: Passed to the linear modules, see `transforms/lora.py`.
        """
        q = self.wq(x, **adapter_inputs).unflatten(-1, (-1, self.head_dim))  # (B, S, H, D)
        q = q if self.q_norm is None else self.q_norm(q)
        if self.rotate is not None:
            q = self.rotate(q, freqs_cis.narrow(-3, 0, q.shape[1]))
        out = self._attended(q.transpose(1, 2), *keys, attention_plan)
        return self.wo(out, **adapter_inputs)

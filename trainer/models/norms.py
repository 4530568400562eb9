"""The norms of a decoder."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from trainer.families.layers import NormArgs


def build_norm(norms: NormArgs, dim: int) -> nn.Module:
    """Return a norm of `dim` channels, of a model with these norms."""
    if norms.kind == "rmsnorm":
        return build_rms_norm(norms, dim)
    has_weight = norms.kind == "layernorm"
    return nn.LayerNorm(dim, eps=norms.eps, elementwise_affine=has_weight, bias=False)


def build_rms_norm(norms: NormArgs, dim: int) -> nn.RMSNorm:
    """Return an RMSNorm, which queries and keys have whatever the other norms are."""
    return (OffsetNorm if norms.offset else nn.RMSNorm)(dim, eps=norms.eps)


class OffsetNorm(nn.RMSNorm):
    """RMSNorm whose weight is its distance from one, added in float32 at least (Gemma, arXiv 2403.08295)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)

        def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(
                x.to(dtype), self.normalized_shape, 1 + weight.to(dtype), self.eps
            ).type_as(x)

        if x.dtype == dtype or torch.compiler.is_compiling():
            return normed(x, self.weight)
        return _Recomputed.apply(normed, x, self.weight)

    def init_parameter(
        self, name: str, parameter: torch.Tensor, generator: torch.Generator
    ) -> None:
        parameter.zero_()


class _Recomputed(torch.autograd.Function):
    """A function that keeps its inputs alone for the backward, which computes it again: no copy of them in float32."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [
            x.detach().requires_grad_(n) for x, n in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], gradient))
        return None, *(next(found) if n else None for n in needed)


class NormOfHeads(nn.RMSNorm):
    """RMSNorm over all heads, of which tensor-parallel ranks may have a part each: the mean square is that of all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, heads * head size), a DTensor if it is sharded."""
        if not isinstance(x, DTensor):
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(
            x
        ) * self.weight

"""The norms of a decoder: RMSNorm, RMSNorm with an offset, LayerNorm, and a norm over all heads."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from longshard.sharding.tensors import wide, wide_type
from trainer.families.layers import NormArgs


def build_norm(norms: NormArgs, dim: int) -> nn.Module:
    """Return a norm of the kind that a model uses.

    Args:
        norms: Kind, epsilon and offset of the model's norms. A kind other than "rmsnorm" and "layernorm" makes a
            LayerNorm without weight.
        dim: Channels.
    """
    if norms.kind == "rmsnorm":
        return build_rms_norm(norms, dim)
    return nn.LayerNorm(
        dim, norms.eps, elementwise_affine=norms.kind == "layernorm", bias=False
    )


def build_rms_norm(norms: NormArgs, dim: int) -> nn.RMSNorm:
    """Return an RMSNorm. Queries and keys have one even if the other norms of the model are of another kind.

    Args:
        norms: Epsilon and offset of the model's norms.
        dim: Channels.
    """
    return (OffsetNorm if norms.offset else nn.RMSNorm)(dim, eps=norms.eps)


class OffsetNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, computed in float32 or wider (Gemma, arXiv 2403.08295).

    The constructor takes the arguments of `nn.RMSNorm`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x, with the shape and dtype of x.

        Args:
            x: (..., dim).
        """
        dtype = wide_type(x.dtype)

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(
                x.to(dtype), self.normalized_shape, 1 + weight.to(dtype), self.eps
            ).type_as(x)

        if x.dtype == dtype or torch.compiler.is_compiling():
            return normed(x, self.weight)
        return _Recomputed.apply(normed, x, self.weight)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Set the weight to zero.

        Args:
            name: Name of the parameter in this module.
            parameter: The whole parameter, (dim,), filled in place.
            generator: Not used.
        """
        parameter.zero_()


class _Recomputed(torch.autograd.Function):
    """A function that saves its inputs only. The backward computes the function again, so no float32 copy is kept."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [
            x.detach().requires_grad_(n) for x, n in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        gradients = iter(
            torch.autograd.grad(out, [x for x in inputs if x.requires_grad], gradient)
        )
        return None, *(next(gradients) if n else None for n in needed)


class NormOfHeads(nn.RMSNorm):
    """RMSNorm over all heads. If tensor-parallel ranks divide the heads, the mean square is still over all heads."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x, with the shape and dtype of x.

        Args:
            x: (B, S, heads * head size). If the heads are divided, a DTensor, whose mean takes a collective.
        """
        if not isinstance(x, DTensor):
            return super().forward(x)
        exact = wide(x)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (exact * scale).type_as(x) * self.weight

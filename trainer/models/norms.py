"""The norms of a decoder."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor


def build_norm(kind: str, dim: int, eps: float, *, offset: bool = False) -> nn.Module:
    """Return RMSNorm, LayerNorm with a weight only, or LayerNorm without parameters (np_layernorm, as in OLMo).

    offset: whether the weight of RMSNorm is its distance from one.
    """
    if kind == "rmsnorm":
        return OffsetNorm(dim, eps=eps) if offset else nn.RMSNorm(dim, eps=eps)
    return nn.LayerNorm(dim, eps=eps, elementwise_affine=kind == "layernorm", bias=False)


class OffsetNorm(nn.RMSNorm):
    """RMSNorm whose weight is its distance from one, added in float32 at least (Gemma, arXiv 2403.08295)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), self.normalized_shape, 1 + self.weight.to(dtype), self.eps).type_as(x)

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        parameter.zero_()


class NormOfHeads(nn.RMSNorm):
    """RMSNorm over all heads, of which tensor-parallel ranks may have a part each: the mean square is that of all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (B, S, heads * head size), a DTensor if it is sharded."""
        if not isinstance(x, DTensor):
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight

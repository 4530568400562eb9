"""Norms."""

from torch import nn


def build_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """Return RMSNorm, LayerNorm with a weight only, or LayerNorm without parameters (np_layernorm, as in OLMo)."""
    if kind == "rmsnorm":
        return nn.RMSNorm(dim, eps=eps)
    return nn.LayerNorm(dim, eps=eps, elementwise_affine=kind == "layernorm", bias=False)

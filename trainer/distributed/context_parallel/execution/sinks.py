"""Attention sinks: a learnt logit for each head, of one more key whose value is zero (arXiv 2309.17453, GPT-OSS).

They are applied once, to the merged results of all keys. out: (B, H, S, D), lse: (B, H, S), sinks: (H,).
"""

import torch


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp with the share of the sinks."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


def sink_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks, of these queries. out, lse: with the share of the sinks; dout: as out."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # A sink's value is zero, so that only the mean term of the softmax's derivative is left.
    return -(share * (dout.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)

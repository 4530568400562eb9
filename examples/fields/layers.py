"""What models of fields have in common: a feed-forward, and how their parameters are drawn."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)))


def draw_parameter(
    name: str, parameter: torch.Tensor, generator: torch.Generator, ends: tuple[str, ...] = (), branches: int = 1
) -> None:
    """Set norms to one and biases to zero; draw matrices and kernels that keep the scale of activations.

    The output starts small, and so does the predicted change. ends: names of the last matrices of residual branches,
    which are smaller with the number of branches.
    """
    if parameter.ndim == 1:
        parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        return
    scale = 1.0
    if ends and name.endswith(ends):
        scale = 1.0 / math.sqrt(branches)
    elif name == "output.weight":
        scale = 0.1
    parameter.normal_(0.0, scale / math.sqrt(parameter[0].numel()), generator=generator)

"""Shared parts of models of fields: a feed-forward network, and the initial values of parameters."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them, (..., dim) -> (..., dim).

    Args:
        dim: Width of inputs and outputs.
        hidden_dim: Width between the linear maps.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.w2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)))


def draw_parameter(
    name: str, parameter: torch.Tensor, generator: torch.Generator, ends: tuple[str, ...] = (), branches: int = 1
) -> None:
    """Set norms to one and biases to zero; draw matrices and kernels that keep the scale of activations.

    The output starts small, and so does the predicted change.

    Args:
        name: Name of the parameter.
        parameter: The parameter, set in place.
        generator: Source of the random numbers.
        ends: Ends of the names of the last matrices of residual branches, which become smaller with the number of
            branches.
        branches: Number of residual branches.
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

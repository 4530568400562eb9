"""Weights that are a module by themselves, so that parallelism can be applied to them by name."""

import torch
from torch import nn


class Weights(nn.Module):
    """A parameter that its forward returns: with tensor parallelism, the rows of this rank's heads or channels."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> torch.Tensor:
        return self.weight

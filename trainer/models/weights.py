"""A parameter as a module of its own, so that parallelism can be applied to it by name."""

import torch
from torch import nn


class Weights(nn.Module):
    """A module that returns its parameter.

    With tensor parallelism it returns the rows of this rank's heads or channels.

    Args:
        *shape: The shape of the parameter.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> torch.Tensor:
        """Return the parameter."""
        return self.weight

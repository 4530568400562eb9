"""The feed-forward network of a block."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from trainer.models.initialization import fill

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class FeedForward(nn.Module):
    """SwiGLU or GEGLU (arXiv 2002.05202).

    activation: of the gates, of `ACTIVATIONS`; branches: of the model, see `initialization.draw`.
    """

    def __init__(
        self, dim: int, hidden_dim: int, *, bias: bool = False, activation: str = "silu", branches: int = 1
    ) -> None:
        super().__init__()
        self.activation, self.branches = ACTIVATIONS[activation], branches
        self.w1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias=bias)

    def forward(self, x: torch.Tensor, **of_adapters: torch.Tensor) -> torch.Tensor:
        """x: (B, S, dim) -> the same shape. of_adapters: passed to the linear modules, see `transforms/lora.py`."""
        return self.w2(self.activation(self.w1(x, **of_adapters)) * self.w3(x, **of_adapters), **of_adapters)

    def init_parameter(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        fill(name, parameter, generator, branches=self.branches if name == "w2.weight" else 1)

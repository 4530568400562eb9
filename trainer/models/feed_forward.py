"""The feed-forward network of a block."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
)

from trainer.families.feed_forward_args import DenseArgs
from trainer.models.initialization import Branch
from trainer.parallel.tensor_parallel import Styles


class Activation(NamedTuple):
    """A function by element, and its gradient: (of the output, input, grad_input=where that of the input goes)."""

    function: Callable[[torch.Tensor], torch.Tensor]
    gradient: Callable[..., torch.Tensor]


ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: Activation, gate: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation.function(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        of_gate = gradient * up
        of_up = ctx.activation.function(gate).mul_(gradient)
        return None, ctx.activation.gradient(of_gate, gate, grad_input=of_gate), of_up


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) * up, of any one shape. The backward computes the activation again, and keeps no copy."""
    return _Gated.apply(ACTIVATIONS[activation], gate, up)


class FeedForward(Branch):
    """SwiGLU or GEGLU (arXiv 2002.05202). branches: of the model, see `initialization.draw`."""

    last = "w2.weight"

    def __init__(self, dim: int, args: DenseArgs, *, branches: int = 1) -> None:
        super().__init__()
        self.activation = args.activation
        self.branches = branches
        self.w1 = nn.Linear(dim, args.hidden_dim, bias=args.bias)
        self.w2 = nn.Linear(args.hidden_dim, dim, bias=args.bias)
        self.w3 = nn.Linear(dim, args.hidden_dim, bias=args.bias)

    def forward(self, x: torch.Tensor, **of_adapters: torch.Tensor) -> torch.Tensor:
        """x: (B, S, dim) -> the same shape. of_adapters: passed to the linear modules, see `transforms/lora.py`."""
        hidden = gated(self.activation, self.w1(x, **of_adapters), self.w3(x, **of_adapters))
        return self.w2(hidden, **of_adapters)

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide its channels, by the names of its modules."""
        whole = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        return {
            "": whole,
            "w1": ColwiseParallel(),
            "w2": RowwiseParallel(output_layouts=Shard(1)),
            "w3": ColwiseParallel(),
        }

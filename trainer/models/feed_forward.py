"""The feed-forward network of a block, SwiGLU or GEGLU."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
    """An elementwise function and its gradient.

    Attributes:
        function: From an input to the output.
        gradient: (gradient of the output, input, grad_input=the tensor that gets the gradient of the input).
    """

    function: Callable[[Tensor], Tensor]
    gradient: Callable[..., Tensor]


ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation.function(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        gate_gradient = gradient * up
        up_gradient = ctx.activation.function(gate).mul_(gradient)
        return (
            None,
            ctx.activation.gradient(gate_gradient, gate, grad_input=gate_gradient),
            up_gradient,
        )


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return activation(gate) * up, of any shape. The backward computes the activation again instead of keeping it.

    Args:
        activation: A name of `ACTIVATIONS`.
        gate: Any shape.
        up: The shape of `gate`.
    """
    return _Gated.apply(ACTIVATIONS[activation], gate, up)


class FeedForward(Branch):
    """A gated feed-forward network, SwiGLU or GEGLU (arXiv 2002.05202).

    Args:
        dim: Channels of the hidden states.
        args: Inner channels, activation and biases.
        branches: Residual branches of the model, see `initialization.draw`.
    """

    last = "w2.weight"

    def __init__(self, dim: int, args: DenseArgs, *, branches: int = 1) -> None:
        super().__init__()
        self.activation = args.activation
        self.branches = branches
        self.w1 = nn.Linear(dim, args.hidden_dim, bias=args.bias)
        self.w2 = nn.Linear(args.hidden_dim, dim, bias=args.bias)
        self.w3 = nn.Linear(dim, args.hidden_dim, bias=args.bias)

    def forward(self, x: Tensor, **adapter_inputs: Tensor) -> Tensor:
        """Return the output, (B, S, dim).

        Args:
            x: (B, S, dim).
            **adapter_inputs: Passed to the linear modules, see `transforms/lora.py`.
        """
        hidden = gated(
            self.activation, self.w1(x, **adapter_inputs), self.w3(x, **adapter_inputs)
        )
        return self.w2(hidden, **adapter_inputs)

    def tensor_parallel_styles(self) -> Styles:
        """Return how tensor-parallel ranks divide the channels, by names of modules."""
        return {
            "": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "w1": ColwiseParallel(),
            "w2": RowwiseParallel(output_layouts=Shard(1)),
            "w3": ColwiseParallel(),
        }

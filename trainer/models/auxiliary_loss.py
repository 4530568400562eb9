"""A loss that a module adds to the loss of the tokens, for example the balance loss of a mixture of experts."""

from typing import Any

import torch
from torch import Tensor, nn


class AuxiliaryLoss(nn.Module):
    """Returns an activation unchanged; its backward adds the gradient of a loss divided by the tokens of the step.

    The gradient enters through the activation. So every pipeline stage can have a loss, and a block that is recomputed
    or compiled counts its loss once. Gradients are sums over ranks. Therefore pass the sum over this rank's tokens; if
    tensor-parallel ranks compute the same tokens, pass this rank's share of the sum. The reported loss excludes it.
    """

    def __init__(self) -> None:
        super().__init__()
        # A buffer, because torch.compile reads its value in each step. Casting a model keeps the type of integers.
        self.register_buffer("tokens", torch.empty((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, loss: Tensor) -> Tensor:
        """Return x.

        Args:
            x: Any shape.
            loss: A scalar, a plain tensor.
        """
        return _AddGradient.apply(x, loss / self.tokens)


def normalise_auxiliary_losses(part: nn.Module, tokens: Tensor) -> None:
    """Set the number of tokens by which the auxiliary losses of a model part are divided.

    Args:
        part: The model part, changed in place.
        tokens: A scalar: tokens of the whole step, without padding, at least 1.
    """
    for module in part.modules():
        if isinstance(module, AuxiliaryLoss):
            module.tokens = tokens


class _AddGradient(torch.autograd.Function):
    """Return x; the backward gives the loss a gradient of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(*ctx.saved_tensors)

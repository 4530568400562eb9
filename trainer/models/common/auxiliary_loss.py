"""A loss that a part of a model adds to the loss of the tokens, such as the balance loss of a mixture of experts."""

from typing import Any

import torch
from torch import nn


class AuxiliaryLoss(nn.Module):
    """Returns an activation unchanged; its backward adds the gradient of a loss divided by the labels of the step.

    The gradient enters where the activation passes, so every stage of a pipeline can have a loss, and a loss of a
    recomputed or compiled block counts once. Gradients are sums over ranks: give the sum over the tokens of this rank,
    and where tensor-parallel ranks compute the same tokens, this rank's share of it. The reported loss lacks it.
    """

    def __init__(self) -> None:
        super().__init__()
        # A buffer, because torch.compile reads its value in each step. Integers keep their type when a model is cast.
        self.register_buffer("labels", torch.empty((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """x: any shape; loss: (), a plain tensor -> x."""
        return _AddGradient.apply(x, loss / self.labels)


def normalise_auxiliary_losses(part: nn.Module, labels: torch.Tensor) -> None:
    """Tell a part of a model the number of labels of the whole step, (), at least 1."""
    for module in part.modules():
        if isinstance(module, AuxiliaryLoss):
            module.labels = labels


class _AddGradient(torch.autograd.Function):
    """(x, loss) -> x, with a gradient of one for the loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones_like(*ctx.saved_tensors)

"""Targets and losses of multi-token prediction (DeepSeek-V3, arXiv 2412.19437): its layers predict further tokens.

tokens       t0 t1 t2 t3 | u0 u1 u2        two documents
labels       t1 t2 t3  - | u1 u2  -
next tokens  t1 t2 t3  . | u1 u2  .        of the first such layer; .: counts for nothing
its labels   t2 t3  -  - | u2  -  -

The targets are computed from whole sequences, before the sequences are cut over ranks. So a target may lie on
another rank or in another chunk, but never in another document.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshard.sharding.exchange import all_reduce
from longshard.sharding.tensors import with_adjoint
from trainer.data.packing import IGNORE_INDEX
from trainer.observer import Positions
from trainer.parallel.parallel_dims import ParallelDims
from trainer.tasks.observers import Totals


class FurtherTokens(Totals):
    """Targets and losses of K further tokens.

    Args:
        layers: K, the number of layers that predict further tokens.
        weight: Factor of the mean loss of the K layers in the gradients.
        dims: The meshes of the run.
    """

    def __init__(self, layers: int, weight: float, dims: ParallelDims) -> None:
        super().__init__(layers, dims)
        self.layers = layers
        self.factors = (1.0, *[weight / layers] * layers)
        """Gradient factors: 1 for the next token, weight / layers for each further token."""

    def count(self, losses: Tensor, labels: Tensor) -> None:
        """Add the losses of further tokens, and the number of their labels, to the totals of the step.

        Args:
            losses: (1 + K, B, S); the next token's losses first.
            labels: (1 + K, B, S), `IGNORE_INDEX` where there is no label.
        """
        number = (labels[1:] != IGNORE_INDEX).flatten(1).sum(1).double()
        self._step_totals += torch.stack(
            [losses[1:].detach().flatten(1).sum(1).double(), number]
        )

    def record(self, positions: Positions) -> dict[str, float]:
        """Return the mean loss of each layer since the last call, such as `mtp_loss_1`. A collective over all ranks.

        A layer without labels is left out.

        Args:
            positions: Positions of the data streams; not used.
        """
        totals = self._totals.clone()
        for name in ("pp", "cp", "dp"):
            totals = all_reduce(totals, self._dims[name])
        self._totals.zero_()
        layers = enumerate(totals.T.tolist(), 1)
        return {
            f"mtp_loss_{number}": loss / labels for number, (loss, labels) in layers if labels
        }


def further_targets(
    tokens: Tensor, labels: Tensor, documents: Tensor, layers: int
) -> dict[str, Tensor]:
    """Compute the inputs and labels of the layers that predict further tokens, from whole sequences.

    Args:
        tokens: (B, S).
        labels: (B, S), `IGNORE_INDEX` where there is no label.
        documents: (B, S), the number of each token's document. No target crosses the end of a document.
        layers: Number of layers that predict further tokens.

    Returns:
        `next_tokens` and `next_labels`, (B, S, layers) each: 0 and `IGNORE_INDEX` beyond the end of the document.
    """
    next_tokens = []
    next_labels = []
    for distance in range(1, layers + 1):
        outside = _shifted(documents, distance, -1) != documents
        following = _shifted(labels, distance, IGNORE_INDEX)
        next_tokens.append(_shifted(tokens, distance, 0).masked_fill(outside, 0))
        next_labels.append(following.masked_fill(outside, IGNORE_INDEX))
    return {
        "next_tokens": torch.stack(next_tokens, -1),
        "next_labels": torch.stack(next_labels, -1),
    }


def _shifted(x: Tensor, distance: int, fill: int) -> Tensor:
    """Shift x, (B, S), left by `distance` positions; fill the end with `fill`."""
    return F.pad(x[:, distance:], (0, min(distance, x.shape[1])), value=fill)


def first_losses(x: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Return the next token's losses, (B, S). The backward sends the gradient to all 1 + K losses, times their factors.

    If all factors are 1, a gradient that is an expanded scalar stays expanded: so the loss in chunks recognises that
    its losses are summed.

    Args:
        x: (1 + K, B, S); the next token's losses first.
        factors: The 1 + K factors of the gradients.
    """

    def adjoint(gradient: Tensor) -> Tensor:
        gradients = gradient.expand(len(factors), *gradient.shape)
        if set(factors) == {1.0}:
            return gradients
        return gradients * gradient.new_tensor(factors)[:, None, None]

    return with_adjoint(x, lambda losses: losses[0].clone(), adjoint)

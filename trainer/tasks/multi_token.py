"""Multi-token prediction: the targets of layers that predict further tokens, and their loss beside the model's.

tokens       t0 t1 t2 t3 | u0 u1 u2        two documents
labels       t1 t2 t3  - | u1 u2  -
next tokens  t1 t2 t3  . | u1 u2  .        of the first such layer; .: counts for nothing
its labels   t2 t3  -  - | u2  -  -

They are made of whole sequences, before these are cut over ranks, so that targets cross the borders of ranks and
chunks, and never those of documents (DeepSeek-V3, arXiv 2412.19437).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from trainer.data.batch import TextBatch
from trainer.data.packing.sequence import IGNORE_INDEX
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.exchange import all_reduce
from trainer.observer import Observer


class FurtherTokens(Observer):
    """Targets and losses of `layers` further tokens, whose mean counts `weight` times in the gradients."""

    def __init__(self, layers: int, weight: float, dims: ParallelDims) -> None:
        self._layers, self._weight, self._dims = layers, weight / layers, dims
        self._totals = torch.zeros(2, layers, dtype=torch.float64, device=dims["world"].device_type)  # losses, labels
        self._of_step = torch.zeros_like(self._totals)

    def add_targets(self, batch: TextBatch) -> None:
        """Add `next_tokens` and `next_labels`, (B, S, layers), to a batch of whole sequences."""
        tokens, labels, documents = batch["tokens"], batch["labels"], batch["document_ids"].to(batch["tokens"].device)
        next_tokens, next_labels = [], []
        for distance in range(1, self._layers + 1):
            shifted = _shifted(documents, distance, -1) == documents
            next_tokens.append(_shifted(tokens, distance, 0))
            next_labels.append(_shifted(labels, distance, IGNORE_INDEX).masked_fill(~shifted, IGNORE_INDEX))
        batch["next_tokens"], batch["next_labels"] = torch.stack(next_tokens, -1), torch.stack(next_labels, -1)

    def add(
        self, losses: torch.Tensor, further: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the losses of tokens, (B, S), with the gradients of those of further tokens as well.

        further, labels: of each layer its losses and what they are of, (B, S).
        """
        sums = torch.stack([of_layer.detach().sum() for of_layer in further]).double()
        self._of_step += torch.stack([sums, torch.stack([(y != IGNORE_INDEX).sum() for y in labels]).double()])
        return _WithGradients.apply(losses, self._weight, *further)

    def end_step(self, left_out: torch.Tensor) -> None:
        self._totals += torch.where(left_out.bool(), 0, self._of_step)
        self._of_step.zero_()

    def record(self, positions: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
        """Return the mean loss of each layer since the last call, as `mtp_loss_1`. A collective over all ranks."""
        dims, totals = self._dims, self._totals.clone()
        for name in ("pp", "cp", "dp"):
            totals = all_reduce(totals, dims[name])
        self._totals.zero_()
        found = enumerate(totals.T.tolist(), 1)
        return {f"mtp_loss_{number}": loss / labels for number, (loss, labels) in found if labels}


def _shifted(x: torch.Tensor, distance: int, fill: int) -> torch.Tensor:
    """Return of each position of (B, S) what is so many positions behind it, or `fill`."""
    return F.pad(x[:, distance:], (0, min(distance, x.shape[1])), value=fill)


class _WithGradients(torch.autograd.Function):
    """(x, weight, others) -> x, whose gradient times the weight is also that of each of the others.

    A gradient that is one number in memory stays one, by which the loss in chunks knows that losses are summed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float, *others: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.number = weight, len(others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        one = not any(gradient.stride())
        scaled = (gradient[:1, :1] * ctx.weight).expand_as(gradient) if one else gradient * ctx.weight
        return gradient, None, *[scaled] * ctx.number

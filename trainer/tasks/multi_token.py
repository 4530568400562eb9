"""Multi-token prediction: the targets of layers that predict further tokens, and their loss beside the model's.

tokens       t0 t1 t2 t3 | u0 u1 u2        two documents
labels       t1 t2 t3  - | u1 u2  -
next tokens  t1 t2 t3  . | u1 u2  .        of the first such layer; .: counts for nothing
its labels   t2 t3  -  - | u2  -  -

They are made of whole sequences, before these are cut over ranks, so that targets cross the borders of ranks and
chunks, and never those of documents (DeepSeek-V3, arXiv 2412.19437).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from trainer.data.loader import TextBatch
from trainer.data.packing.sequence import IGNORE_INDEX
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.exchange import all_reduce
from trainer.observer import Observer


class FurtherTokens(Observer):
    """Targets and losses of `layers` further tokens, whose mean counts `weight` times in the gradients."""

    def __init__(self, layers: int, weight: float, dims: ParallelDims) -> None:
        self._layers, self._dims = layers, dims
        self.factors = (1.0, *[weight / layers] * layers)
        """Of the gradients of the losses of tokens, and of those of each layer."""
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

    def count(self, losses: torch.Tensor, labels: torch.Tensor) -> None:
        """Add up the losses of further tokens, and what they are of: (1 + K, B, S), those of the model first."""
        number = (labels[1:] != IGNORE_INDEX).flatten(1).sum(1).double()
        self._of_step += torch.stack([losses[1:].detach().flatten(1).sum(1).double(), number])

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


class FirstLosses(torch.autograd.Function):
    """((1 + K, B, S), factors) -> the first ones (B, S), whose gradient times its factor each of the others has, too.

    A gradient that is one number in memory stays one, by which the loss in chunks knows that losses are summed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
        ctx.factors = factors
        return x[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        all_of_them = gradient.expand(len(ctx.factors), *gradient.shape)
        if set(ctx.factors) != {1.0}:
            all_of_them = all_of_them * gradient.new_tensor(ctx.factors)[:, None, None]
        return all_of_them, None

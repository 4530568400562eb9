"""Cross entropy of each token, without a mean: the loop divides by the labels of the whole step."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from trainer.data.packing import IGNORE_INDEX


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each token in at least float32, zero where there is no label.

    logits: (B, S, V), plain or cut over V under `loss_parallel`; labels: (B, S), already shifted -> (B, S).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    if isinstance(losses, DTensor):
        losses = losses.to_local()
    return losses.unflatten(0, labels.shape)


def count_valid(labels: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the number of tokens that have a label, in all or along `dim`, as int64."""
    return (labels != IGNORE_INDEX).sum(dim)

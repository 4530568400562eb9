"""Cross entropy of each token, without a mean: the loop divides by the labels of the whole step."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from trainer.data.packing.sequence import IGNORE_INDEX


def row_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each row in at least float32, zero where there is no label.

    logits: (rows, V), plain or cut over V under `loss_parallel`; labels: (rows,) -> (rows,).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return losses.to_local() if isinstance(losses, DTensor) else losses


def token_losses(logits: torch.Tensor, labels: torch.Tensor, rows: Callable = row_losses) -> torch.Tensor:
    """Return `row_losses` of tokens. logits: (B, S, V); labels: (B, S), already shifted -> (B, S).

    rows: `row_losses` or its compiled form. The compiler cannot follow the backward of a view of a DTensor whose length
    varies: it raises RecursionError. So the views are outside of its graph.
    """
    return rows(logits.flatten(0, 1), labels.flatten()).unflatten(0, labels.shape)


def count_valid(labels: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the number of tokens that have a label, in all or along `dim`, as int64."""
    return (labels != IGNORE_INDEX).sum(dim)

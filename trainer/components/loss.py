"""Logits of some tokens, whole on every rank; cross entropy of each token, without a mean (the loop divides)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from longshard.sharding.exchange import all_gather
from longshard.sharding.tensors import local_part, wide
from trainer.data.packing import IGNORE_INDEX
from trainer.models.model_spec import Decoder


def row_losses(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return the cross entropy of each row, (rows,), in float32 or wider, zero where there is no label.

    Args:
        logits: (rows, V), plain or cut over V under `loss_parallel`.
        labels: (rows,).
        z_loss: For plain logits, see `chunked_loss.Chunks`; it changes gradients alone.
    """
    logits = wide(logits)
    losses = local_part(
        F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    )
    if z_loss:
        squares = (z_loss * logits.logsumexp(-1).square()).masked_fill(
            labels == IGNORE_INDEX, 0
        )
        losses = losses + (squares - squares.detach())
    return losses


def token_losses(logits: Tensor, labels: Tensor, rows: Callable = row_losses) -> Tensor:
    """Return the loss of each token, (B, S).

    Args:
        logits: (B, S, V).
        labels: (B, S), already shifted.
        rows: `row_losses` or its compiled form. The compiled graph gets flat rows: one dynamic dimension.
    """
    return rows(logits.flatten(0, 1), labels.flatten()).unflatten(0, labels.shape)


def count_valid(labels: Tensor, dim: int | None = None) -> Tensor:
    """Return the number of tokens that have a label, int64: a scalar, or with `dim` one dimension fewer.

    Args:
        labels: Any shape.
        dim: Count along this dimension. None: count all.
    """
    return (labels != IGNORE_INDEX).sum(dim)


def whole_sequence(hidden: Tensor, tp: DeviceMesh) -> Tensor:
    """Return the hidden states of all ranks, (B, S, dim). A collective over `tp`.

    Args:
        hidden: This rank's tokens, (B, S / tp, dim).
        tp: The tensor-parallel mesh.
    """
    return hidden if tp.size() == 1 else torch.cat([*all_gather(hidden, tp)], dim=1)


def whole_logits(part: Decoder, hidden: Tensor, tp: DeviceMesh) -> Tensor:
    """Return the logits of whole hidden states, (B, S, V), the same on all ranks of `tp`. A collective.

    Each rank gives the output module its part of the S tokens, and has a part of the vocabulary.

    Args:
        part: The model part that has the output.
        hidden: (B, S, dim), the same on all ranks of `tp`.
        tp: The tensor-parallel mesh.
    """
    rows = hidden.shape[1]
    own = F.pad(hidden, (0, 0, 0, -rows % tp.size())).chunk(tp.size(), dim=1)[
        tp.get_local_rank()
    ]
    logits = part.output(own.contiguous())
    return (logits.full_tensor() if isinstance(logits, DTensor) else logits)[:, :rows]

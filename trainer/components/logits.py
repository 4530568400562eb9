"""Logits of some tokens, whole on every rank, of a model that tensor-parallel ranks may divide."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.distributed.sharding.exchange import all_gather
from trainer.models.model_spec import Decoder


def whole_sequence(hidden: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """Return the hidden states of all ranks: (B, S / tp, dim) -> (B, S, dim). A collective over `tp`."""
    return hidden if tp.size() == 1 else torch.cat([*all_gather(hidden, tp)], dim=1)


def whole_logits(part: Decoder, hidden: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """Return the logits of whole hidden states: (B, S, dim) -> (B, S, V), the same on all ranks of `tp`. A collective.

    The model's output takes a part of the rows from each rank, and has a part of the vocabulary on each.
    """
    rows = hidden.shape[1]
    own = F.pad(hidden, (0, 0, 0, -rows % tp.size())).chunk(tp.size(), dim=1)[tp.get_local_rank()]
    logits = part.output(own.contiguous())
    return (logits.full_tensor() if isinstance(logits, DTensor) else logits)[:, :rows]

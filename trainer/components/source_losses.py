"""Loss, tokens and passes of each source of a mixture."""

from collections.abc import Mapping, Sequence
from math import gcd

import torch

from trainer.data.batch import TextBatch
from trainer.data.mixture import positions_of
from trainer.data.packing.sequence import IGNORE_INDEX
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.exchange import all_reduce
from trainer.observer import Observer


class SourceLosses(Observer):
    """Adds up losses and labels of each source, on the device, from one logged step to the next."""

    def __init__(self, names: Sequence[str], seq_len: int, dims: ParallelDims) -> None:
        self._names, self._seq_len, self._dims = names, seq_len, dims
        device = dims["world"].device_type
        self._totals = torch.zeros(2, len(names), dtype=torch.float64, device=device)  # losses, labels
        self._of_step = torch.zeros_like(self._totals)

    def losses(self, batch: TextBatch, losses: torch.Tensor) -> None:
        """Add a micro-batch, whose `sources` are numbers of sequences (B,), or of this rank's tokens (B, S)."""
        sources, labels = batch["sources"], batch["labels"] != IGNORE_INDEX
        sums = torch.stack([losses.double(), labels.double()])
        sums = sums.sum(-1) if sources.ndim == 1 else sums.flatten(1)
        self._of_step.index_add_(1, sources.flatten(), sums)

    def end_step(self, left_out: torch.Tensor) -> None:
        self._totals += torch.where(left_out.bool(), 0, self._of_step)
        self._of_step.zero_()

    def record(self, positions: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
        """Return the metrics since the last call. A collective over all ranks.

        "loss/name": mean over labels, absent if there were none; "tokens/name", "epoch/name": of the whole job so far.
        """
        dims, n = self._dims, next(iter(positions.values()))["data_streams"]
        totals = all_reduce(all_reduce(self._totals.clone(), dims["pp"]), dims["cp"])
        read = torch.tensor(positions_of(positions, self._names), dtype=torch.float64, device=totals.device)
        found = all_reduce(torch.cat([totals.T, read], 1), dims["dp"]).tolist()
        self._totals.zero_()
        ranks = dims.size("dp") // gcd(n, dims.size("dp"))  # that read each stream
        record = {}
        for name, (loss, number, samples, passes) in zip(self._names, found, strict=True):
            if number:
                record[f"loss/{name}"] = loss / number
            record |= {f"tokens/{name}": round(samples / ranks) * self._seq_len, f"epoch/{name}": passes / ranks / n}
        return record

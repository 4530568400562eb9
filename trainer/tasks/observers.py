"""What training on text counts and reports: padding, and the losses of the sources of a mixture."""

from collections.abc import Sequence
from math import gcd

import torch

from longshard.sharding.exchange import all_reduce
from trainer.data.loader import TextBatch
from trainer.data.mixture import positions_of
from trainer.data.packing import IGNORE_INDEX
from trainer.job.record import ResolvedJob
from trainer.observer import Observer, Positions
from trainer.parallel.parallel_dims import ParallelDims


class Totals(Observer):
    """Adds up losses and labels, in some columns, on the device, from one logged step to the next."""

    def __init__(self, columns: int, dims: ParallelDims) -> None:
        self._dims = dims
        self._totals = dims.zeros(2, columns)
        self._of_step = torch.zeros_like(self._totals)

    def end_step(self, left_out: torch.Tensor) -> None:
        self._totals += torch.where(left_out.bool(), 0, self._of_step)
        self._of_step.zero_()


class Padding(Observer):
    """Counts the tokens that are of no document."""

    def __init__(self, job: ResolvedJob, dims: ParallelDims) -> None:
        self._dims = dims
        self._tokens = job.sequences_per_step * job.positions
        self._padding = self._of_step = 0

    def batch(self, batch: TextBatch) -> None:
        self._of_step += batch.get("padding", 0)

    def end_step(self, left_out: torch.Tensor) -> None:
        self._padding = self._of_step
        self._of_step = 0

    def record(self, positions: Positions) -> dict[str, float]:
        """Return the share of the step's tokens. A collective over data-parallel ranks."""
        padding = self._dims.zeros() + self._padding
        return {"padding_fraction": all_reduce(padding, self._dims["dp"]).item() / self._tokens}


class SourceLosses(Totals):
    """The losses and labels of each source."""

    def __init__(self, names: Sequence[str], seq_len: int, dims: ParallelDims) -> None:
        super().__init__(len(names), dims)
        self._names, self._seq_len = names, seq_len

    def losses(self, batch: TextBatch, losses: torch.Tensor) -> None:
        """Add a micro-batch, whose `sources` are numbers of sequences (B,), or of this rank's tokens (B, S)."""
        sources = batch["sources"]
        labels = batch["labels"] != IGNORE_INDEX
        sums = torch.stack([losses.double(), labels.double()])
        sums = sums.sum(-1) if sources.ndim == 1 else sums.flatten(1)
        self._of_step.index_add_(1, sources.flatten(), sums)

    def record(self, positions: Positions) -> dict[str, float]:
        """Return the metrics since the last call. A collective over all ranks.

        "loss/name": mean over labels, absent if there were none; "tokens/name", "epoch/name": of the whole job so far.
        """
        dims = self._dims
        n = next(iter(positions.values()))["data_streams"]
        totals = all_reduce(all_reduce(self._totals.clone(), dims["pp"]), dims["cp"])
        read = torch.tensor(
            positions_of(positions, self._names), dtype=torch.float64, device=totals.device
        )
        found = all_reduce(torch.cat([totals.T, read], 1), dims["dp"]).tolist()
        self._totals.zero_()
        ranks = dims.size("dp") // gcd(n, dims.size("dp"))  # that read each stream
        record = {}
        for name, (loss, number, samples, passes) in zip(self._names, found, strict=True):
            if number:
                record[f"loss/{name}"] = loss / number
            record |= {
                f"tokens/{name}": round(samples / ranks) * self._seq_len,
                f"epoch/{name}": passes / ranks / n,
            }
        return record

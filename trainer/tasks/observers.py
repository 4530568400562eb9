"""Observers of training on text: the share of padding, and the loss of each source of a mixture."""

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from longshard.sharding.exchange import all_reduce
from trainer.data.loader import TextBatch
from trainer.data.mixture import positions_of
from trainer.data.packing import IGNORE_INDEX
from trainer.job.record import ResolvedJob
from trainer.observer import Observer, Positions
from trainer.parallel.parallel_dims import ParallelDims


class Totals(Observer):
    """Adds up losses and labels on the device, in columns, from one logged step to the next.

    Args:
        columns: Number of columns, for example the sources of a mixture.
        dims: The meshes of the run.
    """

    def __init__(self, columns: int, dims: ParallelDims) -> None:
        self._dims = dims
        self._totals = dims.zeros(2, columns)
        self._step_totals = torch.zeros_like(self._totals)

    def end_step(self, left_out: Tensor) -> None:
        """Add the step's totals to the totals of the logged interval, unless the step is skipped.

        Args:
            left_out: A scalar, float32; nonzero if the step is skipped.
        """
        self._totals += torch.where(left_out.bool(), 0, self._step_totals)
        self._step_totals.zero_()


class Padding(Observer):
    """Counts the padding tokens.

    Args:
        job: Has the number of tokens of a step.
        dims: The meshes of the run.
    """

    def __init__(self, job: ResolvedJob, dims: ParallelDims) -> None:
        self._dims = dims
        self._tokens = job.sequences_per_step * job.positions
        self._padding = 0
        self._step_totals = 0

    def batch(self, batch: TextBatch) -> None:
        """Add the padding of a micro-batch.

        Args:
            batch: May have the number of its padding tokens, `padding`.
        """
        self._step_totals += batch.get("padding", 0)

    def end_step(self, left_out: Tensor) -> None:
        """Keep the step's count for `record`.

        Args:
            left_out: A scalar; not used.
        """
        self._padding = self._step_totals
        self._step_totals = 0

    def record(self, positions: Positions) -> dict[str, float]:
        """Return `padding_fraction`: padding tokens of the last step, divided by `sequences_per_step * positions`.

        A collective over data-parallel ranks.

        Args:
            positions: Positions of the data streams; not used.
        """
        padding = self._dims.zeros() + self._padding
        return {"padding_fraction": all_reduce(padding, self._dims["dp"]).item() / self._tokens}


class SourceLosses(Totals):
    """Adds up the losses and labels of each source of a mixture.

    Args:
        names: The names of the sources.
        seq_len: Global sequence length, in tokens.
        dims: The meshes of the run.
    """

    def __init__(self, names: Sequence[str], seq_len: int, dims: ParallelDims) -> None:
        super().__init__(len(names), dims)
        self._names = names
        self._seq_len = seq_len

    def losses(self, batch: TextBatch, losses: Tensor) -> None:
        """Add the losses and labels of a micro-batch to the totals of the step.

        Args:
            batch: Its `sources` are the index of the source of each sequence, (B,), or of each token of this rank,
                (B, S).
            losses: (B, S) of this rank.
        """
        sources = batch["sources"]
        labels = batch["labels"] != IGNORE_INDEX
        sums = torch.stack([losses.double(), labels.double()])
        sums = sums.sum(-1) if sources.ndim == 1 else sums.flatten(1)
        self._step_totals.index_add_(1, sources.flatten(), sums)

    def record(self, positions: Positions) -> dict[str, float]:
        """Return the losses since the last call, and the tokens and epochs so far. A collective over all ranks.

        Args:
            positions: Positions of the data streams of this rank.

        Returns:
            "loss/name": mean over labels since the last call, absent without labels; "tokens/name" and "epoch/name":
            of the whole job so far.
        """
        dims = self._dims
        n = next(iter(positions.values()))["data_streams"]
        totals = all_reduce(all_reduce(self._totals.clone(), dims["pp"]), dims["cp"])
        read = torch.tensor(
            positions_of(positions, self._names), dtype=torch.float64, device=totals.device
        )
        source_totals = all_reduce(torch.cat([totals.T, read], 1), dims["dp"]).tolist()
        self._totals.zero_()
        ranks = dims.size("dp") // gcd(n, dims.size("dp"))  # the ranks that read each stream
        record = {}
        for name, (loss, number, samples, passes) in zip(
            self._names, source_totals, strict=True
        ):
            if number:
                record[f"loss/{name}"] = loss / number
            record |= {
                f"tokens/{name}": round(samples / ranks) * self._seq_len,
                f"epoch/{name}": passes / ranks / n,
            }
        return record

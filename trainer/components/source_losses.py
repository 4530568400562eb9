"""Loss, tokens and passes of each source of a mixture."""

from collections.abc import Mapping, Sequence

import torch

from trainer.data.mixture import positions_of
from trainer.data.order.streams import shared_by
from trainer.data.packing.sequence import IGNORE_INDEX
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.exchange import all_reduce


class SourceLosses:
    """Adds up losses and labels of each source, on the device, from one logged step to the next."""

    def __init__(self, names: Sequence[str], seq_len: int, dims: ParallelDims, device: torch.device) -> None:
        self._names, self._seq_len, self._dims = names, seq_len, dims
        self._totals = torch.zeros(2, len(names), dtype=torch.float64, device=device)  # losses, labels
        self._of_step = torch.zeros_like(self._totals)

    def add(self, sources: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add the samples (B,) of a step: number of the source, this rank's sum of losses, labels of all ranks."""
        self._of_step.index_add_(1, sources, torch.stack([sums, counts.double()]))

    def add_losses(self, sources: torch.Tensor, losses: torch.Tensor) -> None:
        """Add the losses of this rank's tokens (B, S) of sequences that have several sources."""
        self._of_step[0].index_add_(0, sources.flatten(), losses.detach().double().flatten())

    def add_labels(self, sources: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the labels (B, S) of whole sequences that have several sources."""
        self._of_step[1].index_add_(0, sources.flatten(), (labels != IGNORE_INDEX).double().flatten())

    def end_step(self, *, left_out: torch.Tensor) -> None:
        """Take over what was added in this step, unless it is left out: `left_out`, () on the device, is one."""
        self._totals += torch.where(left_out.bool(), 0, self._of_step)
        self._of_step.zero_()

    def record(self, states: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
        """Return the metrics since the last call. A collective over all ranks.

        "loss/name": mean over labels, absent if there were none; "tokens/name", "epoch/name": of the whole job so far.
        states: the position of the data on this rank.
        """
        dims = self._dims
        losses, labels = self._totals.clone()
        losses = all_reduce(all_reduce(losses, dims["pp"]), dims["cp"])
        positions = torch.tensor(positions_of(states, self._names), dtype=torch.float64, device=losses.device)
        found = all_reduce(torch.cat([torch.stack([losses, labels], 1), positions], 1), dims["dp"]).tolist()
        self._totals.zero_()
        n = next(iter(states.values()))["data_streams"]
        ranks = shared_by(n, dims.size("dp"))
        record = {}
        for name, (loss, number, samples, passes) in zip(self._names, found, strict=True):
            if number:
                record[f"loss/{name}"] = loss / number
            record |= {f"tokens/{name}": round(samples / ranks) * self._seq_len, f"epoch/{name}": passes / ranks / n}
        return record

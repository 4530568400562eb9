"""An observer that adds the largest weight to each line of metrics.jsonl."""

from collections.abc import Sequence

import torch
from torch import nn

from longshard.sharding.exchange import all_reduce
from trainer.job.record import ResolvedJob
from trainer.observer import Observer, Positions
from trainer.parallel.parallel_dims import ParallelDims


class LargestWeight(Observer):
    """The largest absolute value of a weight over all ranks.

    Args:
        job: The resolved job.
        dims: The meshes.
        model_parts: The modules of this rank.
    """

    def __init__(self, job: ResolvedJob, dims: ParallelDims, model_parts: Sequence[nn.Module]) -> None:
        self.dims = dims
        self.parameters = [p for part in model_parts for p in part.parameters()]

    def record(self, positions: Positions) -> dict[str, float]:
        local = [getattr(p, "to_local", lambda p=p: p)() for p in self.parameters]
        largest = torch.stack([x.detach().abs().max() for x in local if x.numel()]).max()
        return {"largest_weight": all_reduce(largest, self.dims["world"], "max").item()}

"""The interface of a task to the loop."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from longshard.sharding.exchange import all_gather, has_peers
from trainer.components.step_outcome import TrainingError
from trainer.data.loader import Loader
from trainer.models.model_spec import Model
from trainer.observer import Observer
from trainer.parallel.parallel_dims import ParallelDims

Batch = Mapping[str, Any]
"""The keys are the task's own; those of text are in `trainer/data/loader.py`."""


class RankInputs(NamedTuple):
    """What this rank computes of a batch.

    inputs: of the model, such as tokens (B, S / cp); arguments: its other ones, by name; targets: what the losses need,
    such as labels (B, S / cp); chunks: the same cut into chunks, which the model runs through one after another; batch:
    entries of the batch as this rank has them, which observers get with the losses.
    """

    inputs: Any
    arguments: Mapping[str, torch.Tensor | None]
    targets: Any
    chunks: tuple["RankInputs", ...] = ()
    batch: Mapping[str, Any] = MappingProxyType({})

    @property
    def parts(self) -> tuple["RankInputs", ...]:
        """Its chunks, or itself if there are none."""
        return self.chunks or (self,)


class Task(Protocol):
    """What a batch is, how ranks share it, and the loss of a position.

    If `TaskSpec.uses_model`, the loop calls `use_model(trainer)` before the first step, when the model has its weights.
    """

    def build_loader(self) -> Loader:
        """Return the loader of this rank's share of the data."""

    def observers(self) -> Sequence[Observer]:
        """Return what the task counts and reports in each step."""

    def batch_hash(self, batch: Batch) -> int:
        """Return a hash that the ranks which share a batch have in common."""

    def counts(self, batch: Batch) -> torch.Tensor:
        """Return the number of positions with a target in each whole sample: (B,) int64."""

    def size(self, batch: Batch) -> int:
        """Return the number of positions of the batch, without padding."""

    def batch_context(
        self, batch: Batch, model_parts: Sequence[Model]
    ) -> AbstractContextManager[RankInputs]:
        """Enter the context of forward AND backward, in which this rank has its share of the batch.

        With `optimizer.qk_clip`, which the task of tokens has, it also gets `on_scores`, see `longshard.context.live`.
        """

    def losses(self, part: Model, hidden: Any, targets: Any) -> torch.Tensor:
        """Return the loss of each position of this rank: (B, positions), in at least float32.

        part: the model part that has the output; hidden: what its forward returned.
        """


def check_same_batch(task: Task, batch: Batch, dims: ParallelDims) -> None:
    """Check that the ranks of one data-parallel rank read the same batch. A collective over these ranks.

    Raises:
        TrainingError: the batches differ.
    """
    ranks = dims["pp_cp_tp"]
    if not has_peers(ranks):
        return
    own_hash = torch.tensor(
        [task.batch_hash(batch)], dtype=torch.int64, device=ranks.device_type
    )
    hashes = all_gather(own_hash, ranks).flatten().tolist()
    if len(set(hashes)) > 1:
        raise TrainingError(
            f"the ranks {ranks.mesh.tolist()} of one data-parallel rank read different batches (hashes {hashes}); the "
            "data set must be the same on all machines"
        )

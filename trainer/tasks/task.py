"""The interface between the training loop and a task: what a batch is, how ranks share it, and its loss.

The loop calls a `Task`; `trainer/tasks/language.py` and `trainer/tasks/preferences.py` implement it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from longshard.sharding.exchange import has_peers
from trainer.components.step_outcome import TrainingError
from trainer.data.order.stream_loader import StreamLoader
from trainer.models.model_spec import Model
from trainer.observer import Observer
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import gather_values

Batch = Mapping[str, Any]
"""Each task chooses its keys; `trainer/data/loader.py` has the keys of a text batch."""


class RankInputs(NamedTuple):
    """This rank's part of a batch.

    Attributes:
        inputs: Input of the model, for example tokens, (B, S / cp).
        arguments: The other arguments of the model, by name.
        targets: Input of the losses, for example labels, (B, S / cp).
        chunks: The same part cut into chunks, which the model runs one after another. Empty without chunks.
        batch: The entries of the batch as this rank has them; observers get them with the losses.
    """

    inputs: Any
    arguments: Mapping[str, Tensor | None]
    targets: Any
    chunks: tuple["RankInputs", ...] = ()
    batch: Mapping[str, Any] = MappingProxyType({})

    @property
    def parts(self) -> tuple["RankInputs", ...]:
        """The chunks, or the record itself if there are none."""
        return self.chunks or (self,)


class Task(Protocol):
    """What a batch is, how ranks share it, and the loss of each position.

    If `TaskSpec.uses_model` is set, the loop calls `use_model(trainer)` before the first step, after the weights are
    loaded.
    """

    def build_loader(self) -> StreamLoader:
        """Return the loader of this rank's share of the data."""

    def observers(self) -> Sequence[Observer]:
        """Return the observers of the task, which count and report values of each step."""

    def batch_hash(self, batch: Batch) -> int:
        """Return a hash of the batch. Ranks that share a batch must get the same hash.

        Args:
            batch: A batch of this task.
        """

    def counts(self, batch: Batch) -> Tensor:
        """Return the number of positions with a target in each whole sample, (B,), int64.

        Args:
            batch: A batch of this task.
        """

    def size(self, batch: Batch) -> int:
        """Return the number of positions of the batch, without padding.

        Args:
            batch: A batch of this task.
        """

    def batch_context(
        self, batch: Batch, model_parts: Sequence[Model]
    ) -> AbstractContextManager[RankInputs]:
        """Enter the context of forward AND backward; inside, this rank has its part of the batch.

        With `optimizer.qk_clip`, the language task also takes `on_scores`, see `longshard.context.live`.

        Args:
            batch: A batch of this task.
            model_parts: The model parts of this rank.

        Returns:
            A context manager that yields this rank's part of the batch.
        """

    def losses(self, part: Model, hidden: Any, targets: Any) -> Tensor:
        """Return the loss of each position of this rank, (B, positions), in float32 or wider.

        Args:
            part: The model part that has the output.
            hidden: What the forward of `part` returned.
            targets: The targets of `RankInputs`.
        """


def check_same_batch(task: Task, batch: Batch, dims: ParallelDims) -> None:
    """Check that the ranks of one data-parallel rank read the same batch. A collective over these ranks.

    Args:
        task: Computes the hash of the batch.
        batch: The batch that this rank read.
        dims: The meshes of the run.

    Raises:
        TrainingError: The ranks read different batches.
    """
    ranks = dims["pp_cp_tp"]
    if not has_peers(ranks):
        return
    hashes = gather_values(task.batch_hash(batch), ranks)
    if len(set(hashes)) > 1:
        raise TrainingError(
            f"the ranks {ranks.mesh.tolist()} of one data-parallel rank read different batches (hashes {hashes}); the "
            "data set must be the same on all machines"
        )

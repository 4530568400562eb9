"""Batches of text: their keys, their loader from numbered streams (see `order/`), and batches made ahead."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from longshard.context.planning.options import BatchPlan
from longshard.sharding.tensors import content_hash
from trainer.config.errors import ConfigError
from trainer.config.schema import Training
from trainer.data.mixture import DataSet
from trainer.data.order.stream_loader import StreamLoader
from trainer.data.packing import PackedSequence
from trainer.observer import Positions

Batch = dict[str, Any]
"""A `TextBatch` that is being made."""
Planner = Callable[[Mapping[str, np.ndarray]], object]
"""Makes the plan of the attention of a batch from its arrays."""


class TextBatch(TypedDict, total=False):
    """Sequences of one data-parallel rank, (B, S) int64 each, the same on each of its context-parallel ranks."""

    tokens: Tensor
    labels: Tensor
    """The next token of each token, already shifted; `IGNORE_INDEX` where there is none."""
    positions: Tensor
    """Positions within each document, from 0; `NO_POSITION` for padding."""
    document_ids: Tensor
    """Number of the document within its sequence; padding has a number of its own."""
    sources: Tensor
    """Source of each sequence in a mixture, (B,), or of each token, (B, S), if documents were exchanged."""
    numbers: list[int]
    """Global number of each sequence: the sequences of the run before it, on all ranks."""
    padding: int
    """Number of padding tokens; absent if there are none."""
    plan: BatchPlan
    """Layout, mask and method of attention, for packed documents."""
    uses_positions: bool
    """Whether the model gets `positions` although documents see each other."""


def arrays_of(sequences: Sequence[PackedSequence]) -> dict[str, np.ndarray]:
    """Stack the arrays of sequences.

    Args:
        sequences: B sequences of S tokens.

    Returns:
        tokens, labels, positions and document_ids by name, (B, S) int64 each.
    """
    names = ("tokens", "labels", "positions", "document_ids")
    return {name: np.stack([getattr(x, name) for x in sequences]) for name in names}


def planned_batch(arrays: Mapping[str, np.ndarray], plan: Planner | None) -> Batch:
    """Return copies of arrays as tensors, with the plan of their attention.

    Args:
        arrays: See `arrays_of`.
        plan: Makes the plan. None: the batch has none.
    """
    batch = tensors_of(arrays)
    return batch if plan is None else batch | {"plan": plan(arrays)}


def tensors_of(arrays: Mapping[str, np.ndarray]) -> TextBatch:
    """Return arrays as tensors. They are cloned, because torch never resizes memory of numpy.

    Args:
        arrays: Arrays by name.
    """
    return {name: torch.from_numpy(array).clone() for name, array in arrays.items()}


class BatchLoader(StreamLoader):
    """Endless batches of the streams that one data-parallel rank reads, in global order.

    A batch is a `TextBatch` of (local_batch_size, seq_len). The ranks of one `dp_rank` get the same batches. All
    iterators share the position: a new one continues where the last one stopped.

    Args:
        data: The data set.
        training: The table [training]: sequence length, local batch size, data streams and seed.
        dp_rank: The data-parallel rank.
        dp_degree: The number of data-parallel ranks.
        plan: Computes the entry "plan" of a batch from its arrays; None for no such entry.
        exchange: Turns the batches that are read into the batches that are returned, such as balanced ones.

    Raises:
        ConfigError: There is no document with text, or too few documents for each stream.
    """

    def __init__(
        self,
        data: DataSet,
        training: Training,
        *,
        dp_rank: int,
        dp_degree: int,
        plan: Planner | None = None,
        exchange: Callable[[Iterator[TextBatch]], Iterator[Batch]] = iter,
    ) -> None:
        split = {"data_streams": training.data_streams, "seed": training.seed}
        data.check(**split)
        self._data = data
        self._training = training
        self._plan = plan
        self._exchange = exchange
        super().__init__(data.items, **split, dp_rank=dp_rank, dp_degree=dp_degree)

    def fitting(self, data_streams: int) -> int:
        """Return the number of streams if `training.data_streams` is not set.

        Args:
            data_streams: The number of streams that fits the number of documents.
        """
        return self._data.streams_with_text(data_streams, self._seed)

    def streams_of(self, items: Any, data_streams: int) -> dict[int, Any]:
        """Return the streams of this rank by number, at their beginning.

        Args:
            items: Number of documents that are read; for a mixture, a tuple with the number of each source.
            data_streams: Number of streams of all ranks.
        """
        return self._data.streams(
            items, self._training.seq_len, data_streams, self._seed, self._rank, self._degree
        )

    def describe(self, items: Any) -> dict[str, int]:
        """Return everything that the meaning of a position depends on, except seed and number of streams, by name.

        Args:
            items: Number of documents that are read.
        """
        return self._data.describe(items, self._training.seq_len)

    def items_of(self, saved: Mapping[str, Any]) -> Any:
        """Return how many documents a resumed run reads.

        Args:
            saved: The saved state of one stream; empty if there is none.
        """
        return self._data.items_of(saved)

    def __iter__(self) -> Iterator[Batch]:
        return self._exchange(self._read())

    def _read(self) -> Iterator[TextBatch]:
        while True:
            numbers, sequences = zip(
                *self._next_samples(self._training.local_batch_size), strict=True
            )
            batch = planned_batch(arrays_of(sequences), self._plan)
            if sequences[0].source is not None:
                batch["sources"] = torch.tensor([sequence.source for sequence in sequences])
            batch["numbers"] = list(numbers)
            batch["padding"] = sum(sequence.padding for sequence in sequences)
            yield batch


def data_identity(states: Positions, training: Training) -> dict[str, int | str]:
    """Return everything that all ranks of a job must have in common before they read data, by name.

    The path of the data may differ between machines, and is left out.

    Args:
        states: The states of this rank's streams, before the first batch.
        training: The table [training].
    """
    settings = {
        f"training.{name}": str(value)
        for name, value in vars(training).items()
        if name != "dataset_path"  # a machine may have the same files elsewhere
    }
    # every stream begins alike
    return settings | dict(next(iter(states.values()), {}))


def batch_hash(batch: Mapping[str, Any]) -> int:
    """Return a 63-bit hash of a batch's tensors, the same in every process.

    Args:
        batch: The batch.
    """
    return content_hash({name: x for name, x in batch.items() if isinstance(x, Tensor)})


# ---- batches that are made while the device works


class _Step(NamedTuple):
    """The batches of one step, or the error of making them; the loader's state and epoch before."""

    batches: list[Batch] | Exception
    state: dict[int, dict[str, int]]
    epoch: float


class BatchesAhead:
    """The micro-batches of a step, which may be made before the step needs them.

    State and `epoch` are the position after the batches that were taken.

    Args:
        loader: The loader.
        number: Micro-batches of a step.
        prepare: Function of each new batch, such as its copy to the device.
    """

    def __init__(
        self, loader: StreamLoader, number: int, prepare: Callable[[Batch], Batch]
    ) -> None:
        self._loader = loader
        self._number = number
        self._prepare = prepare
        self._batches = iter(loader)
        self._made: deque[_Step] = deque()

    def make(self, steps: int = 1) -> None:
        """Make the batches of the next steps, unless they exist. After an error, make none; `take` raises it.

        Args:
            steps: Number of steps.
        """
        while len(self._made) < steps and not (
            self._made and isinstance(self._made[-1].batches, Exception)
        ):
            before = self._loader.state_dict(), self._loader.epoch
            try:
                made = [self._prepare(next(self._batches)) for _ in range(self._number)]
            except Exception as error:
                made = error
            self._made.append(_Step(made, *before))

    @property
    def failed(self) -> bool:
        """Whether batches cannot be made, because of the data; `check` says why."""
        return any(isinstance(step.batches, ConfigError) for step in self._made)

    def check(self) -> None:
        """Raise the error of batches that could not be made."""
        for step in self._made:
            if isinstance(step.batches, Exception):
                raise step.batches

    def take(self) -> list[Batch]:
        """Return the batches of the next step; make them first if `make` has not. Raise the error of making them."""
        self.make()
        made = self._made.popleft().batches
        if isinstance(made, Exception):
            raise made
        return made

    @property
    def epoch(self) -> float:
        """Passes over the data at the first batch that waits, else at the loader's position."""
        return self._made[0].epoch if self._made else self._loader.epoch

    def state_dict(self) -> dict[int, dict[str, int]]:
        """Return the state of the loader after the batches that were taken."""
        return self._made[0].state if self._made else self._loader.state_dict()

    def load_state_dict(self, states: Positions) -> None:
        """Resume the loader, and discard batches made ahead.

        Args:
            states: The states of streams.
        """
        self._made.clear()
        self._loader.load_state_dict(states)

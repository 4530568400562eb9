"""Batches of text: their keys, their loader from numbered streams (see `streams.py`), and how they are made ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np
import torch

from longshard.context.planning.options import BatchPlan
from longshard.sharding.tensors import content_hash
from trainer.config.errors import ConfigError
from trainer.config.schema import Training
from trainer.data.data_set import DataSet, Items, SampleStream
from trainer.data.order.streams import StreamLoader
from trainer.data.packing import PackedSequence
from trainer.observer import Positions


class TextBatch(TypedDict, total=False):
    """Sequences of one data-parallel rank, (B, S) int64 each, the same on each of its context-parallel ranks."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """The next token of each, already shifted; `IGNORE_INDEX` where there is none."""
    positions: torch.Tensor
    """Within each document, from 0; `NO_POSITION` of padding."""
    document_ids: torch.Tensor
    """Number of the document within its sequence; padding has a number of its own."""
    sources: torch.Tensor
    """Of a mixture: number of the source of each sequence (B,), or of each token (B, S) if documents were exchanged."""
    numbers: list[int]
    """Of each sequence how many sequences of the run come before it, on all ranks."""
    padding: int
    """Tokens of no document; absent if there are none."""
    plan: BatchPlan
    """With packed documents: the layout, mask and method of attention."""
    uses_positions: bool
    """Whether the model gets `positions` although documents see each other."""


def arrays_of(sequences: Iterable[PackedSequence]) -> dict[str, np.ndarray]:
    """Return the arrays of sequences together, (B, S) int64 each."""
    columns = ([x.tokens, x.labels, x.positions, x.document_ids] for x in sequences)
    names = ("tokens", "labels", "positions", "document_ids")
    return {
        name: np.stack(rows)
        for name, rows in zip(names, zip(*columns, strict=True), strict=True)
    }


def tensors_of(arrays: Mapping[str, np.ndarray]) -> TextBatch:
    """Return arrays as tensors, cloned, because torch never resizes memory that numpy has seen."""
    return {name: torch.from_numpy(array).clone() for name, array in arrays.items()}


class BatchLoader(StreamLoader):
    """Endless batches of the streams that one data-parallel rank owns, in global order.

    A batch is a `TextBatch` of (local_batch_size, seq_len). The ranks of one `dp_rank` get the same batches. All
    iterators share the position: a new one continues where the last one stopped.

    Args:
        data: the data set.
        training: its sequence length, local batch size, data streams and seed.
        dp_rank, dp_degree: which rank reads, of how many.
        plan: computes the entry "plan" of a batch from its arrays.
        exchange: makes other batches of these.

    Raises:
        ConfigError: there is no document with text, or too few for each stream.
    """

    def __init__(
        self,
        data: DataSet,
        training: Training,
        *,
        dp_rank: int,
        dp_degree: int,
        plan: Callable[[Mapping[str, np.ndarray]], object] | None = None,
        exchange: Callable[[Iterator[TextBatch]], Iterator[dict[str, Any]]] = iter,
    ) -> None:
        split = {"data_streams": training.data_streams, "seed": training.seed}
        data.check(**split)
        self._data = data
        self._training = training
        self._plan = plan
        self._exchange = exchange
        super().__init__(data.items, **split, dp_rank=dp_rank, dp_degree=dp_degree)

    def fitting(self, data_streams: int) -> int:
        return self._data.streams_with_text(data_streams, self._seed)

    def streams_of(self, items: Items, data_streams: int) -> Mapping[int, SampleStream]:
        return self._data.streams(
            items, self._training.seq_len, data_streams, self._seed, self._rank, self._degree
        )

    def describe(self, items: Items) -> dict[str, int]:
        return self._data.describe(items, self._training.seq_len)

    def items_of(self, saved: Mapping[str, Any]) -> Items:
        return self._data.items_of(saved)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._exchange(self._read())

    def _read(self) -> Iterator[TextBatch]:
        while True:
            numbers, sequences = zip(
                *self._next_samples(self._training.local_batch_size), strict=True
            )
            arrays = arrays_of(sequences)
            batch = tensors_of(arrays)
            if sequences[0].source is not None:
                batch["sources"] = torch.tensor([sequence.source for sequence in sequences])
            batch["numbers"] = list(numbers)
            batch["padding"] = sum(sequence.padding for sequence in sequences)
            yield batch if self._plan is None else batch | {"plan": self._plan(arrays)}


def data_identity(states: Positions, training: Training) -> dict[str, int | str]:
    """Return what all ranks of a job must have in common before they read data, by name.

    states: of this rank's streams, before the first batch.
    """
    here = asdict(training)
    del here["dataset_path"]  # a machine may have the same files elsewhere
    settings = {f"training.{name}": str(value) for name, value in here.items()}
    beginning = next(iter(states.values()), {})  # every stream begins alike
    return settings | dict(beginning)


def batch_hash(batch: Mapping[str, Any]) -> int:
    """Return a 63-bit hash of a batch's tensors, the same in every process: equal ones only have the same."""
    return content_hash({name: x for name, x in batch.items() if isinstance(x, torch.Tensor)})


# ---- batches that are made while the device works


class Loader(Protocol):
    """Endless batches of one data-parallel rank, with a position that is saved; see loader.py and fields.py."""

    epoch: float

    def __iter__(self) -> Any: ...

    def state_dict(self) -> dict[int, dict[str, int]]: ...

    def load_state_dict(self, states: Positions) -> None: ...


class _Step(NamedTuple):
    """The batches of one step, or why there are none; the loader's state and epoch before they were made."""

    batches: list[dict[str, Any]] | Exception
    state: dict[int, dict[str, int]]
    epoch: float


class BatchesAhead:
    """The micro-batches of a step, which may be made before the step needs them.

    The position, its state and `epoch` are those of the batches that were taken. number: of micro-batches of a step;
    prepare: what is done to each batch when it is made, such as its way to the device.
    """

    def __init__(
        self, loader: Loader, number: int, prepare: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self._loader = loader
        self._number = number
        self._prepare = prepare
        self._batches = iter(loader)
        self._made: deque[_Step] = deque()

    def make(self, steps: int = 1) -> None:
        """Make the batches of the next `steps` steps, unless they are there. `take` raises what goes wrong."""
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
        """Raise the error of batches that are made and cannot be taken."""
        for step in self._made:
            if isinstance(step.batches, Exception):
                raise step.batches

    def take(self) -> list[dict[str, Any]]:
        """Return the batches of the next step; what went wrong when they were made is raised here."""
        self.make()
        made = self._made.popleft().batches
        if isinstance(made, Exception):
            raise made
        return made

    @property
    def epoch(self) -> float:
        return self._made[0].epoch if self._made else self._loader.epoch

    def state_dict(self) -> dict[int, dict[str, int]]:
        return self._made[0].state if self._made else self._loader.state_dict()

    def load_state_dict(self, states: Positions) -> None:
        self._made.clear()
        self._loader.load_state_dict(states)

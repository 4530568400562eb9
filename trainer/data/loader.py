"""Packed batches of numbered streams of documents, see `streams.py`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from trainer.config.schema import Training
from trainer.data.mixture import Mixture, MixtureStream
from trainer.data.order.streams import StreamLoader
from trainer.data.text_data import TextData, TextStream
from trainer.distributed.sharding.tensors import content_hash


class BatchLoader(StreamLoader):
    """Endless batches of the streams that one data-parallel rank owns, in global order.

    A batch is a dict of int64 tensors (local_batch_size, seq_len), each in a storage of its own that torch may resize:
    tokens, labels (shifted by one, IGNORE_INDEX where nothing follows), positions and document_ids, see `packing.py`.
    The ranks of one `dp_rank` get the same batches. All iterators share the position: a new one continues where the
    last one stopped.

    plan: computes from the arrays of a batch what stands under "plan" in it.
    "padding" in a batch is the number of its tokens that are of no document. That of a mixture also has "sources"
    (local_batch_size,), the number of the source of each sequence.

    Raises:
        ConfigError: there is no document, or there are fewer than streams.
    """

    def __init__(
        self,
        data: TextData | Mixture,
        *,
        seq_len: int,
        local_batch_size: int,
        data_streams: int | None,
        seed: int,
        dp_rank: int,
        dp_degree: int,
        plan: Callable[[Mapping[str, np.ndarray]], object] | None = None,
    ) -> None:
        data.check(data_streams)
        self._data, self._batch_size, self._plan, self._seq_len = data, local_batch_size, plan, seq_len
        split = {"data_streams": data_streams, "seed": seed, "dp_rank": dp_rank, "dp_degree": dp_degree}
        super().__init__(data.items, **split)

    def streams_of(self, items: int | tuple[int, ...], data_streams: int) -> dict[int, TextStream | MixtureStream]:
        return self._data.streams(items, self._seq_len, data_streams, self._seed, self._rank, self._degree)

    def describe(self, items: int | tuple[int, ...]) -> dict[str, int]:
        return self._data.describe(items, self._seq_len)

    def items_of(self, saved: Mapping[str, int]) -> int | tuple[int, ...]:
        return self._data.items_of(saved)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            numbers, sequences = zip(*self._next_samples(self._batch_size), strict=True)
            names = ("tokens", "labels", "positions", "document_ids")
            arrays = {name: np.stack([getattr(sequence, name) for sequence in sequences]) for name in names}
            # Cloned, because torch never resizes memory that numpy has seen.
            batch: dict[str, Any] = {name: torch.from_numpy(array).clone() for name, array in arrays.items()}
            if isinstance(self._data, Mixture):
                batch["sources"] = torch.tensor([sequence.source for sequence in sequences])
            batch["numbers"] = list(numbers)
            batch["padding"] = sum(sequence.padding for sequence in sequences)
            yield batch if self._plan is None else batch | {"plan": self._plan(arrays)}


def data_identity(states: Mapping[int, Mapping[str, int]], training: Training) -> dict[str, int | str]:
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

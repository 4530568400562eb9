"""Batches of pairs of frames of a field, each rank its part of the grid, and the error of persistence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import product

import numpy as np
import torch

from examples.fields.file import FieldSource, Part, check_fields
from trainer.config.errors import ConfigError
from trainer.data.order.stream_loader import StreamLoader
from trainer.data.order.streams import ItemStream, Shuffled, assigned
from trainer.data.sources.files import number_of
from trainer.data.sources.registry import check_streams

__all__ = ["FieldLoader", "FieldSource", "check_fields", "persistence_error"]


class FieldLoader(StreamLoader):
    """Endless batches of this rank's part of pairs of frames, of the streams of its data-parallel rank.

    A batch is a dict. `inputs` (local_batch_size, channels, rows, columns) are the frames at time t, and `targets`, of
    the same shape, the frames at t + lead. Both are float32, normalised by the file's mean and standard deviation.
    `sample_numbers` (local_batch_size, 2) int64 are trajectory and t, the same on all ranks of one `dp_rank`.
    `streams.py` sets the order. All iterators share the position: a new one continues where the last one stopped.

    Args:
        source: The open file of fields.
        local_batch_size: Samples of a batch.
        data_streams: Number of data streams; see `StreamLoader`.
        seed: Seed of the order.
        dp_rank: This rank's number in data parallelism.
        dp_degree: Number of data-parallel ranks.
        lead: Frames from inputs to targets.
        held_out: Number of last trajectories, which are never trained on.
        part: Rows and columns of this rank. None: the whole grid.

    Raises:
        ConfigError: See `check_fields`; or there are fewer samples than streams.
    """

    def __init__(
        self,
        source: FieldSource,
        *,
        local_batch_size: int,
        data_streams: int | None,
        seed: int,
        dp_rank: int,
        dp_degree: int,
        lead: int = 1,
        held_out: int = 0,
        part: Part | None = None,
    ) -> None:
        check_fields(source, lead=lead, held_out=held_out)
        trajectories = source.trajectories - held_out
        self._starts = source.times - lead
        samples = trajectories * self._starts
        check_streams(source.path, samples, data_streams, item="sample")
        self._source = source
        self._batch_size = local_batch_size
        self._lead = lead
        self._part = part
        self._held_out = range(trajectories, source.trajectories)
        super().__init__(samples, data_streams=data_streams, seed=seed, dp_rank=dp_rank, dp_degree=dp_degree)

    def streams_of(self, items: int, data_streams: int) -> dict[int, ItemStream]:
        shares = assigned(items, data_streams, self._seed, self._rank, self._degree)
        return {stream: ItemStream(Shuffled(own, stream=stream, seed=self._seed)) for stream, own in shares}

    def describe(self, items: int) -> dict[str, int]:
        source = self._source
        digest = blake2b(repr((source.array.shape, source.channels)).encode(), digest_size=8)
        digest.update(source.mean.tobytes() + source.std.tobytes())
        content = number_of(digest)
        lengths = {"trajectories": self._held_out.start, "times": source.times, "lead": self._lead}
        return lengths | {"content": content, "numbers": source.numbers}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            items = (item for _, item in self._next_samples(self._batch_size))
            yield self._batch([divmod(item, self._starts) for item in items])

    def evaluation_samples(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches of all pairs of the held-out trajectories in order; the last batch may be smaller.

        Every data-parallel rank gets all pairs, so that all ranks do the same number of steps.
        """
        pairs = list(product(self._held_out, range(self._starts)))
        for first in range(0, len(pairs), self._batch_size):
            yield self._batch(pairs[first : first + self._batch_size])

    def _batch(self, pairs: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        times = (slice(t, t + self._lead + 1, self._lead) for _, t in pairs)
        frames = [self._source.read(pair[0], both, self._part) for pair, both in zip(pairs, times, strict=True)]
        inputs, targets = torch.from_numpy(np.stack(frames, axis=1))
        return {"inputs": inputs.clone(), "targets": targets.clone(), "sample_numbers": torch.tensor(pairs)}


def persistence_error(source: FieldSource, lead: int, held_out: int) -> float:
    """Return the error of the forecast that nothing changes: the mean squared change of normalised held-out frames.

    Args:
        source: The open file of fields.
        lead: Frames from inputs to targets.
        held_out: Number of held-out trajectories.

    Raises:
        ConfigError: See `check_fields`; or no trajectory is held out.
    """
    check_fields(source, lead=lead, held_out=held_out)
    if not held_out:
        raise ConfigError(f"no trajectory of {source.path} is held out, so that there is no error; hold out at least 1")
    whole = (source.read(i, slice(None)) for i in range(source.trajectories - held_out, source.trajectories))
    return float(np.mean([np.square(frames[lead:] - frames[:-lead], dtype=np.float64).mean() for frames in whole]))

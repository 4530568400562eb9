"""Attention of a sequence in chunks on one device: earlier chunks' K/V are read from memory, not from other ranks.

    first pass     chunks 0 ... N - 2, forward without gradients: each layer keeps the K/V rows that later chunks see
    second pass    chunks N - 1 ... 0, forward and backward: a chunk reads the rows of earlier chunks, adds to their
                   dK/dV, and takes the dK/dV that later chunks have added to its own rows

So the activations of one chunk exist at once, and K/V and dK/dV of all. Gradients are exact, unlike in truncated
backpropagation. The schedule is from ChunkFlow (arXiv 2503.02356). Tiles, kernels and merging are the same as in
context parallelism; `schedules.py` says which rows a chunk reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longshard.context.execution.kernels.base import OutLse, Terms
from longshard.context.execution.ring import StagedExecution
from longshard.context.execution.stages import Held, Item, Returning, fold_batch, pack, unpack
from longshard.sharding.exchange import Pending
from longshard.sharding.ranges import Offsets, Ranges, size, union
from longshard.sharding.rows import put_rows


class KeptTensor(Protocol):
    """A tensor that waits, on the device or on the host."""

    def fetch(self) -> Tensor:
        """Return the tensor that `take` returns, and begin to copy it to the device; read it after `take`."""

    def take(self) -> Tensor:
        """Return the tensor on the device, after a wait until its copy is complete; may be called again."""


class OnDevice(NamedTuple):
    """A tensor that waits on the device.

    Attributes:
        tensor: The tensor.
    """

    tensor: Tensor

    def fetch(self) -> Tensor:
        """Return the tensor."""
        return self.tensor

    take = fetch


@dataclass(eq=False)
class ChunkRows:
    """The K/V rows that wait for later chunks, and the sums of their gradients, as they are sent, in one micro-batch.

    Keys are (layer, chunk). The backward of a chunk removes its own entries.

    Attributes:
        keep: Makes a tensor wait.
        rows: The places of the rows in the sequence, and the rows.
        gradients: The sums of their gradients.
    """

    keep: Callable[[Tensor], KeptTensor] = OnDevice
    rows: dict[tuple[int, int], tuple[Offsets, KeptTensor]] = field(default_factory=dict)
    gradients: dict[tuple[int, int], KeptTensor] = field(default_factory=dict)

    def hold(self, key: tuple[int, int], ranges: Ranges, make: Callable[[], Tensor]) -> None:
        """Make the rows of a chunk wait, unless there are none, or they wait already.

        Args:
            key: The layer and the chunk.
            ranges: The rows that later chunks see.
            make: Returns these rows, (rows, *row_shape).
        """
        if ranges and key not in self.rows:
            self.rows[key] = Offsets(ranges), self.keep(make())

    def release(self, key: tuple[int, int]) -> tuple[Offsets, Tensor] | None:
        """Remove the entries of a chunk; return the places of its rows and the sums of their gradients.

        Args:
            key: The layer and the chunk.

        Returns:
            The places, and the gradients, (rows, *row_shape); None if no rows wait.
        """
        if (held := self.rows.pop(key, None)) is None:
            return None
        return held[0], self.gradients.pop(key).take()

    def add(self, key: tuple[int, int], ranges: Ranges, gradient: Tensor) -> None:
        """Add the gradients of some waiting rows of a chunk.

        Args:
            key: The layer and the chunk.
            ranges: The rows, as positions in the sequence; each is a row that `hold` was given.
            gradient: Their gradients, (rows, *row_shape); the caller must not use it afterwards.
        """
        offsets = self.rows[key][0]
        waiting = self.gradients.pop(key, None)
        if waiting is None and ranges == offsets.ranges:
            total = gradient
        else:
            total = (
                waiting.take()
                if waiting
                else gradient.new_zeros(size(offsets.ranges), *gradient.shape[1:])
            )
            put_rows(total, offsets.places(ranges), gradient, add=True)
        self.gradients[key] = self.keep(total)


@dataclass(frozen=True)
class ChunkExecution(StagedExecution):
    """The plan of a chunk (`chunk_plan`), for one layer. Groups and passes of heads are not used.

    Attributes:
        waiting: The rows that wait between chunks.
        layer: The layer.
    """

    waiting: ChunkRows = field(default_factory=ChunkRows)
    layer: int = 0

    def forward(self, *qkv: Tensor, terms: Terms) -> OutLse:
        """Return the output and the log-sum-exp; keep the rows of this chunk that later chunks see, if not done yet.

        Args:
            *qkv: The rows of the chunk: q (B, H, S, D), k and v (B, K, S, D).
            terms: The scale, and optional inputs.
        """
        key = (self.layer, self.plan.rank)
        ranges = union(r for m in self.plan.forward[0].messages for r in m.ranges)

        def rows() -> Tensor:
            folded = (fold_batch(x, self.plan) for x in qkv[1:])
            return pack(*folded, self.plan.own.places(ranges))

        self.waiting.hold(key, ranges, rows)
        return super().forward(*qkv, terms=terms)

    def _fetch(self, following: Item | None, own: Held, held: Held) -> tuple[Held, Pending]:
        """Begin to fetch the next stage's rows, and the sums of gradients that its backward needs.

        Return the K/V of the stage and the pending copy. If there is no next stage, return `held`.
        """
        if following is None:
            return held, Pending()
        stage = following.stage
        owner = stage.messages[0].source
        offsets, waiting = self.waiting.rows[self.layer, owner]
        for chunk in (owner, self.plan.rank) if stage.home else ():
            if (sums := self.waiting.gradients.get((self.layer, chunk))) is not None:
                sums.fetch()
        source = waiting.fetch()
        first, *others = offsets.places(stage.held)
        rows = (
            source.new_empty(stage.rows, *source.shape[1:]) if others else source[slice(*first)]
        )

        def arrived() -> None:
            whole = waiting.take()
            if others:
                torch.cat([whole[slice(*place)] for place in (first, *others)], out=rows)

        return Held(*unpack(rows), rows, stage.places), Pending(kept=[source], arrived=arrived)

    def _return_gradients(self, item: Item, gradient: Tensor) -> Returning:
        """Add the gradients of a stage of an earlier chunk to that chunk's waiting sums.

        If the stage is this chunk's own, add the gradients from later chunks to `gradient` in place. The returned
        record is empty, as nothing is sent.
        """
        for message in item.stage.home:
            self.waiting.add((self.layer, message.target), message.ranges, gradient)
        key = self.layer, self.plan.rank
        if not item.stage.home and (held := self.waiting.release(key)) is not None:
            offsets, added = held
            put_rows(gradient, self.plan.own.places(offsets.ranges), added, add=True)
        return Returning()

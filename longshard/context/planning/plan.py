"""The plan of one rank: stages of messages and tiles, as records of integers.

A plan lists for each stage, forward and backward, which K/V rows are sent between which ranks, and which tiles of
attention the rank computes. A row reaches only ranks with a query that sees it. `methods.py` makes plans.
"""

from dataclasses import dataclass, field
from functools import cached_property

from longshard.context.planning.tiles import Tile
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Offsets, Range, Ranges, size, union


@dataclass(frozen=True)
class Message:
    """Rows of the global sequence that one rank of the group sends to another."""

    source: int
    target: int
    ranges: Ranges

    @property
    def rows(self) -> int:
        return size(self.ranges)


@dataclass(frozen=True)
class Stage:
    """One step of one rank.

    held: the K/V rows of its buffer, ascending. messages: what this rank sends and receives before it, in the order of
    posting. home: the gradients that it sends and receives afterwards (backward only). collective: K/V and gradients
    are sent by all-gather and reduce-scatter of whole shards, on all ranks, and not by messages.
    """

    held: Ranges
    tiles: tuple[Tile, ...]
    messages: tuple[Message, ...] = ()
    home: tuple[Message, ...] = ()
    collective: bool = False

    @cached_property
    def places(self) -> Offsets:
        """The places of held rows in the buffer."""
        return Offsets(self.held)

    @property
    def rows(self) -> int:
        return size(self.held)

    @property
    def pairs(self) -> int:
        return sum(tile.pairs for tile in self.tiles)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plan of one rank. Stage 0 of both directions is local. Messages are sent while the stage before is computed.

    Plans are cached, and compared by identity.
    """

    method: str
    rank: int
    q_layout: AxisLayout = field(repr=False)
    kv_layout: AxisLayout = field(repr=False)
    sequences: int
    """Sequences of the batch with masks of their own; 1: the plan holds for each sequence of any batch."""
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    inner: "RankPlan | None" = field(default=None, repr=False)
    """Where heads are exchanged: the plan of the head group for all its rows; it has the same stages."""
    head_degree: int = 1
    """How many consecutive ranks make a head group, and divide the heads."""

    @property
    def degree(self) -> int:
        return self.q_layout.degree

    @cached_property
    def head_group_layouts(self) -> tuple[AxisLayout, AxisLayout]:
        """The layouts of the head group's queries and keys, of all sequences, over its ranks; rows count from 0."""
        first = self.rank // self.head_degree * self.head_degree
        layouts = []
        for layout in (self.q_layout, self.kv_layout):
            shards = layout.ranges[first : first + self.head_degree]
            places = Offsets(union(sum(shards, ())))
            of_group = AxisLayout(
                layout.name,
                size(places.ranges),
                tuple(places.places(shard) for shard in shards),
            )
            layouts.append(of_group.repeated(self.sequences))
        return tuple(layouts)

    @cached_property
    def own(self) -> Offsets:
        """The places of this rank's own rows in its K and V."""
        return Offsets(self.kv_layout.repeated(self.sequences).ranges[self.rank])

    def owns(self, part: Range) -> bool:
        """Return whether the keys of `part`, all of one rank, are this rank's own."""
        return self.own(part[0]) < self.own(part[0] + 1)

    @property
    def pairs(self) -> int:
        """The number of visible pairs that this rank computes, each for its heads."""
        return sum(stage.pairs for stage in self.forward)

    def rows_for(self, stage: Stage, messages: tuple[Message, ...]) -> tuple[int, int]:
        """Return how many rows this rank sends and receives for a stage, by these messages or by the collective."""
        if stage.collective:
            return ((self.degree - 1) * self.longest,) * 2
        sent = sum(message.rows for message in messages if message.source == self.rank)
        return sent, sum(message.rows for message in messages if message.target == self.rank)

    @cached_property
    def longest(self) -> int:
        """The number of rows of the longest shard of keys, to which a collective pads the others."""
        return self.sequences * max(self.kv_layout.lengths)

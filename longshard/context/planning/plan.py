"""The plan of one rank: stages of messages and tiles, as records of integers. `methods.py` makes plans.

For each stage, forward and backward, a plan lists the K/V rows that ranks send to each other, and the tiles of
attention that the rank computes. A row reaches only ranks with a query that sees it.
"""

from dataclasses import dataclass, field
from functools import cached_property

from longshard.context.planning.tiles import Tile
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Offsets, Range, Ranges, size, union


@dataclass(frozen=True)
class Message:
    """Rows of the global sequence that one rank of the group sends to another.

    Attributes:
        source: The rank that sends.
        target: The rank that receives.
        ranges: The rows.
    """

    source: int
    target: int
    ranges: Ranges

    @property
    def rows(self) -> int:
        """The number of rows."""
        return size(self.ranges)


@dataclass(frozen=True)
class Stage:
    """One step of one rank.

    Attributes:
        held: The K/V rows of its buffer, ascending.
        tiles: The tiles that the rank computes.
        messages: The messages that this rank sends and receives before the stage, in the order of posting.
        home: The gradients that this rank sends and receives after the stage (backward only).
        collective: Whether all ranks send whole shards instead of messages: K/V by all-gather, gradients by
            reduce-scatter.
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
        """The number of held rows."""
        return size(self.held)

    @property
    def pairs(self) -> int:
        """The number of visible pairs of the tiles."""
        return sum(tile.pairs for tile in self.tiles)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plan of one rank. Stage 0 of both directions is local.

    The messages of a stage are sent while the stage before is computed. Plans are cached, and compared by identity.

    Attributes:
        method: The name of the method.
        rank: The rank.
        q_layout: The layout of the queries.
        kv_layout: The layout of the keys.
        forward: The stages of the forward.
        backward: The stages of the backward.
    """

    method: str
    rank: int
    q_layout: AxisLayout = field(repr=False)
    kv_layout: AxisLayout = field(repr=False)
    sequences: int
    """Number of sequences with masks of their own; 1 means that the plan holds for each sequence of any batch."""
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    inner: "RankPlan | None" = field(default=None, repr=False)
    """If heads are exchanged, the plan of the head group for all its rows, with the same stages. Else None."""
    head_degree: int = 1
    """Number of consecutive ranks that make a head group and divide the heads."""

    @property
    def degree(self) -> int:
        """The number of ranks."""
        return self.q_layout.degree

    @cached_property
    def head_group_layouts(self) -> tuple[AxisLayout, AxisLayout]:
        """The layouts of the head group's queries and keys, of all sequences, over its ranks; rows count from 0."""
        first = self.rank // self.head_degree * self.head_degree
        layouts = []
        for layout in (self.q_layout, self.kv_layout):
            shards = layout.ranges[first : first + self.head_degree]
            places = Offsets(union(sum(shards, ())))
            group_layout = AxisLayout(
                layout.name,
                size(places.ranges),
                tuple(places.places(shard) for shard in shards),
            )
            layouts.append(group_layout.repeated(self.sequences))
        return tuple(layouts)

    @cached_property
    def own(self) -> Offsets:
        """The places of this rank's own rows in its K and V."""
        return Offsets(self.kv_layout.repeated(self.sequences).ranges[self.rank])

    def owns(self, part: Range) -> bool:
        """Return whether this rank owns the keys of `part`.

        Args:
            part: Keys that are all of one rank.
        """
        return self.own(part[0]) < self.own(part[0] + 1)

    @property
    def pairs(self) -> int:
        """The number of visible pairs that this rank computes, each for its heads."""
        return sum(stage.pairs for stage in self.forward)

    def rows_for(self, stage: Stage, messages: tuple[Message, ...]) -> tuple[int, int]:
        """Return the numbers of rows that this rank sends and receives for a stage.

        Args:
            stage: The stage. If it is collective, the padded shards of all other ranks count.
            messages: The messages to count; not used if the stage is collective.
        """
        if stage.collective:
            return ((self.degree - 1) * self.longest,) * 2
        sent = sum(message.rows for message in messages if message.source == self.rank)
        return sent, sum(message.rows for message in messages if message.target == self.rank)

    @cached_property
    def longest(self) -> int:
        """The number of rows of the longest shard of keys. A collective pads the other shards to it."""
        return self.sequences * max(self.kv_layout.lengths)

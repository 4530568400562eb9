"""What one rank does to compute attention: stages of messages and tiles. Plain records of integers.

A plan says, stage by stage, which K/V rows travel from whom to whom and which tiles of attention a rank computes,
forward and backward. A row reaches only ranks with a query that sees it. `methods.py` makes plans.
"""

from dataclasses import dataclass, field
from functools import cached_property

from trainer.distributed.context_parallel.planning.tiles import Tile
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.ranges import Offsets, Range, Ranges, size, union


@dataclass(frozen=True)
class Message:
    """Rows of the global sequence that travel from one rank of the group to another."""

    source: int
    target: int
    ranges: Ranges

    @property
    def rows(self) -> int:
        return size(self.ranges)


@dataclass(frozen=True)
class Stage:
    """One step of one rank.

    held: K/V rows that are worked on, ascending, in one buffer. messages: what travels before it, this rank's part in
    it, in the order of posting; home: gradients that travel after it (backward only). collective: what travels does so
    by all-gather and reduce-scatter of whole shards, in which every rank takes part.
    """

    held: Ranges
    tiles: tuple[Tile, ...]
    messages: tuple[Message, ...] = ()
    home: tuple[Message, ...] = ()
    collective: bool = False

    @cached_property
    def places(self) -> Offsets:
        """Where a held row lies in the buffer."""
        return Offsets(self.held)

    @property
    def rows(self) -> int:
        return size(self.held)

    @property
    def pairs(self) -> int:
        return sum(tile.pairs for tile in self.tiles)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank does. Stage 0 of both directions is local; messages of a stage travel under the one before.

    Plans are cached, and compared by identity.
    """

    method: str
    rank: int
    q_layout: AxisLayout = field(repr=False)
    kv_layout: AxisLayout = field(repr=False)
    sequences: int
    """Sequences of the batch that the plan tells apart; 1: the same for all, however many there are."""
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    inner: "RankPlan | None" = field(default=None, repr=False)
    """The plan for all rows of this rank's heads, where heads are exchanged; it has the same stages."""
    head_degree: int = 1
    """Consecutive ranks that divide the heads among them."""

    @property
    def degree(self) -> int:
        return self.q_layout.degree

    @property
    def layouts(self) -> tuple[AxisLayout, AxisLayout]:
        """Of queries and of keys."""
        return self.q_layout, self.kv_layout

    @cached_property
    def head_group_layouts(self) -> tuple[AxisLayout, AxisLayout]:
        """Who of the ranks that exchange heads owns which of their queries and of their keys, of all sequences."""
        group = self.rank // self.head_degree
        return tuple(_within(x, group, self.head_degree).repeated(self.sequences) for x in self.layouts)

    @cached_property
    def own(self) -> Offsets:
        """Where a row that this rank owns lies in its K and V."""
        return Offsets(self.kv_layout.repeated(self.sequences).ranges[self.rank])

    def owns(self, part: Range) -> bool:
        """Whether the keys of `part`, all of one rank, are this rank's own."""
        return self.own(part[0]) < self.own(part[0] + 1)

    @property
    def pairs(self) -> int:
        """Visible pairs that this rank computes, each with its share of the heads."""
        return sum(stage.pairs for stage in self.forward)

    def rows_sent(self) -> dict[str, int]:
        """Rows of K/V (forward, backward) and of dK/dV (home) that this rank sends, beside any exchange of heads."""
        if self.inner is not None:
            return self.inner.rows_sent()
        return {
            "forward": sum(self.rows_sent_for(stage, stage.messages) for stage in self.forward),
            "backward": sum(self.rows_sent_for(stage, stage.messages) for stage in self.backward),
            "home": sum(self.rows_sent_for(stage, stage.home) for stage in self.backward),
        }

    def rows_sent_for(self, stage: Stage, messages: tuple[Message, ...]) -> int:
        """Rows that this rank sends for one stage, by these messages or by the collective."""
        if stage.collective:
            return (self.degree - 1) * self.longest
        return sum(message.rows for message in messages if message.source == self.rank)

    @property
    def longest(self) -> int:
        """Rows of the longest shard of keys, to which a collective pads the others."""
        return self.sequences * max(self.kv_layout.local_length(rank) for rank in range(self.degree))


def _within(layout: AxisLayout, group: int, ranks: int) -> AxisLayout:
    """Who of one group of so many ranks owns which of the group's rows, counted from 0."""
    shards = layout.ranges[group * ranks : (group + 1) * ranks]
    places = Offsets(union(sum(shards, ())))
    return AxisLayout(layout.name, size(places.ranges), tuple(places.places(shard) for shard in shards))

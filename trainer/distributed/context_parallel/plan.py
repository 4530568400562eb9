"""Layout x mask x method -> schedule of attention: pure integers, the same on every rank, no torch.

A plan says, stage by stage, which K/V rows travel from whom to whom and which tiles of attention a rank computes,
forward and backward. A row reaches only ranks with a query that sees it.

ring          Forward: K/V move from rank r to r - 1; at stage s rank r works on what rank (r + s) mod N owns. A row
              comes from the rank before on the way if that one works on it too, else from its owner. For causal
              head_tail that is 25 % less in total than a ring in which everything goes round.
              Backward: the other way round, from r to r + 1, farthest first, so that the first rank on the way that
              sees a row fetches it from its owner, and its gradient (dK, dV) is added up on the way home.

                  forward, N = 4: whose K/V rank r holds        backward
                  stage   1 2 3                                 stage   1 2 3
                  rank 0  1 2 3                                 rank 0  3 2 1
                  rank 1  2 3 0                                 rank 1  0 3 2
                  rank 2  3 0 1                                 rank 2  1 0 3
                  rank 3  0 1 2                                 rank 3  2 1 0

all_gather    Stage 0 is what a rank owns itself, stage 1 everything else that it sees, straight from the owners; by the
              collective (and the gradients back by reduce-scatter) unless the mask leaves less than half of that.
all_to_all    One stage: each rank has some of the heads and the whole sequence (Ulysses, arXiv 2309.14509).
hybrid        All-to-all among neighbours, a ring over the groups of neighbours: rank i * A + a is neighbour a of group
              i, and works on its share of the heads of all the rows that group i owns (USP, arXiv 2405.07719).

Ring attention: arXiv 2310.01889. Sequences of a batch with masks of their own are planned as one, laid one after
another.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from trainer.distributed.context_parallel.mask import Mask
from trainer.distributed.context_parallel.tiles import Piece, Tile, tiles_of
from trainer.distributed.sharding.layout import SequenceLayout
from trainer.distributed.sharding.ranges import Offsets, Range, Ranges, difference, intersection, size, union

METHODS = ("ring", "all_gather", "all_to_all", "hybrid")

# Plans of a batch of ten thousand documents take megabytes, and other documents come with the next batch.
_KEPT = 16


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


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. Stage 0 of both directions is local; messages of a stage travel under the one before."""

    method: str
    rank: int
    q_layout: SequenceLayout = field(repr=False)
    kv_layout: SequenceLayout = field(repr=False)
    rows: int
    """Sequences of the batch that the plan tells apart; 1: the same for all, however many there are."""
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    inner: "RankPlan | None" = field(default=None, repr=False)
    """Where heads are exchanged: what is done with all rows of this rank's heads; its stages are this plan's."""
    head_degree: int = 1
    """Neighbours that divide the heads among them."""

    @property
    def degree(self) -> int:
        return self.q_layout.degree

    @property
    def layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        """Of queries and of keys."""
        return self.q_layout, self.kv_layout

    @cached_property
    def neighbour_layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        """Who of the neighbours that exchange heads owns which of the queries, and of the keys, of their group."""
        group = self.rank // self.head_degree
        return tuple(_within(layout, group, self.head_degree) for layout in self.layouts)

    @cached_property
    def own(self) -> Offsets:
        """Where a row that this rank owns lies in its K and V."""
        return Offsets(self.kv_layout.repeated(self.rows).ranges[self.rank])

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
        return self.rows * max(self.kv_layout.length(rank) for rank in range(self.degree))


def make_plan(
    layout: SequenceLayout,
    mask: Mask,
    method: str,
    rank: int,
    *,
    kv_layout: SequenceLayout | None = None,
    head_degree: int | None = None,
) -> RankPlan:
    """What `rank` of the layout's degree does; cached.

    kv_layout: who owns which keys, if they are not as many as the queries. head_degree: for `hybrid`, how many
    neighbours divide the heads; it divides the degree.

    Raises:
        ValueError: a method that is none, a mask for sequences of another length, a head degree that does not divide.
    """
    kv_layout = kv_layout or layout
    if method == "hybrid" and (not head_degree or layout.degree % head_degree):
        raise ValueError(f"a head degree of {head_degree} must divide the {layout.degree} ranks of a hybrid plan")
    if method not in METHODS:
        raise ValueError(f"method {method!r} is none of {', '.join(map(repr, METHODS))}")
    if (mask.q_len, mask.kv_len) != (layout.seq_len, kv_layout.seq_len):
        raise ValueError(
            f"a mask of {mask.q_len} queries and {mask.kv_len} keys does not fit sequences of {layout.seq_len} and "
            f"{kv_layout.seq_len} tokens; make it for their lengths"
        )
    if method in ("all_to_all", "hybrid"):
        return _by_heads(layout, kv_layout, mask, method, rank, head_degree or layout.degree)
    return _problem(layout, kv_layout, mask).plan(method, rank)


@lru_cache(maxsize=_KEPT)
def _by_heads(
    layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, method: str, rank: int, head_degree: int
) -> RankPlan:
    """All-to-all among neighbours; their group is one rank of a ring, of a single one for `all_to_all`."""
    groups = [_merged(x, head_degree) for x in (layout, kv_layout)]
    inner = _problem(*groups, mask).plan("ring", rank // head_degree)
    return RankPlan(method, rank, layout, kv_layout, mask.rows, inner.forward, inner.backward, inner, head_degree)


def _merged(layout: SequenceLayout, neighbours: int) -> SequenceLayout:
    """What each group of neighbours owns together."""
    ranks = range(0, layout.degree, neighbours)
    return SequenceLayout(
        layout.name, layout.seq_len, tuple(union(sum(layout.ranges[rank : rank + neighbours], ())) for rank in ranks)
    )


def _within(layout: SequenceLayout, group: int, neighbours: int) -> SequenceLayout:
    """Who of one group owns which of the group's rows, counted from 0."""
    shards = layout.ranges[group * neighbours : (group + 1) * neighbours]
    places = Offsets(union(sum(shards, ())))
    return SequenceLayout(layout.name, size(places.ranges), tuple(places.places(shard) for shard in shards))


@lru_cache(maxsize=_KEPT)
def _problem(q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask) -> "_Problem":
    return _Problem(q_layout, kv_layout, mask)


class _Problem:
    """A layout and a mask: who needs what, and the schedules of all ranks, each worked out when it is asked for."""

    def __init__(self, q_layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask) -> None:
        self.degree = q_layout.degree
        self.rows = mask.rows
        self.layouts = q_layout, kv_layout
        self.q_ranges = q_layout.repeated(mask.rows).ranges
        self.kv_ranges = kv_layout.repeated(mask.rows).ranges
        self.bands = mask.bands
        self._band_stops = [band.q_stop for band in mask.bands]
        self._needs: dict[int, Ranges] = {}
        self._held: dict[Range, Ranges] = {}
        self._plans: dict[tuple[str, int], RankPlan] = {}

    def plan(self, method: str, rank: int) -> RankPlan:
        key = method, rank
        if key not in self._plans:
            forward, backward = getattr(self, f"_{method}")(rank)
            self._plans[key] = RankPlan(method, rank, *self.layouts, self.rows, forward, backward)
        return self._plans[key]

    # ---- methods

    def _ring(self, rank: int) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
        local = self._local(rank)
        forward = [self._ring_stage(rank, step, direction=-1) for step in self._steps(-1)]
        backward = [self._ring_stage(rank, step, direction=+1) for step in self._steps(+1)]
        return (local, *forward), (local, *backward)

    def _steps(self, direction: int) -> list[int]:
        """Steps of the ring at which some rank has work: without the idle ones, messages travel under earlier work."""
        ranks, steps = range(self.degree), range(1, self.degree)
        return [s for s in steps if any(self.held(rank, (rank - direction * s) % self.degree) for rank in ranks)]

    def _all_gather(self, rank: int) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
        local = self._local(rank)
        ranks = [r for r in range(self.degree) if r != rank]
        wanted = sum(size(difference(self.needs(r), self.kv_ranges[r])) for r in range(self.degree))
        if not wanted:
            return (local,), (local,)
        everything = (self.degree - 1) * sum(size(ranges) for ranges in self.kv_ranges)
        held = difference(self.needs(rank), self.kv_ranges[rank])
        tiles = self._tiles(rank, held)
        if 2 * wanted >= everything:
            gathered = Stage(held, tiles, collective=True)
            return (local, gathered), (local, gathered)
        there = [Message(owner, rank, self.held(rank, owner)) for owner in ranks]
        there += [Message(rank, target, self.held(target, rank)) for target in ranks]
        messages = _posted(there)
        home = _posted(Message(m.target, m.source, m.ranges) for m in there)
        return (local, Stage(held, tiles, messages)), (local, Stage(held, tiles, messages, home))

    # ---- stages

    def _local(self, rank: int) -> Stage:
        """What a rank owns itself."""
        return Stage(self.kv_ranges[rank], self._tiles(rank, self.kv_ranges[rank]))

    def _ring_stage(self, rank: int, step: int, *, direction: int) -> Stage:
        """Stage `step` of a ring in which K/V move by `direction`; they left their owner `step` hops ago."""
        owner = (rank - direction * step) % self.degree
        held = self.held(rank, owner)
        messages = [*self._arrivals(rank, step, direction), *self._departures(rank, step, direction)]
        home = [] if direction < 0 else [*self._homeward(rank, step), *self._returns(rank, step)]
        return Stage(held, self._tiles(rank, held), _posted(messages), _posted(home))

    def _arrivals(self, rank: int, step: int, direction: int) -> Iterator[Message]:
        """What `rank` receives to work on at `step`."""
        owner = (rank - direction * step) % self.degree
        before = (rank - direction) % self.degree
        yield from self._split(rank, owner, before)

    def _departures(self, rank: int, step: int, direction: int) -> Iterator[Message]:
        """What `rank` sends for the others' `step`: on to its neighbour, and of its own to one with a gap before it."""
        targets = {(rank + direction) % self.degree, (rank + direction * step) % self.degree}
        for target in targets:
            yield from (m for m in self._arrivals(target, step, direction) if m.source == rank)

    def _homeward(self, rank: int, step: int) -> Iterator[Message]:
        """Where the gradients that `rank` has after `step` go: to the next rank if it adds to them, else home."""
        owner = (rank - step) % self.degree
        for message in self._split(rank, owner, (rank + 1) % self.degree):
            yield Message(rank, message.source, message.ranges)

    def _returns(self, rank: int, step: int) -> Iterator[Message]:
        """Gradients that reach `rank` after the others' `step`: from its neighbour, and of its own from any rank."""
        for source in {(rank - 1) % self.degree, (rank + step) % self.degree}:
            yield from (m for m in self._homeward(source, step) if m.target == rank)

    def _split(self, rank: int, owner: int, neighbour: int) -> Iterator[Message]:
        """What `rank` needs of `owner`: from the neighbour as far as it has it too, the rest from the owner."""
        held = self.held(rank, owner)
        if neighbour == owner:
            yield Message(owner, rank, held)
            return
        there = self.held(neighbour, owner)
        yield Message(neighbour, rank, intersection(held, there))
        yield Message(owner, rank, difference(held, there))

    # ---- who needs what

    def needs(self, rank: int) -> Ranges:
        """Keys that some query of `rank` sees."""
        if rank not in self._needs:
            self._needs[rank] = union(b.hull(start, stop) for start, stop, _, b in self._pieces(self.q_ranges[rank]))
        return self._needs[rank]

    def held(self, rank: int, owner: int) -> Ranges:
        """Keys of `owner` that some query of `rank` sees."""
        key = rank, owner
        if key not in self._held:
            self._held[key] = intersection(self.needs(rank), self.kv_ranges[owner])
        return self._held[key]

    def _pieces(self, queries: Ranges) -> Iterator[Piece]:
        """Parts of `queries` that lie in one band, with their place among the queries."""
        place = 0
        for start, stop in queries:
            number = bisect_right(self._band_stops, start)
            while number < len(self.bands) and self.bands[number].q_start < stop:
                band = self.bands[number]
                first, last = max(start, band.q_start), min(stop, band.q_stop)
                yield first, last, place + first - start, band
                number += 1
            place += stop - start

    def _tiles(self, rank: int, held: Ranges) -> tuple[Tile, ...]:
        return tiles_of(self._pieces(self.q_ranges[rank]), held)


def _posted(messages: Iterable[Message]) -> tuple[Message, ...]:
    """In the order of posting: between any two ranks both sides then post alike, so that messages match."""
    return tuple(sorted((m for m in messages if m.ranges), key=lambda m: (m.source, m.target, m.ranges)))

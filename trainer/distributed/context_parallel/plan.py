"""Layout -> schedule of causal ring attention: pure integers, the same on every rank, no torch.

Forward: keys and values move from rank r to r - 1: at stage s rank r works on what rank o = (r + s) mod N owns.
A range reaches only ranks whose queries see it: from the rank before on the way if that one has it, else from its
owner. For causal head_tail that is 25 % less in total than a ring in which everything goes round.

Backward: the other way round, from r to r + 1, farthest first, so that a range is fetched from its owner by the first
rank on the way that sees it, and its gradient (dK, dV) is added up on the way home.

            forward, N = 4: whose K/V rank r holds        backward
            stage   1 2 3                                 stage   1 2 3
            rank 0  1 2 3                                 rank 0  3 2 1
            rank 1  2 3 0                                 rank 1  0 3 2
            rank 2  3 0 1                                 rank 2  1 0 3
            rank 3  0 1 2                                 rank 3  2 1 0

Stage 0 is what a rank owns itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from trainer.distributed.layout import Range, SequenceLayout


@dataclass(frozen=True)
class Message:
    """Rows [start, stop) of the global sequence, from one rank of the group to another."""

    source: int
    target: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Tile:
    """Local query rows times rows of what the stage holds: all pairs, or (a square) those on and below the diagonal."""

    q: Range
    kv: Range
    causal: bool

    def pairs(self) -> int:
        """Number of (query, key) pairs that are computed."""
        rows, columns = self.q[1] - self.q[0], self.kv[1] - self.kv[0]
        return rows * (rows + 1) // 2 if self.causal else rows * columns


@dataclass(frozen=True)
class Stage:
    """One step of one rank.

    held: ranges of K/V that are worked on, one after another in one buffer; messages: what travels before it, for this
    rank's part in it, in the order of posting; home: gradients that travel after it (backward only).
    """

    held: tuple[Range, ...]
    tiles: tuple[Tile, ...]
    messages: tuple[Message, ...] = ()
    home: tuple[Message, ...] = ()

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.held)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. Stage 0 of both is local; messages of stage s + 1 travel under the tiles of stage s."""

    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]

    def rows_sent(self, rank: int) -> dict[str, int]:
        """Rows of K/V (forward, backward) and of dK/dV (home) that this rank sends."""
        return {
            "forward": _sent(rank, (stage.messages for stage in self.forward)),
            "backward": _sent(rank, (stage.messages for stage in self.backward)),
            "home": _sent(rank, (stage.home for stage in self.backward)),
        }


@lru_cache(maxsize=256)
def ring_plan(layout: SequenceLayout, rank: int) -> RankPlan:
    """Schedule of causal attention for one rank of the layout's degree."""
    steps = range(1, layout.degree)
    local = Stage(layout.ranges[rank], _tiles(layout.ranges[rank], layout.ranges[rank]))
    forward = [_stage(layout, rank, step, direction=-1) for step in steps]
    backward = [_stage(layout, rank, step, direction=+1) for step in steps]
    return RankPlan((local, *forward), (local, *backward))


def _stage(layout: SequenceLayout, rank: int, step: int, *, direction: int) -> Stage:
    """Stage `step` of a ring in which K/V move by `direction`; they left their owner `step` hops ago."""
    degree = layout.degree
    owner = (rank - direction * step) % degree
    held = tuple(part for part in layout.ranges[owner] if _sees(layout, rank, part))
    messages = [*_arrivals(layout, rank, step, direction), *_departures(layout, rank, step, direction)]
    home = [] if direction < 0 else [*_homeward(layout, rank, step), *_returns(layout, rank, step)]
    order = sorted(messages, key=_posting_order), sorted(home, key=_posting_order)
    return Stage(held, _tiles(layout.ranges[rank], held), tuple(order[0]), tuple(order[1]))


def _arrivals(layout: SequenceLayout, rank: int, step: int, direction: int) -> Iterator[Message]:
    """What `rank` receives to work on at `step`."""
    owner = (rank - direction * step) % layout.degree
    before = (rank - direction) % layout.degree
    for part in layout.ranges[owner]:
        if _sees(layout, rank, part):
            # At the first step the rank before is the owner itself.
            yield Message(before if _sees(layout, before, part) else owner, rank, *part)


def _departures(layout: SequenceLayout, rank: int, step: int, direction: int) -> Iterator[Message]:
    """What `rank` sends for the others' `step`: on to its neighbour, and of its own to a rank with a gap before it."""
    targets = {(rank + direction) % layout.degree, (rank + direction * step) % layout.degree}
    for target in targets:
        yield from (m for m in _arrivals(layout, target, step, direction) if m.source == rank)


def _homeward(layout: SequenceLayout, rank: int, step: int) -> Iterator[Message]:
    """Where the gradients that `rank` has after `step` go: to the next rank if it adds to them, else to the owner."""
    owner = (rank - step) % layout.degree
    after = (rank + 1) % layout.degree
    for part in layout.ranges[owner]:
        if _sees(layout, rank, part):
            yield Message(rank, after if _sees(layout, after, part) else owner, *part)


def _returns(layout: SequenceLayout, rank: int, step: int) -> Iterator[Message]:
    """Gradients that reach `rank` after the others' `step`: from its neighbour, and of its own from any rank."""
    for source in {(rank - 1) % layout.degree, (rank + step) % layout.degree}:
        yield from (m for m in _homeward(layout, source, step) if m.target == rank)


def _sees(layout: SequenceLayout, rank: int, part: Range) -> bool:
    """Whether some query of `rank` sees some key of `part`."""
    mine = layout.ranges[rank]
    return bool(mine) and mine[-1][1] > part[0]


def _tiles(queries: tuple[Range, ...], keys: tuple[Range, ...]) -> tuple[Tile, ...]:
    """Tiles that cover every pair (query at or after key) of two ascending lists of ranges once.

    Offsets count within the lists laid one after another.
    """
    if queries == keys:  # ascending on both sides: causal in local offsets too
        rows = sum(stop - start for start, stop in queries)
        return (Tile((0, rows), (0, rows), causal=True),) if rows else ()
    tiles = []
    q_offset = 0
    for q in queries:
        kv_offset = 0
        for kv in keys:
            tiles += _pair_tiles(q, kv, q_offset, kv_offset)
            kv_offset += kv[1] - kv[0]
        q_offset += q[1] - q[0]
    return _merged(tiles)


def _pair_tiles(q: Range, kv: Range, q_offset: int, kv_offset: int) -> Iterator[Tile]:
    """Tiles of one range of queries and one of keys: a rectangle before the diagonal, a square on it, one below it."""

    def tile(q_start: int, q_stop: int, kv_start: int, kv_stop: int, causal: bool = False) -> Iterator[Tile]:
        if q_start < q_stop and kv_start < kv_stop:
            rows = (q_start - q[0] + q_offset, q_stop - q[0] + q_offset)
            yield Tile(rows, (kv_start - kv[0] + kv_offset, kv_stop - kv[0] + kv_offset), causal)

    first = max(q[0], kv[0])  # queries before it see nothing here
    corner = min(q[1], kv[1])
    yield from tile(first, q[1], kv[0], min(kv[1], first))
    yield from tile(first, corner, first, corner, causal=True)
    yield from tile(max(corner, first), q[1], max(first, kv[0]), corner)


def _merged(tiles: list[Tile]) -> tuple[Tile, ...]:
    """Full tiles that lie side by side as one: fewer, larger kernels."""
    for side, other in (("kv", "q"), ("q", "kv")):
        merged: list[Tile] = []
        for tile in tiles:
            last = merged[-1] if merged else None
            if (
                last is not None
                and not last.causal
                and not tile.causal
                and getattr(last, other) == getattr(tile, other)
                and getattr(last, side)[1] == getattr(tile, side)[0]
            ):
                joined = {other: getattr(tile, other), side: (getattr(last, side)[0], getattr(tile, side)[1])}
                merged[-1] = Tile(**joined, causal=False)
            else:
                merged.append(tile)
        tiles = merged
    return tuple(tiles)


def _posting_order(message: Message) -> tuple[int, int, int]:
    # Between any two ranks both sides then post in the same order, so that messages match.
    return message.source, message.target, message.start


def _sent(rank: int, stages: Iterable[tuple[Message, ...]]) -> int:
    return sum(message.rows for messages in stages for message in messages if message.source == rank)

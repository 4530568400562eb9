"""Schedules of K/V: at which stage which rows travel, and which tiles are computed. Both directions begin locally.

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

Ring attention: arXiv 2310.01889.
"""

from collections.abc import Iterable, Iterator

from trainer.distributed.context_parallel.planning.needs import Needs
from trainer.distributed.context_parallel.planning.plan import Message, Stage
from trainer.distributed.sharding.ranges import difference, intersection, size

Schedule = tuple[tuple[Stage, ...], tuple[Stage, ...]]
"""Stages of one rank, forward and backward; stage 0 of both is local."""


def ring(needs: Needs, rank: int) -> Schedule:
    """Return the stages in which K/V go round."""
    local = _local(needs, rank)
    forward, backward = (
        [_ring_stage(needs, rank, step, direction) for step in _steps(needs, direction)] for direction in (-1, +1)
    )
    return (local, *forward), (local, *backward)


def all_gather(needs: Needs, rank: int) -> Schedule:
    """Return two stages, of which the second has everything of other ranks."""
    local, degree = _local(needs, rank), needs.degree
    wanted = sum(size(difference(needs.keys(r), needs.kv_ranges[r])) for r in range(degree))
    if not wanted:
        return (local,), (local,)
    everything = (degree - 1) * sum(size(ranges) for ranges in needs.kv_ranges)
    held = difference(needs.keys(rank), needs.kv_ranges[rank])
    tiles = needs.tiles(rank, held)
    if 2 * wanted >= everything:
        gathered = Stage(held, tiles, collective=True)
        return (local, gathered), (local, gathered)
    others = [r for r in range(degree) if r != rank]
    there = [Message(owner, rank, needs.held(rank, owner)) for owner in others]
    there += [Message(rank, target, needs.held(target, rank)) for target in others]
    messages = _posted(there)
    home = _posted(Message(m.target, m.source, m.ranges) for m in there)
    return (local, Stage(held, tiles, messages)), (local, Stage(held, tiles, messages, home))


def _local(needs: Needs, rank: int) -> Stage:
    """What a rank owns itself."""
    return Stage(needs.kv_ranges[rank], needs.tiles(rank, needs.kv_ranges[rank]))


def _posted(messages: Iterable[Message]) -> tuple[Message, ...]:
    """In the order of posting: between any two ranks both sides then post alike, so that messages match."""
    return tuple(sorted((m for m in messages if m.ranges), key=lambda m: (m.source, m.target, m.ranges)))


# ---- the ring


def _steps(needs: Needs, direction: int) -> list[int]:
    """Steps of the ring at which some rank has work: without the idle ones, messages travel under earlier work."""
    ranks, steps = range(needs.degree), range(1, needs.degree)
    return [s for s in steps if any(needs.held(rank, (rank - direction * s) % needs.degree) for rank in ranks)]


def _ring_stage(needs: Needs, rank: int, step: int, direction: int) -> Stage:
    """Stage `step` of a ring in which K/V move by `direction`; they left their owner `step` hops ago."""
    held = needs.held(rank, (rank - direction * step) % needs.degree)
    messages = [*_arrivals(needs, rank, step, direction), *_departures(needs, rank, step, direction)]
    home = [] if direction < 0 else [*_homeward(needs, rank, step), *_returns(needs, rank, step)]
    return Stage(held, needs.tiles(rank, held), _posted(messages), _posted(home))


def _arrivals(needs: Needs, rank: int, step: int, direction: int) -> Iterator[Message]:
    """What `rank` receives to work on at `step`."""
    owner, before = (rank - direction * step) % needs.degree, (rank - direction) % needs.degree
    yield from _split(needs, rank, owner, before)


def _departures(needs: Needs, rank: int, step: int, direction: int) -> Iterator[Message]:
    """What `rank` sends for the others' `step`: on to its neighbour, and of its own to one with a gap before it."""
    for target in {(rank + direction) % needs.degree, (rank + direction * step) % needs.degree}:
        yield from (m for m in _arrivals(needs, target, step, direction) if m.source == rank)


def _homeward(needs: Needs, rank: int, step: int) -> Iterator[Message]:
    """Where the gradients that `rank` has after `step` go: to the next rank if it adds to them, else home."""
    owner = (rank - step) % needs.degree
    for message in _split(needs, rank, owner, (rank + 1) % needs.degree):
        yield Message(rank, message.source, message.ranges)


def _returns(needs: Needs, rank: int, step: int) -> Iterator[Message]:
    """Gradients that reach `rank` after the others' `step`: from its neighbour, and of its own from any rank."""
    for source in {(rank - 1) % needs.degree, (rank + step) % needs.degree}:
        yield from (m for m in _homeward(needs, source, step) if m.target == rank)


def _split(needs: Needs, rank: int, owner: int, neighbour: int) -> Iterator[Message]:
    """What `rank` needs of `owner`: from the neighbour as far as it has it too, the rest from the owner."""
    held = needs.held(rank, owner)
    if neighbour == owner:
        yield Message(owner, rank, held)
        return
    there = needs.held(neighbour, owner)
    yield Message(neighbour, rank, intersection(held, there))
    yield Message(owner, rank, difference(held, there))

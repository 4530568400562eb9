"""Schedules: the rows of K/V that are sent at each stage, and the tiles that are computed. Stage 0 is local.

ring          Forward: K/V move from rank r to r - 1; at stage s rank r has the rows that rank (r + s) mod N owns. A row
              comes from the previous rank of the ring if that rank needs it too, else from its owner. For causal
              head_tail this sends 25 % less in total than a ring in which every row goes round.
              Backward: K/V move from rank r to r + 1, from the farthest owner first. The first rank of the ring that
              needs a row gets it from its owner. Its gradient (dK, dV) is added up on the way home.

                  forward, N = 4: whose K/V rank r holds        backward
                  stage   1 2 3                                 stage   1 2 3
                  rank 0  1 2 3                                 rank 0  3 2 1
                  rank 1  2 3 0                                 rank 1  0 3 2
                  rank 2  3 0 1                                 rank 2  1 0 3
                  rank 3  0 1 2                                 rank 3  2 1 0

all_gather    Stage 1 has all needed rows of other ranks. They come by all-gather, and gradients return by
              reduce-scatter. If less than half of all rows is needed, messages from the owners replace both.

chunks        A "rank" is a chunk of a sequence that one device computes chunk after chunk. Each earlier chunk is a
              stage: the stage reads the rows that this chunk sees, and adds to their gradients. Stage 0 lists the rows
              that later chunks read.

Ring attention: arXiv 2310.01889.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from longshard.context.planning.plan import Message, Stage
from longshard.context.planning.tiles import Needs
from longshard.sharding.ranges import difference, intersection, size

Schedule = tuple[tuple[Stage, ...], tuple[Stage, ...]]
"""The stages of one rank, forward and backward; stage 0 of both is local."""


def ring(needs: Needs, rank: int) -> Schedule:
    """Return the stages in which K/V go round.

    Args:
        needs: The keys that each rank needs.
        rank: The rank.
    """
    local = _local(needs, rank)
    forward, backward = (
        [_ring_stage(needs, rank, step, direction) for step in _steps(needs, direction)]
        for direction in (-1, +1)
    )
    return (local, *forward), (local, *backward)


def all_gather(needs: Needs, rank: int) -> Schedule:
    """Return two stages; the second has all needed rows of other ranks. If no rank needs any, return stage 0 only.

    The second stage is a collective if ranks need half of all other ranks' rows or more. Else it has messages.

    Args:
        needs: The keys that each rank needs.
        rank: The rank.
    """
    local = _local(needs, rank)
    degree = needs.degree
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


def chunks(needs: Needs, chunk: int) -> Schedule:
    """Return the forward and backward stages of a chunk, the nearest earlier chunk first.

    Nothing is sent: `messages` name rows that a stage reads, and `home`, in the backward, rows to add gradients to.

    Args:
        needs: The keys that each chunk needs.
        chunk: The number of the chunk.
    """

    def stage(owner: int, backward: bool) -> Stage:
        held = needs.held(chunk, owner)
        home = (Message(chunk, owner, held),) if backward else ()
        return Stage(held, needs.tiles(chunk, held), (Message(owner, chunk, held),), home)

    later = _posted(
        Message(chunk, reader, needs.held(reader, chunk))
        for reader in range(chunk + 1, needs.degree)
    )
    local = _local(needs, chunk, later)
    owners = [owner for owner in reversed(range(chunk)) if needs.held(chunk, owner)]
    forward, backward = ([stage(owner, way) for owner in owners] for way in (False, True))
    return (local, *forward), (local, *backward)


def _local(needs: Needs, rank: int, messages: tuple[Message, ...] = ()) -> Stage:
    held = needs.kv_ranges[rank]
    return Stage(held, needs.tiles(rank, held), messages)


def _posted(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Sort messages in the order of posting, which is the same on both sides, so that sends and receives match."""
    return tuple(
        sorted((m for m in messages if m.ranges), key=lambda m: (m.source, m.target, m.ranges))
    )


# ---- the ring


@lru_cache(maxsize=4)
def _steps(needs: Needs, direction: int) -> tuple[int, ...]:
    """Return the steps of the ring at which some rank has work. At other steps no work would hide the messages.

    Cached, because the steps are the same for every rank, and `auto` and `lct plan` plan several ranks.
    """
    ranks = range(needs.degree)
    steps = range(1, needs.degree)
    return tuple(
        s
        for s in steps
        if any(needs.held(rank, (rank - direction * s) % needs.degree) for rank in ranks)
    )


def _ring_stage(needs: Needs, rank: int, step: int, direction: int) -> Stage:
    """Return the stage of a ring at which K/V, which move by `direction`, have left their owner `step` hops ago."""
    n = needs.degree

    def to(ranks: set[int], way: int) -> Iterator[Message]:
        """Yield the messages to some ranks, from the previous rank on the way or from the owners of the rows."""
        for r in {each % n for each in ranks}:
            owner = (r - direction * step) % n
            via = (r - way) % n
            wanted = needs.held(r, owner)
            there = needs.held(via, owner) if via != owner else ()
            yield Message(via, r, intersection(wanted, there))
            yield Message(owner, r, difference(wanted, there))

    held = needs.held(rank, (rank - direction * step) % n)
    # This rank receives, sends held rows to the next rank, and sends its own rows to a rank after a gap.
    messages = to({rank, rank + direction, rank + direction * step}, direction)
    # A gradient goes to the next rank if that rank adds to it, else home.
    home = to({rank, rank - 1, rank + step}, -1) if direction > 0 else ()
    returns = (Message(m.target, m.source, m.ranges) for m in home)
    rank_messages = (
        _posted(m for m in each if rank in (m.source, m.target)) for each in (messages, returns)
    )
    return Stage(held, needs.tiles(rank, held), *rank_messages)

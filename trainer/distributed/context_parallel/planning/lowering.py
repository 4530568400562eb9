"""A plan's tiles as calls of a kernel. Torch-free.

A tile that a kernel cannot compute in one call is cut into several. `capabilities.py` refuses kernels for which no cut
helps.

    CAUSAL, more keys than queries    FULL over the first keys, CAUSAL over a square at the end
    BI_CAUSAL, INV_CAUSAL             a dense mask over short pieces of queries, FULL and CAUSAL elsewhere
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TypeVar

from trainer.distributed.context_parallel.planning.capabilities import Capabilities
from trainer.distributed.context_parallel.planning.mask import Relation
from trainer.distributed.context_parallel.planning.plan import RankPlan, Stage
from trainer.distributed.context_parallel.planning.tiles import Tile
from trainer.distributed.sharding.ranges import Range, Ranges, intersection, union


@dataclass(frozen=True)
class Call:
    """One tile for the kernel. fresh: no earlier call of the plan had any of its queries, so no result is merged."""

    q: Range
    kv: Range
    relation: Relation
    fresh: bool


TileOrCall = TypeVar("TileOrCall", Tile, Call)


@dataclass(frozen=True)
class LoweredPlan:
    """A plan with the calls of each stage."""

    plan: RankPlan
    forward: tuple[tuple[Call, ...], ...]
    backward: tuple[tuple[Call, ...], ...]


@lru_cache(maxsize=16)
def lower(plan: RankPlan, capabilities: Capabilities) -> LoweredPlan:
    """Return the plan with its tiles as calls of a kernel with these capabilities; cached, as plans are."""
    return LoweredPlan(plan, *(tuple(_calls(stages, capabilities)) for stages in (plan.forward, plan.backward)))


def _calls(stages: tuple[Stage, ...], capabilities: Capabilities) -> Iterator[tuple[Call, ...]]:
    touched: Ranges = ()
    for stage in stages:
        calls = []
        parts = chain.from_iterable(split(tile, capabilities) for tile in stage.tiles)
        # The results of a launch come together, so that its calls stand together: `fresh` depends on the order.
        for part in chain.from_iterable(launches(parts)) if capabilities.many else parts:
            calls.append(Call(part.q, part.kv, part.relation, fresh=not intersection((part.q,), touched)))
            touched = union((*touched, part.q))
        yield tuple(calls)


def launches(tiles: Iterable[TileOrCall]) -> list[tuple[TileOrCall, ...]]:
    """Return the tiles of each launch of a kernel that computes many tiles at once, by their queries."""
    groups: dict[tuple[Relation, int], list[TileOrCall]] = {}
    for tile in tiles:
        groups.setdefault(launch_of(tile), []).append(tile)
    return [tuple(sorted(group, key=lambda tile: (tile.q, tile.kv))) for group in groups.values()]


def launch_of(tile: Tile | Call) -> tuple[Relation, int]:
    """Return the relation of the launch that a tile belongs to, and for windows how many keys more than queries it has.

    A launch has one window size, counted from the last key: tiles with windows of another width are another launch. A
    single query that sees all its keys is CAUSAL too, as are the documents around a document of one token.
    """
    if tile.relation is Relation.FULL and tile.q[1] - tile.q[0] == 1:
        return Relation.CAUSAL, 0
    return tile.relation, extra_keys(tile) if tile.relation.lower else 0


def extra_keys(tile: Tile | Call) -> int:
    """Return how many keys a tile has more than queries."""
    return tile.kv[1] - tile.kv[0] - (tile.q[1] - tile.q[0])


def split(tile: Tile, capabilities: Capabilities) -> Iterator[Tile]:
    """Yield tiles that the kernel can compute, with the same pairs."""
    (kv_start, kv_stop), extra = tile.kv, extra_keys(tile)
    if tile.relation is Relation.CAUSAL and extra and not capabilities.bottom_right:
        yield Tile(tile.q, (kv_start, kv_start + extra))
        yield Tile(tile.q, (kv_start + extra, kv_stop), Relation.CAUSAL)
    elif tile.relation.lower and not capabilities.bands:
        yield from _pieces(tile, extra)
    else:
        yield tile


def _pieces(tile: Tile, extra: int) -> Iterator[Tile]:
    """Yield a BI_CAUSAL or INV_CAUSAL tile over pieces of queries, with a mask only where a diagonal runs."""
    (q_start, q_stop), (kv_start, kv_stop) = tile.q, tile.kv
    rows = max(_FEWEST_ROWS, min(_MOST_ROWS, extra + 1))
    for start in range(q_start, q_stop, rows):
        q = start, min(start + rows, q_stop)
        count = q[1] - start
        first = kv_start + start - q_start  # the first key of the first query
        last = kv_stop if tile.relation is Relation.INV_CAUSAL else first + extra + count
        if tile.relation is Relation.BI_CAUSAL and extra < count:
            yield Tile(q, (first, last), Relation.BI_CAUSAL)  # narrower than the piece: both diagonals at once
            continue
        yield Tile(q, (first, first + count), Relation.INV_CAUSAL)
        middle = first + count, last - count if tile.relation is Relation.BI_CAUSAL else last
        if middle[0] < middle[1]:
            yield Tile(q, middle)
        if tile.relation is Relation.BI_CAUSAL:
            yield Tile(q, (last - count, last), Relation.CAUSAL)


# A mask costs memory and time for each of its pairs, and each call has a fixed cost.
_FEWEST_ROWS, _MOST_ROWS = 64, 512

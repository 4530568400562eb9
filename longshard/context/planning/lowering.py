"""Turn the tiles of a plan into calls of a kernel. Torch-free.

A tile that a kernel cannot compute in one call is cut into several. If no cut helps, `capabilities.py` has refused
the kernel before.

    CAUSAL, more keys than queries    FULL over the first keys, CAUSAL over a square at the end
    FULL, a CAUSAL square, if large   a part with lengths that recur, and the remaining parts
    BI_CAUSAL, INV_CAUSAL             a dense mask over short pieces of queries, FULL and CAUSAL elsewhere; without
                                      masks FULL over each query's keys
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from longshard.context.planning.capabilities import Capabilities
from longshard.context.planning.mask import Relation
from longshard.context.planning.plan import RankPlan, Stage
from longshard.context.planning.tiles import Tile
from longshard.sharding.ranges import Spans, intersection, size, union


@dataclass(frozen=True)
class Call(Tile):
    """One tile for the kernel.

    Attributes:
        fresh: No earlier call of the plan had any of its queries, so that its result is written, not merged.
        fresh_keys: No earlier call of the stage had any of its keys, so that their gradients are written, not added.
    """

    fresh: bool = False
    fresh_keys: bool = False


class Run(NamedTuple):
    """Adjacent rows of some calls.

    Attributes:
        rows: The rows.
        places: The places of these rows among the rows of all calls, one call after another.
        fresh: Whether the calls are fresh for these rows.
    """

    rows: slice
    places: slice
    fresh: bool


@dataclass(frozen=True, eq=False)
class Launch:
    """Calls that a kernel computes together: all of one relation, or a single call.

    Attributes:
        calls: The calls.
    """

    calls: tuple[Call, ...]

    @cached_property
    def kind(self) -> tuple[Relation, int]:
        """The relation, and for windows by how much the keys of a call outnumber its queries."""
        return _kind(
            next(
                (call for call in self.calls if call.relation is not Relation.FULL),
                self.calls[0],
            )
        )

    @cached_property
    def q(self) -> Spans:
        """The queries of each call."""
        return tuple(call.q for call in self.calls)

    @cached_property
    def kv(self) -> Spans:
        """The keys of each call."""
        return tuple(call.kv for call in self.calls)

    @cached_property
    def rows(self) -> tuple[int, int]:
        """The number of queries and the number of keys of all calls."""
        return size(self.q), size(self.kv)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The largest number of queries and the largest number of keys of a call."""
        both = self.q, self.kv
        return tuple(max(stop - start for start, stop in spans) for spans in both)

    @cached_property
    def q_runs(self) -> tuple[Run, ...]:
        """The runs of the queries."""
        return tuple(_runs(self.q, [call.fresh for call in self.calls]))

    @cached_property
    def kv_runs(self) -> tuple[Run, ...]:
        """The runs of the keys."""
        return tuple(_runs(self.kv, [call.fresh_keys for call in self.calls]))

    def is_everything(self, queries: int, keys: int) -> bool:
        """Return whether the rows are all queries and all keys, each once and in their order.

        Args:
            queries: Number of all queries.
            keys: Number of all keys.
        """
        both = (self.q_runs, queries), (self.kv_runs, keys)
        return all(len(runs) == 1 and runs[0].rows == slice(0, count) for runs, count in both)


Launches = tuple[Launch, ...]
"""The launches of a stage, one after another."""


@dataclass(frozen=True, eq=False)
class LoweredPlan:
    """A plan with the launches of each stage.

    Attributes:
        plan: The plan.
        forward: The launches of each stage of the forward.
        backward: The launches of each stage of the backward.
    """

    plan: RankPlan
    forward: tuple[Launches, ...]
    backward: tuple[Launches, ...]

    @cached_property
    def merges_outputs(self) -> bool:
        """Whether some query gets the outputs of several calls."""
        return adds_up(self.forward)

    @cached_property
    def adds_gradients(self) -> bool:
        """Whether some query gets the gradients of several calls."""
        return adds_up(self.backward)


@lru_cache(maxsize=16)
def lower(plan: RankPlan, capabilities: Capabilities) -> LoweredPlan:
    """Return the plan with its tiles as calls of a kernel; cached, as plans are.

    Args:
        plan: The plan.
        capabilities: What the kernel can do.
    """
    return LoweredPlan(
        plan,
        *(tuple(_launches(stages, capabilities)) for stages in (plan.forward, plan.backward)),
    )


def _launches(stages: tuple[Stage, ...], capabilities: Capabilities) -> Iterator[Launches]:
    touched = ()
    for stage in stages:
        launches = []
        touched_keys = ()
        parts = [part for tile in stage.tiles for part in split(tile, capabilities)]
        for group in _groups(parts, capabilities):
            calls = []
            for part in group:
                fresh = (
                    not intersection((x,), old)
                    for x, old in ((part.q, touched), (part.kv, touched_keys))
                )
                calls.append(Call(part.q, part.kv, part.relation, *fresh))
                touched = union((*touched, part.q))
                touched_keys = union((*touched_keys, part.kv))
            launches.append(Launch(tuple(calls)))
        yield tuple(launches)


def _groups(parts: list[Tile], capabilities: Capabilities) -> list[tuple[Tile, ...]]:
    """Return the tiles, grouped by launch."""
    if not capabilities.many:
        return [(part,) for part in parts]
    large = [part for part in parts if is_large(part, capabilities)]
    return [
        *((part,) for part in large),
        *batch_calls(part for part in parts if not is_large(part, capabilities)),
    ]


def is_large(tile: Tile, capabilities: Capabilities) -> bool:
    """Return whether a tile is a launch of its own: a large FULL tile, or a large CAUSAL tile that is square.

    Args:
        tile: The tile.
        capabilities: What the kernel can do.
    """
    has_form = tile.relation is Relation.FULL or (
        tile.relation is Relation.CAUSAL and not _extra_keys(tile)
    )
    return 0 < capabilities.large <= shortest_side(tile) and has_form


def shortest_side(tile: Tile) -> int:
    """Return the number of queries or the number of keys of a tile, whichever is less.

    Args:
        tile: The tile.
    """
    return min(size((tile.q,)), size((tile.kv,)))


def fresh_rows(runs: Iterable[Run]) -> int:
    """Return the number of rows in fresh runs; no two fresh runs share a row.

    Args:
        runs: The runs.
    """
    return sum(run.rows.stop - run.rows.start for run in runs if run.fresh)


def adds_up(stages: Iterable[Launches]) -> bool:
    """Return whether some query gets the results of several calls, which are then added up in float32.

    Args:
        stages: The launches of each stage.
    """
    launches = chain.from_iterable(stages)
    return any(not run.fresh for launch in launches for run in launch.q_runs)


def batch_calls(tiles: Iterable[Tile]) -> list[tuple[Tile, ...]]:
    """Return the tiles grouped by launch, ordered by their queries, for a kernel that computes many tiles at once.

    A single query that sees all its keys is grouped with the CAUSAL tiles, where the documents around it are.

    Args:
        tiles: The tiles.
    """
    groups = {}
    for tile in tiles:
        single = tile.relation is Relation.FULL and tile.q[1] - tile.q[0] == 1
        groups.setdefault((Relation.CAUSAL, 0) if single else _kind(tile), []).append(tile)
    return [
        tuple(sorted(group, key=lambda tile: (tile.q, tile.kv))) for group in groups.values()
    ]


def _kind(tile: Tile) -> tuple[Relation, int]:
    """Return the relation of the launch of a tile, and for windows by how much its keys outnumber its queries.

    A launch has one window size, counted from the last key: tiles with windows of another width are another launch.
    """
    return tile.relation, _extra_keys(tile) if tile.relation.lower else 0


def _extra_keys(tile: Tile) -> int:
    """Return by how much the keys of a tile outnumber its queries."""
    return tile.kv[1] - tile.kv[0] - (tile.q[1] - tile.q[0])


def _runs(spans: Spans, fresh: list[bool]) -> Iterator[Run]:
    """Yield the longest runs of adjacent spans that are equally fresh; see `Call` for `fresh`."""
    first = place = 0
    for number, (_, stop) in enumerate(spans, 1):
        if number == len(spans) or spans[number][0] != stop or fresh[number] != fresh[first]:
            rows = slice(spans[first][0], stop)
            length = rows.stop - rows.start
            yield Run(rows, slice(place, place + length), fresh[first])
            first = number
            place += length


def split(tile: Tile, capabilities: Capabilities) -> Iterator[Tile]:
    """Yield tiles that the kernel can compute. Together they have the pairs of queries and keys of `tile`, each once.

    Args:
        tile: The tile.
        capabilities: What the kernel can do.
    """
    kv_start, kv_stop = tile.kv
    extra = _extra_keys(tile)
    if 0 < capabilities.large <= shortest_side(tile) and not tile.relation.lower:
        yield from _large_parts(tile, capabilities)
    elif tile.relation is Relation.CAUSAL and extra and not capabilities.bottom_right:
        yield Tile(tile.q, (kv_start, kv_start + extra))
        yield Tile(tile.q, (kv_start + extra, kv_stop), Relation.CAUSAL)
    elif tile.relation.lower and not (capabilities.bands or capabilities.masks):
        # Without a window this happens, too: adjacent documents of one token are BI_CAUSAL. Take each query alone.
        for first, query in enumerate(range(*tile.q), kv_start):
            last = kv_stop if tile.relation is Relation.INV_CAUSAL else first + extra + 1
            yield Tile((query, query + 1), (first, last))
    elif tile.relation.lower and not capabilities.bands:
        yield from _pieces(tile, extra)
    else:
        yield tile


def _large_parts(tile: Tile, capabilities: Capabilities) -> Iterator[Tile]:
    """Yield a FULL or CAUSAL tile of many queries as large parts with lengths that recur, and the remaining parts.

        FULL                        CAUSAL, with more keys than queries
        +--------------+------+     +------+---------------+------+
        | large, FULL  | FULL |     | FULL | large, CAUSAL |      |
        +--------------+------+     +------+---------------+------+
        | FULL                |     | CAUSAL                      |
        +---------------------+     +-----------------------------+

    The keys before the square of a CAUSAL tile are cut again: a large part, and the remaining keys. A remaining FULL
    part that is large itself, as of 300,000 tokens, is cut again. A remaining CAUSAL part stays one call, so that its
    results are not added up.
    """
    q_start, q_stop = tile.q
    kv_start, kv_stop = tile.kv
    middle = q_start + recurring_length(q_stop - q_start)
    rows = q_start, middle
    if tile.relation is Relation.CAUSAL:
        diagonal = kv_start + _extra_keys(tile)
        yield Tile(rows, (diagonal, diagonal + middle - q_start), Relation.CAUSAL)
        kv_stop = diagonal
    if kv_stop - kv_start >= capabilities.large:
        edge = kv_start + recurring_length(kv_stop - kv_start)
        yield Tile(rows, (kv_start, edge))
        kv_start = edge
    if kv_start < kv_stop:
        yield from split(Tile(rows, (kv_start, kv_stop)), capabilities)
    if middle < q_stop:
        last = Tile((middle, q_stop), tile.kv, tile.relation)
        yield from (last,) if tile.relation is Relation.CAUSAL else split(last, capabilities)


def recurring_length(length: int) -> int:
    """Return the largest number up to `length` that is five binary digits followed by zeros.

    There are 16 such numbers between two powers of two.

    Args:
        length: The length.
    """
    step = 1 << max(length.bit_length() - 5, 0)
    return length // step * step


def _pieces(tile: Tile, extra: int) -> Iterator[Tile]:
    """Yield a BI_CAUSAL or INV_CAUSAL tile over pieces of queries, with a mask only on the diagonals.

    A piece has a masked tile on each diagonal, and a FULL tile over the keys between or after them. If the band is
    narrower than the piece, the piece stays one BI_CAUSAL tile.

    Args:
        tile: The tile.
        extra: By how much the keys of the tile outnumber its queries.
    """
    q_start, q_stop = tile.q
    kv_start, kv_stop = tile.kv
    is_band = tile.relation is Relation.BI_CAUSAL
    rows = max(_FEWEST_ROWS, min(_MOST_ROWS, extra + 1))
    for start in range(q_start, q_stop, rows):
        q = start, min(start + rows, q_stop)
        count = q[1] - start
        first = kv_start + start - q_start  # the first key of the first query
        last = first + extra + count if is_band else kv_stop
        if is_band and extra < count:
            # The band is narrower than the piece, so that both diagonals cross it.
            yield Tile(q, (first, last), Relation.BI_CAUSAL)
            continue
        yield Tile(q, (first, first + count), Relation.INV_CAUSAL)
        middle = first + count, last - count if is_band else last
        if middle[0] < middle[1]:
            yield Tile(q, middle)
        if is_band:
            yield Tile(q, (last - count, last), Relation.CAUSAL)


# A mask costs memory and time for each of its pairs, and each call has a fixed cost.
_FEWEST_ROWS, _MOST_ROWS = 64, 512

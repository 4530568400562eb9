"""The methods of context parallelism, one record each, and the plans that they make. No other module names a method.

ring          K/V go round the ranks; each rank has all heads of its rows (`schedules.py`).
all_gather    Each rank gets K/V of all ranks at once.
all_to_all    Each rank has some of the heads and the whole sequence (Ulysses, arXiv 2309.14509).
hybrid        All-to-all in head groups of A consecutive ranks, and a ring over the groups. Rank i * A + a is number a
              of group i; it has its share of the heads, and all rows of its group (USP, arXiv 2405.07719).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from longshard.context.planning.mask import Mask
from longshard.context.planning.plan import RankPlan
from longshard.context.planning.schedules import Schedule, all_gather, chunks, ring
from longshard.context.planning.tiles import Needs
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import union

# A plan of ten thousand documents takes megabytes, and the next batch has other documents.
_KEPT = 16


@dataclass(frozen=True)
class Method:
    """One way to spread attention over ranks.

    Attributes:
        schedule: Makes the stages in which K/V are sent between ranks, or between head groups.
        divides_heads: Whether ranks divide the heads.
        two_level: Whether only the ranks of a head group divide the heads, so that the mesh is 2-D, (ring, heads).
        passes: Whether key/value heads can be sent a few at a time.
        query_passes: Whether the query heads of one key/value head can be sent a few at a time.
        overlaps: Whether messages are sent while tiles are computed.
        when_short: The method that `auto` takes if shards are too short for this overlap.
    """

    schedule: Callable[[Needs, int], Schedule]
    divides_heads: bool = False
    two_level: bool = False
    passes: bool = True
    query_passes: bool = False
    overlaps: bool = False
    when_short: str = ""

    @property
    def balancer(self) -> str:
        """The load balancer of `auto`. A rank that attends over the whole sequence needs no balance."""
        return "contiguous" if self.divides_heads and not self.two_level else "head_tail"

    def head_degree(self, degree: int, hybrid_degrees: tuple[int, int] | None = None) -> int:
        """Return the number of ranks that divide the heads; 1 means that each rank has all heads.

        Args:
            degree: Number of all ranks.
            hybrid_degrees: For `hybrid`, the size of a head group and the number of groups; None if absent.
        """
        if not self.divides_heads:
            return 1
        return (hybrid_degrees or (1,))[0] if self.two_level else degree

    def ways(self, degree: int, heads: int) -> Iterator[tuple[int, int] | None]:
        """Yield the hybrid degrees with which the method can divide the heads: (all-to-all ranks, ring ranks).

        A method without hybrid degrees yields None once. If the method cannot divide the heads, nothing is yielded.

        Args:
            degree: Number of ranks.
            heads: Number of query heads.
        """
        if self.two_level:
            sizes = (a for a in range(2, degree) if degree % a == 0 and heads % a == 0)
            yield from ((a, degree // a) for a in sizes)
        elif heads % self.head_degree(degree) == 0:
            yield None


METHODS: dict[str, Method] = {
    "ring": Method(ring, passes=False, overlaps=True, when_short="all_gather"),
    "all_gather": Method(all_gather),
    "all_to_all": Method(ring, divides_heads=True, query_passes=True),
    "hybrid": Method(ring, divides_heads=True, two_level=True),
}


def make_plan(
    layout: AxisLayout,
    mask: Mask,
    method: str,
    rank: int,
    *,
    kv_layout: AxisLayout | None = None,
    head_degree: int | None = None,
) -> RankPlan:
    """Return the plan of a rank; cached.

    Args:
        layout: The layout of the queries.
        mask: The mask.
        method: A name of `METHODS`.
        rank: The rank.
        kv_layout: The layout of the keys; None means `layout`.
        head_degree: The size of a head group. `hybrid` needs it, and it must divide the degree. For another method,
            None means the size that the method has.

    Raises:
        ValueError: The method is unknown, or the mask has another length. Or the head degree of `hybrid` is missing or
            does not divide the degree.
    """
    kv_layout = kv_layout or layout
    if method not in METHODS:
        raise ValueError(f"method {method!r} is none of {', '.join(map(repr, METHODS))}")
    if (mask.q_len, mask.kv_len) != (layout.length, kv_layout.length):
        raise ValueError(
            f"a mask of {mask.q_len} queries and {mask.kv_len} keys does not fit sequences of {layout.length} and "
            f"{kv_layout.length} tokens; make it for their lengths"
        )
    if METHODS[method].two_level and (not head_degree or layout.degree % head_degree):
        raise ValueError(
            f"a head degree of {head_degree} must divide the {layout.degree} ranks of a hybrid plan"
        )
    return _plan(
        layout,
        kv_layout,
        mask,
        method,
        rank,
        head_degree or METHODS[method].head_degree(layout.degree),
    )


_needs = lru_cache(maxsize=_KEPT)(Needs)


@lru_cache(maxsize=_KEPT)
def _plan(
    layout: AxisLayout,
    kv_layout: AxisLayout,
    mask: Mask,
    method: str,
    rank: int,
    head_degree: int,
) -> RankPlan:
    # A head group is one rank of the schedule.
    needs = _needs(*(_group_layout(x, head_degree) for x in (layout, kv_layout)), mask)
    group = rank // head_degree
    stages = METHODS[method].schedule(needs, group)
    inner = None
    if head_degree > 1:
        inner = RankPlan("ring", group, *needs.layouts, needs.sequences, *stages)
    return RankPlan(
        method, rank, layout, kv_layout, needs.sequences, *stages, inner, head_degree
    )


@lru_cache(maxsize=_KEPT)
def chunk_plan(layout: AxisLayout, mask: Mask, chunk: int) -> RankPlan:
    """Return the plan of a chunk of sequences that one device computes chunk after chunk; cached.

    Args:
        layout: The layout of all chunks, contiguous.
        mask: The mask of the sequences.
        chunk: The number of the chunk.
    """
    needs = _needs(layout, layout, mask)
    return RankPlan("chunks", chunk, layout, layout, needs.sequences, *chunks(needs, chunk))


def _group_layout(layout: AxisLayout, ranks: int) -> AxisLayout:
    """Return the layout over groups of `ranks` consecutive ranks."""
    if ranks == 1:
        return layout
    groups = (
        union(sum(layout.ranges[i : i + ranks], ())) for i in range(0, layout.degree, ranks)
    )
    return AxisLayout(layout.name, layout.length, tuple(groups))

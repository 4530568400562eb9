"""Random problems for plans: layouts, masks, and who sees what, in numbers instead of tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from hypothesis import strategies as st

from longshard.context.planning.balance import LOAD_BALANCERS, build_layout
from longshard.context.planning.mask import (
    Mask,
    Relation,
    by_sequence,
    causal,
    documents,
    full,
    sliding_window,
)
from longshard.context.planning.methods import make_plan
from longshard.context.planning.plan import RankPlan
from longshard.context.planning.tiles import Tile
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Ranges, union
from tests.masks import dense

DIRECTIONS = ("forward", "backward")
staged = st.sampled_from(["ring", "all_gather"])


@dataclass(frozen=True)
class Problem:
    """Owners of queries and keys, and visible pairs; queries and keys of all rows are in one line."""

    layout: AxisLayout
    kv_layout: AxisLayout
    mask: Mask

    @property
    def degree(self) -> int:
        return self.layout.degree

    def plans(self, method: str, **options: int) -> list[RankPlan]:
        return [
            make_plan(self.layout, self.mask, method, rank, kv_layout=self.kv_layout, **options)
            for rank in range(self.degree)
        ]

    @cached_property
    def queries(self) -> list[np.ndarray]:
        """Queries of each rank, in its order."""
        return [line_of(self.layout, rank, self.mask.sequences) for rank in range(self.degree)]

    @cached_property
    def keys(self) -> list[np.ndarray]:
        return [line_of(self.kv_layout, rank, self.mask.sequences) for rank in range(self.degree)]

    @cached_property
    def visible(self) -> np.ndarray:
        """(rows * q_len, rows * kv_len) bool: no query sees a key of another row."""
        mask = self.mask
        visible = np.zeros((mask.sequences, mask.q_len, mask.sequences, mask.kv_len), dtype=bool)
        for row, pairs in enumerate(dense(mask)):
            visible[row, :, row] = pairs
        return visible.reshape(mask.sequences * mask.q_len, mask.sequences * mask.kv_len)

    @cached_property
    def views(self) -> np.ndarray:
        """(keys, degree): how many queries of each rank see a key."""
        return np.stack([self.visible[queries].sum(axis=0) for queries in self.queries], axis=1)


def line_of(layout: AxisLayout, rank: int, rows: int) -> np.ndarray:
    return np.concatenate([layout.indices(rank) + row * layout.length for row in range(rows)])


def numbers(ranges: Ranges) -> np.ndarray:
    return np.array([number for start, stop in ranges for number in range(start, stop)], dtype=np.int64)


def pairs_of(tile: Tile) -> np.ndarray:
    """Return the visible pairs of a tile, (queries, keys) bool, by the definition of its relation."""
    n, m = tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]
    assert n > 0
    assert m > 0
    assert m >= n or tile.relation is Relation.FULL
    i, j = np.arange(n)[:, None], np.arange(m)[None, :]
    pairs = {
        Relation.FULL: (i >= 0) & (j >= 0),
        Relation.CAUSAL: j <= i + m - n,
        Relation.BI_CAUSAL: (i <= j) & (j <= i + m - n),
        Relation.INV_CAUSAL: j >= i,
    }[tile.relation]
    assert pairs.sum() == tile.pairs
    return pairs


@st.composite
def layouts(draw: Callable, seq_len: int, degree: int) -> AxisLayout:
    """One of the known ones, or blocks assigned at random; with few tokens some ranks have none."""
    kind = draw(st.sampled_from([*LOAD_BALANCERS, "balanced by random documents", "random"]))
    if kind in LOAD_BALANCERS:
        return build_layout(kind, seq_len, degree)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    ends = np.sort(rng.integers(0, seq_len + 1, 3))
    if kind == "balanced by random documents":
        packed = documents(np.diff([0, *ends, seq_len]).tolist(), is_causal=True)
        return build_layout("balanced", seq_len, degree, mask=packed)
    cuts = [0, *sorted(rng.integers(0, seq_len + 1, 2 * degree)), seq_len]
    owners = rng.integers(0, degree, len(cuts) - 1)
    pieces = list(zip(map(int, cuts), map(int, cuts[1:]), owners, strict=False))
    ranges = tuple(union((start, stop) for start, stop, owner in pieces if owner == rank) for rank in range(degree))
    return AxisLayout("random", seq_len, ranges)


@st.composite
def single_masks(draw: Callable, q_len: int, kv_len: int) -> Mask:
    kind = draw(st.sampled_from(["full", "causal", "window", "documents", "both", "nothing"]))
    if kind == "full":
        return full(q_len, kv_len)
    if kind == "causal":
        return causal(q_len, kv_len)
    if kind == "nothing":
        return Mask(q_len, kv_len, ())
    window = sliding_window(q_len, draw(st.integers(1, 20)), kv_len, is_causal=draw(st.booleans()))
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=3, max_size=3))) for n in (q_len, kv_len)]
    lengths = [np.diff([0, *e, n]).tolist() for e, n in zip(ends, (q_len, kv_len), strict=True)]
    packed = documents(*lengths, is_causal=draw(st.booleans()))
    return {"window": window, "documents": packed, "both": window & packed}[kind]


@st.composite
def problems(draw: Callable) -> Problem:
    q_len, degree = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(1, 40)))
    layout = draw(layouts(q_len, degree))
    kv_layout = layout if kv_len == q_len and draw(st.booleans()) else draw(layouts(kv_len, degree))
    rows = draw(st.sampled_from([1, 1, 2, 3]))
    mask = by_sequence([draw(single_masks(q_len, kv_len)) for _ in range(rows)])
    return Problem(layout, kv_layout, mask)


def rows_sent(plan: RankPlan) -> dict[str, int]:
    """Return how many rows of K/V (forward, backward) and dK/dV (home) a rank sends, without exchanges of heads."""
    plan = plan.inner or plan
    return {
        "forward": sum(plan.rows_for(stage, stage.messages)[0] for stage in plan.forward),
        "backward": sum(plan.rows_for(stage, stage.messages)[0] for stage in plan.backward),
        "home": sum(plan.rows_for(stage, stage.home)[0] for stage in plan.backward),
    }

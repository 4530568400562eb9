"""Laws of plans: every visible pair is computed once and no other, and a plan is made fast, once, or refused."""

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshard.context.planning.balance import LOAD_BALANCERS, build_layout
from longshard.context.planning.mask import Mask, causal, documents
from longshard.context.planning.methods import METHODS, make_plan
from longshard.context.planning.plan import RankPlan
from longshard.sharding.layout import AxisLayout, head_tail
from longshard.sharding.ranges import union
from tests.unit.plan_problems import DIRECTIONS, Problem, numbers, pairs_of, problems, rows_sent


@given(problems(), st.sampled_from([*METHODS]), st.sampled_from(DIRECTIONS), st.integers(1, 6))
def test_every_visible_pair_is_computed_once_and_no_other(
    problem: Problem, method: str, direction: str, head_degree: int
):
    """By each rank of a head group."""
    options = {}
    if method == "hybrid":
        head_degree = math.gcd(head_degree, problem.degree)
        options = {"head_degree": head_degree}
    else:
        head_degree = problem.degree if method == "all_to_all" else 1
    computed = [np.zeros(problem.visible.shape, dtype=np.int64) for _ in range(head_degree)]
    for plan in problem.plans(method, **options):
        group, place = divmod(plan.rank, head_degree)
        pairs = np.zeros_like(computed[place])
        own_queries = np.concatenate(problem.queries[group * head_degree : (group + 1) * head_degree])
        own_queries = np.sort(own_queries) if head_degree > 1 else own_queries
        for stage in getattr(plan, direction):
            held = numbers(stage.held)
            assert stage.rows == len(held)
            for tile in stage.tiles:
                pairs[np.ix_(own_queries[slice(*tile.q)], held[slice(*tile.kv)])] += pairs_of(tile)
        assert plan.pairs == pairs.sum()
        computed[place] += pairs
    for pairs in computed:
        assert (pairs == problem.visible).all()


@settings(deadline=None)
@given(problems(), st.integers(1, 6))
def test_a_hybrid_is_a_ring_of_groups(problem: Problem, head_degree: int):
    """The messages and the tiles; and the rows of each rank have their place among the rows of its head group."""
    head_degree = math.gcd(head_degree, problem.degree)
    groups = [
        AxisLayout("groups", x.length, tuple(union(sum(part, ())) for part in batched(x.ranges, head_degree)))
        for x in (problem.layout, problem.kv_layout)
    ]
    ring = Problem(*groups, problem.mask).plans("ring")
    for plan in problem.plans("hybrid", head_degree=head_degree):
        group, place = divmod(plan.rank, head_degree)
        assert (plan.forward, plan.backward) == (ring[group].forward, ring[group].backward)
        assert rows_sent(plan) == rows_sent(ring[group])
        for layout, whole, near in zip((plan.q_layout, plan.kv_layout), groups, plan.head_group_layouts, strict=True):
            assert near.degree == head_degree
            whole, layout = (x.repeated(plan.sequences) for x in (whole, layout))
            assert whole.indices(group)[near.indices(place)].tolist() == layout.indices(plan.rank).tolist()


def batched(items: Sequence, count: int) -> Iterator[Sequence]:
    return (items[start : start + count] for start in range(0, len(items), count))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_stage_of_head_tail_is_one_kernel_in_the_forward(degree: int):
    layout = head_tail(2 * degree * 16, degree)
    for rank in range(degree):
        stages = make_plan(layout, causal(layout.length), "ring", rank).forward
        assert [len(stage.tiles) for stage in stages] == [1] * degree
        assert len({stage.pairs for stage in stages[1:]}) == 1  # computation hides communication


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_computes_everything_and_sends_nothing(method: str):
    plan = make_plan(head_tail(10, 1), causal(10), method, 0, **({"head_degree": 1} if method == "hybrid" else {}))
    assert [len(stages) for stages in (plan.forward, plan.backward)] == [1, 1]
    assert plan.pairs == 55
    assert rows_sent(plan) == {"forward": 0, "backward": 0, "home": 0}


# ---- making a plan


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LOAD_BALANCERS)
def test_a_million_tokens_are_planned_at_once(method: str, name: str):
    seq_len, degree, count = 1 << 20, 64, 10_000
    ends = np.sort(np.random.default_rng(0).choice(np.arange(1, seq_len), count - 1, replace=False))
    mask = causal(seq_len) & documents(np.diff([0, *ends, seq_len]).tolist())
    assert len(mask.bands) == count
    layout = build_layout(name, seq_len, degree, mask=mask)
    start = time.process_time()
    plan = make_plan(layout, mask, method, degree // 2, **({"head_degree": 8} if method == "hybrid" else {}))
    assert time.process_time() - start < 2  # of the CPU: other work on the machine does not count
    assert plan.pairs > 0


def test_a_plan_is_made_once():
    def made() -> RankPlan:
        mask = causal(24) & documents([5, 19])
        return make_plan(build_layout("balanced", 24, 3, mask=mask), mask, "ring", 1)

    assert made() is made()


@pytest.mark.parametrize(
    ("mask", "method", "sentence"),
    [
        (causal(8), "rng", "method 'rng' is none of 'ring', 'all_gather', 'all_to_all'"),
        (causal(9), "ring", "a mask of 9 queries and 9 keys does not fit sequences of 8 and 8 tokens"),
        (causal(8, 9), "ring", "a mask of 8 queries and 9 keys does not fit"),
    ],
)
def test_what_makes_no_plan_is_told_in_one_sentence(mask: Mask, method: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        make_plan(head_tail(8, 2), mask, method, 0)


@pytest.mark.parametrize("head_degree", [None, 0, 3])
def test_a_hybrid_needs_a_head_degree_that_divides(head_degree: int | None):
    with pytest.raises(ValueError, match=f"a head degree of {head_degree} must divide the 4 ranks of a hybrid plan"):
        make_plan(head_tail(8, 4), causal(8), "hybrid", 0, head_degree=head_degree)

"""Costs of plans against walks over the plan, and against the formulas of the literature."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from longshard.context.planning.balance import LOAD_BALANCERS, build_layout
from longshard.context.planning.cost import AttentionShape, Cost, attention_cost
from longshard.context.planning.heads import HeadShare, check_heads
from longshard.context.planning.mask import (
    Mask,
    by_sequence,
    causal,
    documents,
    full,
    sliding_window,
)
from longshard.context.planning.methods import METHODS, make_plan
from longshard.context.planning.plan import RankPlan, Stage
from longshard.sharding.layout import AxisLayout, contiguous, head_tail
from longshard.sharding.ranges import aligned, union
from tests.masks import dense

DIRECTIONS = ("forward", "backward")
KINDS = {"forward": ("qkv", "out"), "backward": ("qkv_dout", "dqkv")}


def cost_of_all(
    layout: AxisLayout,
    mask: Mask,
    method: str,
    shape: AttentionShape,
    direction: str,
    heads_per_pass: int = 0,
    kv_layout: AxisLayout | None = None,
    head_degree: int = 1,
) -> list[tuple[RankPlan, Cost]]:
    options = {"head_degree": head_degree} if method == "hybrid" else {}
    plans = [make_plan(layout, mask, method, rank, kv_layout=kv_layout, **options) for rank in range(layout.degree)]
    return [(plan, attention_cost(plan, shape, direction, heads_per_pass)) for plan in plans]


Problem = tuple[AxisLayout, AxisLayout, Mask, AttentionShape]
"""Who owns which queries, and which keys."""


@st.composite
def problems(draw: Callable) -> Problem:
    q_len, degree = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(1, 40)))
    layouts = [build_layout(draw(st.sampled_from(LOAD_BALANCERS)), length, degree) for length in (q_len, kv_len)]
    masks = [
        causal(q_len, kv_len),
        full(q_len, kv_len),
        sliding_window(q_len, 5, kv_len),
        documents(*([n // 3, n - n // 3] for n in (q_len, kv_len)), is_causal=True),
        by_sequence([causal(q_len, kv_len), sliding_window(q_len, 2, kv_len)]),
    ]
    kv_heads, group = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    shape = AttentionShape(
        draw(st.integers(1, 3)), kv_heads * group, kv_heads, draw(st.integers(1, 9)), draw(st.sampled_from([2, 4, 8]))
    )
    return *layouts, draw(st.sampled_from(masks)), shape


def widths(mask: Mask, shape: AttentionShape) -> int:
    """Sequences of the batch for each row of the plan: rows that the plan tells apart lie in its line already."""
    return shape.batch if mask.sequences == 1 else 1


# ---- FLOPs


@given(problems(), st.sampled_from([*METHODS]), st.sampled_from(DIRECTIONS), st.integers(1, 6))
def test_all_ranks_together_do_the_work_of_one(problem: Problem, method: str, direction: str, head_degree: int):
    """Two products for each visible pair forward, five backward, whatever the method."""
    layout, kv_layout, mask, shape = problem
    heads = shape.heads * layout.degree  # so that all-to-all divides them
    shape = AttentionShape(shape.batch, heads, heads, shape.head_dim, shape.itemsize)
    per_pair = {"forward": 4, "backward": 10}[direction] * shape.head_dim * heads * widths(mask, shape)
    head_degree = math.gcd(head_degree, layout.degree)
    costs = cost_of_all(layout, mask, method, shape, direction, 0, kv_layout, head_degree)
    assert sum(cost.flops for _, cost in costs) == per_pair * dense(mask).sum()
    for plan, cost in costs:
        if method in ("ring", "all_gather"):
            assert cost.flops == per_pair * dense(mask)[:, layout.indices(plan.rank)].sum()
        else:  # the ranks of a head group do the same, for other heads
            first = 0 if method == "all_to_all" else plan.rank - plan.rank % head_degree
            assert cost.flops == costs[first][1].flops


# ---- ring and all-gather


def walked(plan: RankPlan, shape: AttentionShape, direction: str, width: int, passes: list[int]) -> Counter[str]:
    """Bytes that a rank sends, message by message."""
    sent: Counter[str] = Counter()
    longest = plan.sequences * max(plan.kv_layout.local_length(rank) for rank in range(plan.degree))
    for heads in passes:
        # K and V, or dK and dV
        row = {"kv": 2 * width * heads * shape.head_dim * shape.itemsize}
        row["dkv"] = 2 * width * heads * shape.head_dim * max(4, shape.itemsize)
        for stage in getattr(plan, direction):
            if stage.collective:
                sent["kv"] += (plan.degree - 1) * longest * row["kv"]
                sent["dkv"] += (plan.degree - 1) * longest * row["dkv"] * (direction == "backward")
            for kind, messages in (("kv", stage.messages), ("dkv", stage.home)):
                rows = (b - a for m in messages if m.source == plan.rank for a, b in m.ranges)
                sent[kind] += sum(rows) * row[kind]
    return +sent


@given(problems(), st.sampled_from(["ring", "all_gather"]), st.sampled_from(DIRECTIONS), st.integers(0, 3))
def test_staged_bytes_are_those_of_the_messages(problem: Problem, method: str, direction: str, heads_per_pass: int):
    layout, kv_layout, mask, shape = problem
    heads_per_pass = 0 if method == "ring" else heads_per_pass
    heads = list(range(shape.kv_heads))
    size = heads_per_pass or shape.kv_heads
    passes = [len(heads[start : start + size]) for start in heads[::size]]
    assert sum(passes) == shape.kv_heads
    for plan, cost in cost_of_all(layout, mask, method, shape, direction, heads_per_pass, kv_layout):
        assert +cost.bytes_sent == walked(plan, shape, direction, widths(mask, shape), passes)
        stages: tuple[Stage, ...] = getattr(plan, direction)
        assert cost.calls["kv"] == len(passes) * sum(bool(s.messages) or s.collective for s in stages)
        home = sum(bool(s.home) or s.collective for s in stages) if direction == "backward" else 0
        assert cost.calls["dkv"] == len(passes) * home
        assert set(cost.calls) <= {"kv", "dkv"}


@given(problems(), st.sampled_from(DIRECTIONS), st.integers(0, 2))
def test_what_is_sent_is_received(problem: Problem, direction: str, heads_per_pass: int):
    layout, kv_layout, mask, shape = problem
    for name, method in METHODS.items():
        for hybrid in method.ways(layout.degree, shape.heads):
            heads = method.head_degree(layout.degree, hybrid)
            passes = heads_per_pass if method.passes else 0
            costs = cost_of_all(layout, mask, name, shape, direction, passes, kv_layout, head_degree=heads)
            sent, received = Counter(), Counter()
            for plan, cost in costs:
                sent.update(cost.bytes_sent)
                received.update(cost.bytes_received)
                if name == "ring" and direction == "forward":  # each rank gets once what it holds of others
                    row = 2 * widths(mask, shape) * shape.kv_heads * shape.head_dim * shape.itemsize
                    assert cost.bytes_received["kv"] == row * sum(stage.rows for stage in plan.forward[1:])
            assert sent == received


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_causal_head_tail_sends_what_the_documentation_says(degree: int, itemsize: int):
    layout, shape = head_tail(degree * 64, degree), AttentionShape(1, 8, 2, 16, itemsize)
    everything = 2 * layout.length * 2 * 16 * (degree - 1)
    for direction in DIRECTIONS:
        total = Counter()
        for _, cost in cost_of_all(layout, causal(layout.length), "ring", shape, direction):
            total.update(cost.bytes_sent)
        assert total["kv"] == 0.75 * everything * itemsize
        assert total["dkv"] == 0.75 * everything * max(itemsize, 4) * (direction == "backward")


@pytest.mark.parametrize(("direction", "bytes_each"), [("forward", 2), ("backward", 2 + 4)])
@pytest.mark.parametrize("degree", [3, 4, 8, 16])
def test_a_ring_needs_two_buffers_whatever_the_degree(degree: int, direction: str, bytes_each: int):
    """One that is worked on and one that arrives, of 1 / N of the sequence; twice the tokens take twice as much."""
    shape = AttentionShape(3, 8, 2, 16, 2)
    for shard in (32, 64):
        layout = contiguous(degree * shard, degree)
        for _, cost in cost_of_all(layout, full(layout.length), "ring", shape, direction):
            assert cost.workspace == 2 * shard * (2 * 3 * 2 * 16) * bytes_each
        # Under a causal mask what a stage holds is less for some ranks, and never more.
        layout = head_tail(degree * shard, degree)
        costs = cost_of_all(layout, causal(layout.length), "ring", shape, direction)
        assert max(cost.workspace for _, cost in costs) == 2 * shard * (2 * 3 * 2 * 16) * bytes_each


def test_two_ranks_need_one_buffer_and_one_rank_none():
    shape = AttentionShape(1, 4, 2, 16, 2)
    for degree, buffers in ((1, 0), (2, 1)):
        layout = contiguous(degree * 32, degree)
        for _, cost in cost_of_all(layout, full(layout.length), "ring", shape, "forward"):
            assert cost.workspace == buffers * 32 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(("heads_per_pass", "alive"), [(0, 4), (1, 2), (2, 4), (3, 4)])
def test_all_gather_needs_memory_for_the_heads_of_two_passes(heads_per_pass: int, alive: int):
    """A rank holds the rows of all ranks, and a copy of the rows it sees from other ranks."""
    degree, shard = 4, 32
    layout, shape = contiguous(degree * shard, degree), AttentionShape(1, 8, 4, 16, 2)
    row = 2 * 16 * 2
    costs = cost_of_all(layout, full(layout.length), "all_gather", shape, "forward", heads_per_pass)
    for _, cost in costs:
        assert cost.workspace == alive * row * (degree * shard + (degree - 1) * shard)


# ---- all-to-all


@pytest.mark.parametrize("degree", [2, 4, 8, 16, 32])
def test_all_to_all_sends_the_known_formula(degree: int):
    """E s D (2 H + 2 K') (N - 1) / N with K' replicated heads; the log-sum-exp comes on top.

    It takes 4 bytes a head, and at least 16 a row: a rank of 32 has one head.
    """
    heads, kv_heads, head_dim, itemsize, shard = 32, 8, 16, 2, 64
    layout, shape = head_tail(degree * shard, degree), AttentionShape(1, heads, kv_heads, head_dim, itemsize)
    replicated = math.lcm(kv_heads, degree)
    rows = itemsize * shard * head_dim
    moved = (degree - 1) / degree
    lse = shard * degree * max(4 * heads // degree, 16)
    for _, cost in cost_of_all(layout, causal(layout.length), "all_to_all", shape, "forward"):
        assert cost.bytes_sent["qkv"] == rows * (heads + 2 * replicated) * moved
        assert cost.bytes_sent["out"] == (rows * heads + lse) * moved
        without_lse = cost.bytes_sent.total() - lse * moved
        assert without_lse == rows * (2 * heads + 2 * replicated) * moved
        assert cost.calls == {"qkv": 1, "out": 1}
    for _, cost in cost_of_all(layout, causal(layout.length), "all_to_all", shape, "backward"):
        # q, out and their gradients' cotangent again; gradients of copied heads are added up in float32
        there = rows * (3 * heads + 2 * replicated) + lse
        back = rows * heads + rows * 2 * replicated * (2 if replicated > kv_heads else 1)
        assert cost.bytes_sent == {"qkv_dout": there * moved, "dqkv": back * moved}


def pieces(lengths: tuple[int, int], shape: AttentionShape, width: int, heads: tuple[int, int], names: str) -> int:
    """Bytes of one piece, each row of each tensor aligned.

    mine: rows of queries and of keys; heads: how many of them are sent. names: q and k in their own type, L for a
    log-sum-exp, S for a gradient that is summed.
    """
    rows, wide = {"q": 0, "L": 0, "k": 1, "S": 1}, max(4, shape.itemsize)
    element = {"q": shape.head_dim * shape.itemsize, "k": shape.head_dim * shape.itemsize}
    element |= {"L": wide, "S": shape.head_dim * wide}
    return sum(lengths[rows[name]] * math.ceil(heads[rows[name]] * width * element[name] / 16) * 16 for name in names)


@given(
    problems(),
    st.sampled_from([method for method in METHODS if method not in ("ring", "all_gather")]),
    st.sampled_from(DIRECTIONS),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_exchanged_bytes_are_those_of_the_pieces(
    problem: Problem, method: str, direction: str, heads_per_pass: int, head_degree: int
):
    """Between the two exchanges of `hybrid`, the messages of a ring count too."""
    layout, kv_layout, mask, shape = problem
    head_degree = layout.degree if method == "all_to_all" else math.gcd(head_degree, layout.degree)
    shape = AttentionShape(shape.batch, shape.heads * head_degree, shape.kv_heads, shape.head_dim, shape.itemsize)
    replicated = math.lcm(shape.kv_heads, head_degree)
    per_rank, group = replicated // head_degree, shape.heads // replicated
    summed = "S" if replicated > shape.kv_heads else "k"
    there, back = {"forward": ("qkk", "qL"), "backward": ("qqqLkk", "q" + 2 * summed)}[direction]
    lengths = [
        tuple(x.local_length(rank) * mask.sequences for x in (layout, kv_layout)) for rank in range(layout.degree)
    ]
    passes = [min(heads_per_pass or per_rank, per_rank - i) for i in range(0, per_rank, heads_per_pass or per_rank)]
    width = widths(mask, shape)
    for plan, cost in cost_of_all(layout, mask, method, shape, direction, heads_per_pass, kv_layout, head_degree):
        first = plan.rank - plan.rank % head_degree
        sent: Counter[str] = Counter()
        for kv_heads in passes:
            heads = kv_heads * group, kv_heads
            for rank in set(range(first, first + head_degree)) - {plan.rank}:
                sent[KINDS[direction][0]] += pieces(lengths[plan.rank], shape, width, heads, there)
                sent[KINDS[direction][1]] += pieces(lengths[rank], shape, width, heads, back)
        if method == "hybrid":
            groups = [groups_of(x, head_degree) for x in (layout, kv_layout)]
            ring = make_plan(groups[0], mask, "ring", plan.rank // head_degree, kv_layout=groups[1])
            sent += walked(ring, shape, direction, width, passes)
            stages: tuple[Stage, ...] = getattr(ring, direction)
            assert cost.calls["kv"] == len(passes) * sum(bool(stage.messages) for stage in stages)
            assert cost.calls["dkv"] == len(passes) * sum(bool(stage.home) for stage in stages)
        assert +cost.bytes_sent == +sent
        assert [cost.calls[kind] for kind in KINDS[direction]] == [len(passes) * (head_degree > 1)] * 2


def groups_of(layout: AxisLayout, head_degree: int) -> AxisLayout:
    """Return the layout of head groups: each group owns the tokens of its ranks."""
    groups = (union(sum(layout.ranges[r : r + head_degree], ())) for r in range(0, layout.degree, head_degree))
    return AxisLayout("groups", layout.length, tuple(groups))


def test_all_to_all_with_fewer_heads_at_a_time_needs_less_memory():
    layout, shape = head_tail(128, 2), AttentionShape(1, 16, 8, 16, 2)
    spaces = [
        [cost.workspace for _, cost in cost_of_all(layout, causal(128), "all_to_all", shape, "forward", heads)]
        for heads in (0, 2, 1)
    ]
    # q, k, v of a rank's heads: all rows as they arrive, and in the order of the sequence
    assert spaces[0] == [(128 + 128) * 16 * 2 * (8 + 4 + 4)] * 2
    assert spaces[1] == spaces[0]  # two passes are alive together
    assert spaces[2] == [space // 2 for space in spaces[0]]


# ---- heads


def key_heads(share: HeadShare, rank: int) -> list[int]:
    """Return the key/value heads of a rank in a pass; a head is repeated if the rank has several copies of it."""
    first = rank * share.per_rank
    return [head // share.copies for head in range(first + share.start, first + share.stop)]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))
def test_keys_are_sent_once_however_many_queries_a_pass_has(kv_heads: int, group: int, degree: int, query_heads: int):
    """Each query head has one pass, and so do the keys of a head and their gradients."""
    heads = kv_heads * group
    assume(heads % degree == 0)
    whole = HeadShare.passes(heads, kv_heads, degree)[0]
    passes = HeadShare.passes(heads, kv_heads, degree, query_heads=query_heads)
    assert len(passes) == whole.per_rank * -(-whole.group // query_heads)
    for rank in range(degree):
        places = Counter(query for share in passes for query in list(range(heads))[share.queries(rank)])
        assert places == Counter(list(range(heads))[whole.queries(rank)])
        for has in ("has_keys", "has_gradients"):
            assert [head for share in passes if getattr(share, has) for head in key_heads(share, rank)] == key_heads(
                whole, rank
            )
        for share in passes:
            (met,) = key_heads(share, rank)
            queries = list(range(heads))[share.queries(rank)]
            assert 0 < len(queries) <= query_heads
            assert {query // group for query in queries} == {met}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_passes_of_query_heads_send_the_bytes_of_one_pass(direction: str):
    """Bytes of q, k, v and their gradients are equal; rows of the log-sum-exp are padded to 16 bytes."""
    layout, shape = contiguous(128, 2), AttentionShape(1, 16, 2, 16, 2)
    (_, whole), *_ = cost_of_all(layout, causal(128), "all_to_all", shape, direction)
    for query_heads in (1, 2, 4):
        plan = make_plan(layout, causal(128), "all_to_all", 0)
        cost = attention_cost(plan, shape, direction, query_heads=query_heads)
        passes, padding = 8 // query_heads, max(16 - 4 * query_heads, 0) * 64 * 8 // query_heads
        to_heads, to_rows = KINDS[direction]
        assert cost.calls == {to_heads: passes, to_rows: passes}
        has_lse = {"forward": to_rows, "backward": to_heads}[direction]
        wanted = whole.bytes_sent + Counter({has_lse: padding})
        assert +cost.bytes_sent == +wanted
        assert cost.workspace <= whole.workspace  # two passes are alive together


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(0, 4))
def test_every_head_has_one_place(kv_heads: int, group: int, degree: int, heads_per_pass: int):
    heads = kv_heads * group
    assume(heads % degree == 0)
    places: Counter[int] = Counter()
    for share in HeadShare.passes(heads, kv_heads, degree, heads_per_pass):
        assert not heads_per_pass or share.stop - share.start <= heads_per_pass
        for rank in range(degree):
            queries = list(range(heads))[share.queries(rank)]
            places.update(queries)
            # Each query head meets the key/value head of its group.
            met = [head for head in key_heads(share, rank) for _ in range(share.group)]
            assert met == [query // group for query in queries]
    assert places == dict.fromkeys(range(heads), 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (12, 4), (6, 3), (5, 1)])
def test_every_degree_that_divides_the_query_heads_works_and_no_other(heads: int, kv_heads: int):
    for degree in range(1, heads + 3):
        if heads % degree == 0:
            assert HeadShare.passes(heads, kv_heads, degree)[0].group >= 1
        else:
            with pytest.raises(ValueError, match=f"over {degree} ranks cannot divide {heads} query heads"):
                HeadShare.passes(heads, kv_heads, degree)


def test_the_degrees_that_work_are_listed():
    with pytest.raises(ValueError, match=r"degrees that work: 1, 2, 3, 4, 6, 12$"):
        check_heads(12, 5)


@given(st.integers(0, 200))
def test_pieces_are_aligned(size: int):
    assert aligned(size) % 16 == 0
    assert 0 <= aligned(size) - size < 16

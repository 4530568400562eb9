"""Laws of schedules, by running them on numbers instead of tensors: every layout, mask and method."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.masks import dense
from trainer.distributed.context_parallel.planning.mask import (
    Mask,
    Relation,
    by_sequence,
    causal,
    documents,
    full,
    sliding_window,
)
from trainer.distributed.context_parallel.planning.methods import METHODS, make_plan
from trainer.distributed.context_parallel.planning.plan import Message, RankPlan, Stage
from trainer.distributed.context_parallel.planning.tiles import Tile
from trainer.distributed.sharding.layout import LOAD_BALANCERS, AxisLayout, build_layout, contiguous, head_tail
from trainer.distributed.sharding.ranges import Ranges, union

DIRECTIONS = ("forward", "backward")
staged = st.sampled_from(["ring", "all_gather"])


@dataclass(frozen=True)
class Problem:
    """Who owns what, and who sees what; queries and keys of all rows in one line."""

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
    """(queries, keys) bool, by what its relation means."""
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


# ---- problems


@st.composite
def layouts(draw: Callable, seq_len: int, degree: int) -> AxisLayout:
    """One of the known ones, or blocks dealt at random; with few tokens some ranks have none."""
    kind = draw(st.sampled_from([*LOAD_BALANCERS, "balanced by random work", "random"]))
    if kind in LOAD_BALANCERS:
        return build_layout(kind, seq_len, degree)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    if kind == "balanced by random work":
        return build_layout("balanced", seq_len, degree, work=rng.integers(0, 50, seq_len))
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


# ---- what is computed


@settings(deadline=None, max_examples=300)
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
        mine = np.concatenate(problem.queries[group * head_degree : (group + 1) * head_degree])
        mine = np.sort(mine) if head_degree > 1 else mine
        for stage in getattr(plan, direction):
            held = numbers(stage.held)
            assert stage.rows == len(held)
            for tile in stage.tiles:
                pairs[np.ix_(mine[slice(*tile.q)], held[slice(*tile.kv)])] += pairs_of(tile)
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
        for layout, whole, near in zip(plan.layouts, groups, plan.head_group_layouts, strict=True):
            assert near.degree == head_degree
            whole, layout = (x.repeated(plan.sequences) for x in (whole, layout))
            assert whole.indices(group)[near.indices(place)].tolist() == layout.indices(plan.rank).tolist()


def batched(items: Sequence, count: int) -> Iterator[Sequence]:
    return (items[start : start + count] for start in range(0, len(items), count))


# ---- what travels


def traffic(stages: list[Stage], of: Callable[[Stage], tuple[Message, ...]]) -> list[Message]:
    """What is sent at one stage, if all ranks agree on it.

    What a rank sends is what its peer expects; between two ranks both post it at the same place, at most once each way.
    """
    sent, expected, posted = [], [], defaultdict(dict)
    for rank, stage in enumerate(stages):
        for message in of(stage):
            assert message.source != message.target
            assert rank in (message.source, message.target)
            assert message.rows == len(numbers(message.ranges)) > 0
            (sent if message.source == rank else expected).append(message)
            pair = frozenset((message.source, message.target))
            posted[pair].setdefault(rank, []).append((message.source, message.target))
    assert sorted(sent, key=repr) == sorted(expected, key=repr)
    assert len({(m.source, m.target) for m in sent}) == len(sent)
    assert all(len(orders) == 2 and len({tuple(order) for order in orders.values()}) == 1 for orders in posted.values())
    return sent


def steps(problem: Problem, method: str, direction: str) -> list[list[Stage]]:
    """Stages of all ranks, one list a step; all ranks have as many, and say alike whether it is a collective."""
    by_rank = [getattr(plan, direction) for plan in problem.plans(method)]
    for step in zip(*by_rank, strict=True):
        assert len({stage.collective for stage in step}) == 1
        assert not step[0].collective or not any(stage.messages or stage.home for stage in step)
    return [list(step) for step in zip(*by_rank, strict=True)]


@settings(deadline=None, max_examples=300)
@given(problems(), staged, st.sampled_from(DIRECTIONS))
def test_what_is_held_has_arrived_and_nothing_invisible_was_sent(problem: Problem, method: str, direction: str):
    own = [set(keys.tolist()) for keys in problem.keys]
    have, plans = own, problem.plans(method)
    for number, stages in enumerate(steps(problem, method, direction)):
        messages = traffic(stages, lambda stage: stage.messages)
        if not number:
            assert not messages
            assert [set(numbers(stage.held).tolist()) for stage in stages] == own
            continue
        arrived: list[list[int]] = [[] for _ in own]
        for message in messages:
            rows = numbers(message.ranges)
            # All from the sender's own, or all from what it works on at the stage before: a buffer that is alive.
            is_own = plans[message.source].owns(message.ranges[0])
            assert set(rows.tolist()) <= (own if is_own else have)[message.source]
            assert (problem.views[rows, message.target] > 0).all()
            arrived[message.target] += rows.tolist()
        for rank, stage in enumerate(stages):
            if stage.collective:
                assert set(numbers(stage.held).tolist()) == set(np.flatnonzero(problem.views[:, rank])) - own[rank]
            else:
                assert sorted(arrived[rank]) == numbers(stage.held).tolist()
        have = [set(numbers(stage.held).tolist()) for stage in stages]


@settings(deadline=None, max_examples=300)
@given(problems(), staged)
def test_every_gradient_comes_home_once(problem: Problem, method: str):
    """Each rank adds to a key's gradient once for each query that sees it; the owner ends up with the whole."""
    owner_of = np.empty(len(problem.views), dtype=np.int64)
    for rank, keys in enumerate(problem.keys):
        owner_of[keys] = rank
    home = np.zeros_like(problem.views)  # at the owner of each key: contributions of each rank
    plans, under_way = problem.plans(method), list[tuple[Message, np.ndarray]]()
    for number, stages in enumerate(steps(problem, method, "backward")):
        gradients = []  # of what each rank holds: all keys in a line, contributions of each rank
        for rank, stage in enumerate(stages):
            gradient = np.zeros_like(problem.views)
            held = numbers(stage.held)
            for tile in stage.tiles:
                gradient[held[slice(*tile.kv)], rank] += pairs_of(tile).sum(axis=0)
            gradients.append(gradient)
        for message, content in under_way:
            rows = numbers(message.ranges)
            if plans[message.target].owns(message.ranges[0]):
                assert (owner_of[rows] == message.target).all()
                home[rows] += content
            else:  # added where they are worked on at this stage
                assert set(rows.tolist()) <= set(numbers(stages[message.target].held).tolist())
                gradients[message.target][rows] += content
        messages = traffic(stages, lambda stage: stage.home)
        if not number:
            assert not messages
            home += sum(gradients)
        elif stages[0].collective:
            home += sum(gradients)
        under_way = [(m, gradients[m.source][numbers(m.ranges)].copy()) for m in messages]
        for rank, stage in enumerate(stages):
            if number and not stage.collective:  # all of it leaves, each row for one rank
                left = [row for m in messages if m.source == rank for row in numbers(m.ranges).tolist()]
                assert sorted(left) == numbers(stage.held).tolist()
    for message, content in under_way:
        assert (owner_of[numbers(message.ranges)] == message.target).all()
        home[numbers(message.ranges)] += content
    assert (home == problem.views).all()


@settings(deadline=None, max_examples=300)
@given(problems())
def test_whole_shards_are_gathered_unless_the_mask_leaves_less_than_half(problem: Problem):
    wanted = sum(
        int((problem.views[:, rank] > 0).sum() - (problem.views[problem.keys[rank], rank] > 0).sum())
        for rank in range(problem.degree)
    )
    everything = (problem.degree - 1) * len(problem.views)
    for plan in problem.plans("all_gather"):
        for stages in (plan.forward, plan.backward):
            assert len(stages) == 1 + (wanted > 0)
            if wanted:
                assert stages[1].collective == (wanted >= everything / 2)
    sent = Counter()
    for plan in problem.plans("all_gather"):
        sent.update(rows_sent(plan))
    if wanted:
        longest = max(len(keys) for keys in problem.keys)
        gathered = problem.degree * (problem.degree - 1) * longest
        assert set(sent.values()) == {gathered if wanted >= everything / 2 else wanted}
    else:
        assert not any(sent.values())


# ---- order of posting

Batch = tuple[str, tuple[Message, ...] | None]
"""Communicator, and what one call on it transfers; None: a collective."""


def program(plan: RankPlan, direction: str, passes: int) -> Iterator[tuple[str, Batch]]:
    """What a rank posts and waits for, in the order in which the stages are run."""
    stages = getattr(plan, direction)
    line = [stages[0], *stages[1:] * passes]
    homeward: Batch | None = None
    for number, stage in enumerate(line):
        following = line[number + 1] if number + 1 < len(line) else None
        incoming = following and ("kv", None if following.collective else following.messages)
        if incoming and incoming[1] != ():
            yield "post", incoming
        if direction == "backward":
            if homeward:
                yield "wait", homeward
            homeward = "dkv", None if stage.collective else stage.home
            homeward = None if homeward[1] == () else homeward
            if homeward:
                yield "post", homeward
        if incoming and incoming[1] != ():
            yield "wait", incoming
    if homeward:
        yield "wait", homeward


def run_to_the_end(programs: list[list[tuple[str, Batch]]]) -> bool:
    """Whether ranks that wait, and communicators that do one call after the other without buffers, all get through.

    A transfer is done when both sides have reached the call that holds it; a call is done when all its transfers are.
    """
    queues = {(rank, name): [] for rank in range(len(programs)) for name in ("kv", "dkv")}
    done: list[list[Batch]] = [[] for _ in programs]
    todo = [list(p) for p in programs]
    left: dict[tuple[int, str], Counter] = {}
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(todo):
            while line:
                kind, batch = line[0]
                if kind == "post":
                    queues[rank, batch[0]].append(batch)
                elif not any(batch is b for b in done[rank]):
                    break
                line.pop(0)
                moved = True
        for name in ("kv", "dkv"):
            heads = {rank: queues[rank, name][0] for rank in range(len(todo)) if queues[rank, name]}
            for rank, (_, messages) in heads.items():
                if messages is not None:
                    left.setdefault((rank, name), Counter(messages))
            if len(heads) == len(todo) and all(messages is None for _, messages in heads.values()):
                finished = list(heads)
            else:
                for rank in heads:
                    for message in +left.get((rank, name), Counter()):
                        peer = message.target if message.source == rank else message.source
                        if left.get((peer, name), {}).get(message, 0) > 0:
                            left[rank, name][message] -= 1
                            left[peer, name][message] -= 1
                            moved = True
                finished = [rank for rank in heads if (rank, name) in left and not +left[rank, name]]
            for rank in finished:
                done[rank].append(queues[rank, name].pop(0))
                left.pop((rank, name), None)
                moved = True
    return not any(todo) and not any(queues.values())


@settings(deadline=None, max_examples=300)
@given(problems(), staged, st.sampled_from(DIRECTIONS), st.integers(1, 2))
def test_nobody_waits_for_ever(problem: Problem, method: str, direction: str, passes: int):
    passes = passes if method == "all_gather" else 1
    assert run_to_the_end([list(program(plan, direction, passes)) for plan in problem.plans(method)])


def test_a_deadlock_would_be_seen():
    there, back = Message(0, 1, ((0, 1),)), Message(1, 0, ((1, 2),))
    first, second = ("kv", (there,)), ("kv", (back,))
    crossed = [[("post", first), ("post", second)], [("post", ("kv", (back,))), ("post", ("kv", (there,)))]]
    assert not run_to_the_end(crossed)
    unmatched = [[("post", first), ("wait", first)], []]
    assert not run_to_the_end(unmatched)
    left_out = [[("post", ("kv", None))], []]
    assert not run_to_the_end(left_out)
    together = "kv", (there, back)
    assert run_to_the_end([[("post", together), ("wait", together)]] * 2)


# ---- how much


def sent(layout: AxisLayout, mask: Mask, method: str = "ring") -> dict[str, list[int]]:
    """Rows that each rank sends, by what travels."""
    plans = [make_plan(layout, mask, method, rank) for rank in range(layout.degree)]
    return {kind: [rows_sent(plan)[kind] for plan in plans] for kind in ("forward", "backward", "home")}


def rows_sent(plan: RankPlan) -> dict[str, int]:
    """Return how many rows of K/V (forward, backward) and dK/dV (home) a rank sends, without exchanges of heads."""
    plan = plan.inner or plan
    return {
        "forward": sum(plan.rows_sent_for(stage, stage.messages) for stage in plan.forward),
        "backward": sum(plan.rows_sent_for(stage, stage.messages) for stage in plan.backward),
        "home": sum(plan.rows_sent_for(stage, stage.home) for stage in plan.backward),
    }


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_a_causal_ring_of_head_tail_sends_a_quarter_less_in_total(degree: int):
    layout = head_tail(2 * degree * 16, degree)
    whole = 32 * (degree - 1)
    for kind, rows in sent(layout, causal(layout.length)).items():
        assert sum(rows) == degree * whole * 3 / 4
        # But the busiest rank saves nothing, or one piece in the backward, where it receives everything instead.
        assert max(rows) == whole - 16 * (kind == "backward" and degree > 2)
    for rows in sent(layout, full(layout.length)).values():
        assert rows == [whole] * degree


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("degree", [2, 4, 5])
def test_a_causal_contiguous_layout_sends_half(method: str, degree: int):
    layout = contiguous(degree * 12, degree)
    for rows in sent(layout, causal(layout.length), method).values():
        # "Less than half" does not hold: all-gather takes the collective.
        assert sum(rows) == layout.length * (degree - 1) / (2 if method == "ring" else 1)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("window", [1, 2, 9, 16, 17])
def test_a_sliding_window_sends_its_width_over_each_border(method: str, window: int):
    layout = contiguous(8 * 16, 8)
    for kind, rows in sent(layout, sliding_window(layout.length, window), method).items():
        assert sum(rows) == 7 * (window - 1)
        silent = 0 if kind == "home" else -1  # K and V go up from each rank but the last, gradients come down
        assert rows.pop(silent) == 0
        assert set(rows) == {window - 1}


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("layout", [contiguous(64, 4), build_layout("balanced", 64, 4)], ids=lambda x: x.name)
def test_documents_that_end_at_borders_send_nothing(method: str, layout: AxisLayout):
    ends = sorted({border for shard in layout.ranges for part in shard for border in part})
    mask = documents(np.diff(ends).tolist(), is_causal=True)
    assert sent(layout, mask, method) == dict.fromkeys(("forward", "backward", "home"), [0] * 4)
    across = documents([63, 1], is_causal=True)
    assert any(map(any, sent(layout, across, method).values()))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_stage_of_head_tail_is_one_kernel_in_the_forward(degree: int):
    layout = head_tail(2 * degree * 16, degree)
    for rank in range(degree):
        stages = make_plan(layout, causal(layout.length), "ring", rank).forward
        assert [len(stage.tiles) for stage in stages] == [1] * degree
        assert len({stage.pairs for stage in stages[1:]}) == 1  # what travels hides behind what is computed


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
    layout = build_layout(name, seq_len, degree, work=mask.work())
    start = time.perf_counter()
    plan = make_plan(layout, mask, method, degree // 2, **({"head_degree": 8} if method == "hybrid" else {}))
    assert time.perf_counter() - start < 2
    assert plan.pairs > 0


def test_a_plan_is_made_once():
    def made() -> RankPlan:
        mask = causal(24) & documents([5, 19])
        return make_plan(build_layout("balanced", 24, 3, work=mask.work()), mask, "ring", 1)

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

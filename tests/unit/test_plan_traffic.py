"""Laws of what plans send: rows that are needed and no other, in an order without deadlock, and how many."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshard.context.planning.balance import build_layout
from longshard.context.planning.mask import Mask, causal, documents, full, sliding_window
from longshard.context.planning.methods import make_plan
from longshard.context.planning.plan import Message, RankPlan, Stage
from longshard.sharding.layout import AxisLayout, contiguous, head_tail
from tests.unit.plan_problems import DIRECTIONS, Problem, numbers, pairs_of, problems, rows_sent, staged

# ---- messages


def traffic(stages: list[Stage], of: Callable[[Stage], tuple[Message, ...]]) -> list[Message]:
    """Return the messages of one stage, and check that all ranks agree on them.

    Each message is expected by its target. Two ranks post their messages in the same order, at most one each way.
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
    """Yield the posts and waits of a rank, in the order of the stages."""
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
    """Return the rows that each rank sends, by kind of message."""
    plans = [make_plan(layout, mask, method, rank) for rank in range(layout.degree)]
    return {kind: [rows_sent(plan)[kind] for plan in plans] for kind in ("forward", "backward", "home")}


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

"""Laws of the ring's schedule, by running it on sets of row numbers instead of tensors."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.distributed.context_parallel.plan import Message, Stage, ring_plan
from trainer.distributed.layout import LAYOUTS, SequenceLayout, contiguous, head_tail

layouts = st.builds(
    lambda name, units, degree, multiple: LAYOUTS[name](units * multiple, degree, multiple_of=multiple),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 3),
)


def plans(layout: SequenceLayout):
    return [ring_plan(layout, rank) for rank in range(layout.degree)]


def rows(ranges) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]


def delivered(stages: list[Stage], rank_messages) -> dict[tuple[int, int], list[Message]]:
    """(source, target) -> messages as the source posts them; the target must post the same, in the same order."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, stage in enumerate(stages):
        for message in rank_messages(stage):
            assert message.source != message.target
            assert rank in (message.source, message.target)
            (sent if message.source == rank else received)[message.source, message.target].append(message)
    assert sent == received
    return sent


@settings(deadline=None)
@given(layouts)
def test_every_visible_pair_is_computed_once_and_no_other(layout: SequenceLayout):
    for direction in ("forward", "backward"):
        pairs = np.zeros((layout.seq_len, layout.seq_len), dtype=int)
        for rank, plan in enumerate(plans(layout)):
            mine = layout.indices(rank)
            for stage in getattr(plan, direction):
                held = np.array(rows(stage.held), dtype=int)
                for tile in stage.tiles:
                    q, k = mine[slice(*tile.q)], held[slice(*tile.kv)]
                    assert len(q)
                    assert len(k)
                    block = np.tri(len(q), dtype=int) if tile.causal else np.ones((len(q), len(k)), dtype=int)
                    assert block.sum() == tile.pairs()
                    pairs[np.ix_(q, k)] += block
        assert (pairs == np.tri(layout.seq_len, dtype=int)).all()


@settings(deadline=None)
@given(layouts)
def test_keys_and_values_arrive_and_nothing_invisible_is_sent(layout: SequenceLayout):
    for direction in ("forward", "backward"):
        stages = list(zip(*(getattr(plan, direction) for plan in plans(layout)), strict=True))
        have = [set(rows(layout.ranges[rank])) for rank in range(layout.degree)]
        own = [set(part) for part in have]
        for step, stage in enumerate(stages):
            moved = delivered(list(stage), lambda s: s.messages)
            assert step or not moved
            arrived = [set() for _ in range(layout.degree)]
            for (source, target), messages in moved.items():
                for message in messages:
                    content = set(range(message.start, message.stop))
                    assert content <= have[source] | own[source]  # worked on, or its own: two buffers suffice
                    assert not content & arrived[target]
                    assert message.start < layout.ranges[target][-1][1]  # seen by some query of the target
                    arrived[target] |= content
            if step:
                have = arrived
            assert [set(rows(part.held)) for part in stage] == have


@settings(deadline=None)
@given(layouts)
def test_every_gradient_comes_home_once(layout: SequenceLayout):
    """Count contributions per (contributor, row): each rank that sees a row adds to it once, and the owner gets all."""
    degree = layout.degree
    stages = list(zip(*(plan.backward for plan in plans(layout)), strict=True))
    home = [defaultdict(Counter) for _ in range(degree)]
    arrived: list[dict[int, Counter]] = [{} for _ in range(degree)]
    for stage in stages:
        sums: list[dict[int, Counter]] = []
        for rank, part in enumerate(stage):
            here = {row: Counter([rank]) for row in rows(part.held)}
            for row, count in arrived[rank].items():
                (here if row in here and row not in rows(layout.ranges[rank]) else home[rank])[row] += count
            if part.held == layout.ranges[rank]:
                for row, count in here.items():
                    home[rank][row] += count
            sums.append(here)
        arrived = [{} for _ in range(degree)]
        for messages in delivered(list(stage), lambda s: s.home).values():
            for message in messages:
                for row in range(message.start, message.stop):
                    arrived[message.target].setdefault(row, Counter()).update(sums[message.source][row])
    for rank in range(degree):
        for row, count in arrived[rank].items():
            home[rank][row] += count
        for row in rows(layout.ranges[rank]):
            seen_by = {r for r in range(degree) if len(layout.indices(r)) and layout.indices(r)[-1] >= row}
            # The whole range is carried for a rank that sees any row of it.
            assert set(home[rank][row]) >= seen_by
            assert set(home[rank][row].values()) == {1}


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_causal_head_tail_sends_a_quarter_less(degree: int):
    layout = head_tail(2 * degree * 16, degree)
    everything = layout.seq_len * (degree - 1)
    for direction in ("forward", "backward", "home"):
        total = sum(plan.rows_sent(rank)[direction] for rank, plan in enumerate(plans(layout)))
        assert total == everything * 3 // 4


def test_contiguous_sends_half():
    layout = contiguous(64, 4)
    assert sum(plan.rows_sent(rank)["forward"] for rank, plan in enumerate(plans(layout))) == 64 * 3 // 2


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_stage_of_head_tail_is_one_kernel_in_the_forward(degree: int):
    layout = head_tail(2 * degree * 16, degree)
    for plan in plans(layout):
        assert [len(stage.tiles) for stage in plan.forward] == [1] * degree
        work = [sum(tile.pairs() for tile in stage.tiles) for stage in plan.forward]
        assert len(set(work[1:])) == 1  # as long as each other: what travels hides behind what is computed


def test_one_rank_computes_everything_and_sends_nothing():
    plan = ring_plan(head_tail(10, 1), 0)
    assert len(plan.forward) == 1
    assert plan.forward[0].tiles[0].pairs() == 55
    assert plan.rows_sent(0) == {"forward": 0, "backward": 0, "home": 0}

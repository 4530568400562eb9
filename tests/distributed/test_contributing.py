"""Law: a context-parallel method is its record and its schedule, as CONTRIBUTING.md says. Here is one more."""

from unittest import mock

import pytest

from longshard.context.planning.methods import METHODS, Method
from longshard.context.planning.options import ContextParallelOptions
from longshard.context.planning.plan import Message, Stage
from longshard.context.planning.schedules import Schedule
from longshard.context.planning.tiles import Needs
from tests.distributed.attention_cases import MASKS, Case, assert_exact, attention_case
from tests.distributed.pool import WorkerPool


def direct(needs: Needs, rank: int) -> Schedule:
    """Return stages that each fetch the K/V of one other rank directly, and send its gradients back."""
    degree, own = needs.degree, needs.kv_ranges[rank]
    local = Stage(own, needs.tiles(rank, own))
    forward, backward = [local], [local]
    for step in range(1, degree):
        owner, target = (rank + step) % degree, (rank - step) % degree
        pairs = sorted({(owner, rank), (rank, target)})
        there = tuple(Message(a, b, needs.held(b, a)) for a, b in pairs if needs.held(b, a))
        home = sorted((Message(m.target, m.source, m.ranges) for m in there), key=lambda m: (m.source, m.target))
        held = needs.held(rank, owner)
        forward.append(Stage(held, needs.tiles(rank, held), there))
        backward.append(Stage(held, needs.tiles(rank, held), there, tuple(home)))
    return tuple(forward), tuple(backward)


def without_the_last_stage(needs: Needs, rank: int) -> Schedule:
    """Return `direct` less a stage: a wrong schedule."""
    forward, backward = direct(needs, rank)
    return forward[:-1], backward[:-1]


def run_direct(cases: list[Case]) -> list[dict]:
    with mock.patch.dict(METHODS, direct=Method(direct, passes=False)):
        return attention_case(cases)


def run_too_short(cases: list[Case]) -> list[dict]:
    with mock.patch.dict(METHODS, too_short=Method(without_the_last_stage, passes=False)):
        return attention_case(cases)


def cases_of(method: str, schedule: object) -> list[Case]:
    with mock.patch.dict(METHODS, {method: Method(schedule, passes=False)}):
        options = [ContextParallelOptions(method, balancer) for balancer in ("head_tail", "contiguous")]
    return [Case(length, (8, 2), options=o, **mask) for o in options for mask in MASKS for length in (37, 5)]


@pytest.mark.parametrize("degree", [2, 3])
def test_a_method_from_outside_equals_one_process(pool: WorkerPool, degree: int) -> None:
    """Outputs, gradients, and the calls and bytes that its plan says, under every mask."""
    assert_exact(pool, degree, cases_of("direct", direct), run_direct)


def test_a_schedule_that_forgets_a_rank_is_seen(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError, match=r"rank 0 Case\(.*\): \[0\."):
        assert_exact(pool, 2, cases_of("too_short", without_the_last_stage), run_too_short)

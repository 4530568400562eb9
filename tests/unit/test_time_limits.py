"""Laws of the time-out of collectives: a run whose steps take long, or longer, is not ended while it works."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.components.metrics import MetricsLogger
from trainer.config.schema import Comm
from trainer.runtime import time_limits
from trainer.runtime.time_limits import TimeLimits, limits_raised


class Clock:
    """A host's clock that a test moves."""

    def __init__(self) -> None:
        self.now = 5000.0

    def monotonic(self) -> float:
        return self.now


class Run:
    """The limits of one rank, the seconds that were set, and the steps that it takes. highest: over all ranks."""

    def __init__(self, clock: Clock, highest: Callable[[float], float] = float, predicted: float = 0.0) -> None:
        self.clock, self.set, self.votes = clock, [], []
        self.limits = TimeLimits(Comm(), highest, self.set.append)
        clock.now += 1000  # the model is made
        self.limits.start(predicted)

    def step(self, seconds: float, *, reads: bool = True, asked: bool | None = None) -> None:
        """Take a step. asked: whether some rank votes; by default whether this one does."""
        self.clock.now += seconds
        self.votes.append(self.limits.vote())
        if reads:
            self.limits.step_was_read(self.votes[-1] > 0 if asked is None else asked)
        self.limits.settle()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_limits, "time", clock)
    return clock


def test_short_steps_have_the_configured_time_outs(clock: Clock) -> None:
    run = Run(clock)
    for _ in range(9):
        run.step(5.0)
    assert run.set == [100]  # after the first step, once


def test_long_steps_have_three_times_their_own_seconds(clock: Clock) -> None:
    run = Run(clock)
    for _ in range(9):
        run.step(313.0)
    assert run.set == [939]
    assert not any(run.votes)


def test_the_seconds_of_compilation_count_for_one_step_only(clock: Clock) -> None:
    run = Run(clock)
    run.step(400.0)
    run.step(40.0)
    assert run.set == [1200, 120]
    run.step(1.0)
    assert run.limits.seconds == 120


def test_the_prediction_is_a_limit_before_and_after_the_first_step(clock: Clock) -> None:
    run = Run(clock, predicted=313.0)
    assert run.set == [939]
    for _ in range(3):
        run.step(20.0)  # short documents; a later step may have documents as long as its sequences
    assert run.set == [939]


def test_steps_that_grow_raise_the_limit_before_they_reach_it_and_nothing_lowers_it(clock: Clock) -> None:
    run = Run(clock)
    for seconds in range(20, 1500, 20):
        assert seconds < run.limits.seconds
        run.step(float(seconds))
    for _ in range(5):
        run.step(1.0, asked=True)  # by another rank
    assert run.limits.seconds == 3 * 1480
    assert len(run.set) < 15  # each waits for the device


def test_all_ranks_take_the_longest_of_all_when_one_asks(clock: Clock) -> None:
    run = Run(clock, highest=lambda seconds: max(seconds, 500.0 if clock.now > 6020 else 0.0))
    for _ in range(3):
        run.step(5.0)
    assert run.set == [100]
    clock.now = 7000.0
    run.limits.settle()
    assert run.set == [100]  # no rank has asked: nothing is agreed
    run.limits._started = clock.now
    run.step(5.0, asked=True)
    assert run.set == [100, 1500]


def test_a_step_that_is_read_during_the_next_one_counts_whole(clock: Clock) -> None:
    run = Run(clock)
    run.step(30.0)
    run.step(1.0, reads=False)  # the host has launched it
    run.step(299.0)
    assert run.set == [100, 900]


def test_a_validation_and_a_save_are_no_part_of_a_step(clock: Clock) -> None:
    run = Run(clock)
    for _ in range(3):
        run.step(5.0)
        with run.limits.paused():
            clock.now += 900
    assert run.set == [100]


def test_a_validation_that_compiles_has_the_limit_of_the_first_step(clock: Clock) -> None:
    run = Run(clock)
    run.step(5.0)
    with run.limits.while_compiling():
        assert run.set == [100, 300]
    assert run.set == [100, 300, 100]
    run.step(200.0)
    with run.limits.while_compiling():
        assert run.limits.seconds == 600


class Dims:
    def size(self, _name: str) -> int:
        return 8


def predicted(tmp_path: Path, device: str, peak: float | None) -> float:
    """The prediction of a run with 8e15 FLOPs a step over 8 ranks."""
    metrics = SimpleNamespace(device=torch.device(device), peak_flops=peak, dims=Dims(), _estimate=tmp_path / "e.json")
    metrics.tokens_per_step, metrics.flops_per_token = 1000, (8e12, 4e12)
    metrics._estimated = lambda name: MetricsLogger._estimated(metrics, name)
    return MetricsLogger.predicted_seconds(metrics)


def test_the_prediction_is_the_planners_or_all_flops_at_a_low_speed(tmp_path: Path) -> None:
    assert predicted(tmp_path, "cpu", None) == 0.0
    assert predicted(tmp_path, "cuda", None) == 0.0
    assert predicted(tmp_path, "cuda", 1e14) == pytest.approx(25.0)
    (tmp_path / "e.json").write_text("")  # it is still computed
    assert predicted(tmp_path, "cuda", 1e14) == pytest.approx(25.0)
    (tmp_path / "e.json").write_text(json.dumps({"step_seconds": 70.0}))
    assert predicted(tmp_path, "cuda", 1e14) == 70.0
    assert predicted(tmp_path, "cuda", None) == 70.0
    assert predicted(tmp_path, "cpu", None) == 0.0  # of an earlier run on GPUs


def test_a_sentence_names_the_time_outs_that_are_too_short() -> None:
    assert limits_raised(Comm(), 33.0) == ""
    assert limits_raised(Comm(), 93.4) == (
        "comm.train_timeout_seconds = 100 is too short for a step of 93 s, as predicted: the run allows collectives 3 "
        "times a step, 280 s"
    )
    assert "comm.init_timeout_seconds = 300 and comm.train_timeout_seconds = 100 are" in limits_raised(Comm(), 313.0)
    assert limits_raised(Comm(train_timeout_seconds=1200), 93.4) == ""

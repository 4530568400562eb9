"""Law: on every layout a step that is not finite on one rank changes nothing anywhere, and the run continues.

Steps 2, 3, 5, 6 and 7 are not finite; step 7 ends the run. Fused kernels leave out an update by themselves. With them,
each step is read during the next one, and step 8 begins before the run ends.
"""

import json
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.checkpoint_cases import same
from tests.distributed.harness import trainer_of, whole
from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint_layouts import LAYOUTS, MODEL
from trainer.checkpoint.checkpointer import tensors_of
from trainer.components.step_outcome import SPIKE_LEAST, StepGuard, TrainingError
from trainer.config.schema import Training
from trainer.trainer import Trainer

BAD = {2, 3, 5, 6, 7}
SKIPPING = ["--training.steps=9", "--training.on_nonfinite=skip", "--training.max_skipped_steps=2"]


def skipping_case(arguments: list[str], name: str = "") -> dict[str, Any]:
    """Train until the run ends; return which steps changed tensors, and the logged lines.

    name: end of the name of the parameter whose gradient is spoiled; by default the last parameter.
    """
    now, seen = 0, {"changed": [], "lr": [], "data": []}

    def spoil(parameter: nn.Parameter) -> None:
        if now in BAD:
            gradient = parameter.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(torch.inf)

    with trainer_of([*SKIPPING, *arguments]) as trainer:
        trainer.optimizer_step = partial(Trainer.optimizer_step, trainer)  # without the harness's records
        if trainer.dims.rank("world") == trainer.dims.size("world") - 1:
            part = trainer.model_parts[-1]
            *_, last = (p for own, p in part.named_parameters() if own.endswith(name))
            last.register_post_accumulate_grad_hook(spoil)
        for now in range(1, 9):
            before = {name: whole(x) for name, x in tensors_of(trainer.model_parts, trainer.optimizer).items()}
            try:
                trainer.train_step(now)
            except TrainingError as error:
                seen["error"] = str(error)
            after = {name: whole(x) for name, x in tensors_of(trainer.model_parts, trainer.optimizer).items()}
            seen["changed"] += [now] * any(not same(before[name], after[name]) for name in before)
            seen["lr"].append(trainer.lr_scheduler.get_last_lr()[0])
            if "error" in seen:
                break
        file = Path(trainer.config.job.dump_folder, "metrics.jsonl")  # of rank 0
        lines = file.read_text().splitlines() if file.exists() else []
    return seen | {"logged": [json.loads(line) for line in lines], "ended": now}


@lru_cache
def one_process(pool: WorkerPool) -> list[dict]:
    return pool.run(1, skipping_case, MODEL)[0]["logged"]


QUICK = {("pp2", "foreach")}


@pytest.mark.parametrize(
    ("layout", "implementation"),
    [
        pytest.param(layout, how, marks=[] if (layout, how) in QUICK else [pytest.mark.slow])
        for layout in LAYOUTS
        for how in ("foreach", "fused")
    ],
)
def test_a_step_that_is_not_finite_is_left_out_on_all_ranks(pool: WorkerPool, layout: str, implementation: str) -> None:
    ranks, arguments = LAYOUTS[layout]
    settings = [*MODEL, *arguments, f"--optimizer.implementation={implementation}"]
    results = pool.run(ranks, skipping_case, settings)
    for seen in results:
        assert seen["changed"] == [1, 4]
        assert seen["ended"] == (8 if implementation == "fused" else 7)
        assert len(set(seen["lr"][:6])) == 6  # the learning rate continues
        assert seen["error"].startswith("step 7: the loss is ")
        assert "the weights are from step 4; training.max_skipped_steps = 2 steps before it" in seen["error"]
    wanted, logged = one_process(pool), results[0]["logged"]
    assert [line["step"] for line in logged] == [line["step"] for line in wanted] == [1, 4]
    assert [line["skipped_steps"] for line in logged] == [0, 2]
    for ours, theirs in zip(logged, wanted, strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens_seen"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-10), (ours["step"], key)


def test_by_default_the_first_one_ends_the_run() -> None:
    guard = StepGuard(Training())
    with pytest.raises(TrainingError, match=r"step 1: .* the weights are from step 0; a lower optimizer.lr"):
        guard.should_skip(1, float("nan"), 1.0)
    assert guard.record({}) == {}


def test_only_steps_in_a_row_count() -> None:
    guard = StepGuard(Training(on_nonfinite="skip", max_skipped_steps=1))
    assert [guard.should_skip(step, 1.0, norm) for step, norm in ((1, float("inf")), (2, 1.0), (3, float("nan")))] == [
        True,
        False,
        True,
    ]
    assert guard.record({}) == {"skipped_steps": 2}
    with pytest.raises(TrainingError, match=r"step 4: .* the weights are from step 2; training.max_skipped_steps = 1"):
        guard.should_skip(4, 1.0, float("inf"))


@pytest.mark.parametrize(
    ("losses", "spikes"),
    [
        ([2.0] * SPIKE_LEAST + [2.2, 2.0], 1),
        ([2.0] * SPIKE_LEAST + [2.05], 0),  # not by a share of the mean
        ([2.0] * (SPIKE_LEAST - 1) + [9.0], 0),  # too few before it
        ([10.0 - step / 10 for step in range(80)], 0),  # a run that learns
        ([2.0, 3.0] * SPIKE_LEAST + [5.0], 0),  # not by deviations
        ([2.0, 3.0] * SPIKE_LEAST + [6.0], 1),
    ],
)
def test_a_spike_is_told_and_changes_nothing(
    caplog: pytest.LogCaptureFixture, losses: list[float], spikes: int
) -> None:
    guard = StepGuard(Training())
    with caplog.at_level("WARNING", logger="trainer"):
        assert not any(guard.should_skip(step, loss, 1.0) for step, loss in enumerate(losses, 1))
    assert caplog.text.count("is a spike: the mean of the last") == spikes

"""Laws of steps that are read during the next step: the run equals, bit for bit, a run that reads each step at once.

A checkpoint, the first and the last step, and a stop know their outcome. No update follows a step that ends the run.
"""

import json
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed import test_bad_data
from tests.distributed.checkpoint_cases import merged, same, trainer_in, whole_state
from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint_layouts import LAYOUTS
from trainer.components.step_outcome import StepTotals, TrainingError
from trainer.data.packing import IGNORE_INDEX
from trainer.stores.store import Store
from trainer.tasks.observers import SourceLosses
from trainer.trainer import Trainer

data, damaged = test_bad_data.data, test_bad_data.damaged
FUSED = "--optimizer.implementation=fused"
STEPS, INTERVAL, STOPPED = 20, 8, 12
MODEL = [
    *("--model.name=qwen3_moe", "--model.router_bias_update_rate=0.01", f"--training.steps={STEPS}", FUSED),
    *("--metrics.log_freq=3", f"--checkpoint.interval={INTERVAL}", "--checkpoint.keep_latest_k=0"),
]
TIMES = ("seconds", "tokens_per_second", "tflops", "mfu", "memory", "data_loading")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a job on two sources."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("web", "code"):
        lines = [json.dumps({"text": f"{name} {i} is {i * i} " * (i % 5 + 1)}) for i in range(99)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    paths = [f"{folder}/{name}.jsonl" for name in ("web", "code")]
    return [
        "--training.dataset=jsonl",
        "--mixture.names",
        "web",
        "code",
        "--mixture.paths",
        *paths,
        "--mixture.weights",
        "2",
        "1",
    ]


def training_case(folder: str, arguments: list[str], at_once: bool = False, stops: int | None = None) -> dict:
    """Train; the state, whether each save knew its outcome, and for each read (step that runs, step that is read)."""
    seen: dict[str, Any] = {"reads": [], "pending": []}
    with trainer_in(folder, [*MODEL, *arguments]) as trainer:
        step_of, read, save = trainer.train_step, trainer.reduce_step, trainer.checkpoint.save
        now = 0

        def noted_step(step: int) -> None:
            nonlocal now
            now = step
            if step == stops:
                trainer.stop.signal = signal.SIGTERM
            step_of(step)

        def noted_read(step: int, totals: StepTotals) -> tuple[float, float, bool]:
            seen["reads"].append((now, step))
            return read(step, totals)

        def noted_save(step: int, **settings: Any) -> bool:
            saved = save(step, **settings)
            seen["pending"] += [step] * (saved and trainer.unread is not None)
            return saved

        trainer.train_step, trainer.reduce_step, trainer.checkpoint.save = noted_step, noted_read, noted_save
        if at_once:
            trainer.needs_outcome = lambda _step: True
        trainer.train()
        return seen | {"state": whole_state(trainer)}


def lines_of(folder: Path) -> list[dict]:
    """Return the logged steps without measured values."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: x for key, x in line.items() if not key.startswith(TIMES)} for line in lines]


@pytest.mark.slow
def test_the_run_is_that_of_steps_that_are_read_at_once(pool: WorkerPool, tmp_path: Path, sources: list[str]) -> None:
    """Through a stop and a resume, weights, moments, biases of routers, positions and logged lines are equal."""
    ranks, arguments = LAYOUTS["ep2"]
    settings = [*arguments, *sources]
    at_once = pool.run(ranks, training_case, str(tmp_path / "once"), settings, True)
    late = pool.run(ranks, training_case, str(tmp_path / "late"), settings)
    stopped = pool.run(ranks, training_case, str(tmp_path / "stopped"), settings, False, STOPPED - 1)
    resumed = pool.run(ranks, training_case, str(tmp_path / "stopped"), settings)

    alone = {1, INTERVAL, 2 * INTERVAL, STEPS}
    for seen in late:
        assert seen["reads"] == [(step if step in alone else step + 1, step) for step in range(1, STEPS + 1)]
    for seen in stopped:  # the signal came in the step before
        assert seen["reads"][-2:] == [(STOPPED, STOPPED - 1), (STOPPED, STOPPED)]
    assert all(seen["pending"] == [] for seen in (*at_once, *late, *stopped, *resumed))
    assert Store(tmp_path / "stopped" / "checkpoint").steps() == [INTERVAL, STOPPED, 2 * INTERVAL, STEPS]

    wanted = merged(at_once, "state")
    assert any(name.endswith("selection_bias") and x.any() for name, x in wanted.items())
    for results in (late, resumed):
        got = merged(results, "state")
        assert got.keys() == wanted.keys()
        assert [name for name in wanted if not same(wanted[name], got[name])] == []
    lines = lines_of(tmp_path / "once")
    assert [line["step"] for line in lines] == [1, *range(3, STEPS, 3), STEPS]
    assert "loss/web" in lines[-1]
    assert lines_of(tmp_path / "late") == lines == lines_of(tmp_path / "stopped")


def failing_case(folder: str) -> tuple[str, list[int], list[int], bool]:
    """The message, steps begun and updates launched, and whether the state is that before the step that fails."""
    begun, launched = [], []
    with trainer_in(folder, ["--training.steps=9", FUSED, *LAYOUTS["fsdp2"][1]]) as trainer:
        step_of, states = trainer.train_step, {}

        def noted_step(step: int) -> None:
            begun.append(step)
            states[step] = whole_state(trainer)
            step_of(step)

        def noted_update(norm: float | torch.Tensor) -> None:
            launched.append(begun[-1])
            Trainer.optimizer_step(trainer, norm)

        def spoil(parameter: torch.nn.Parameter) -> None:
            if begun[-1] == 3 and trainer.dims.rank("world") == 1:
                (g.to_local() if isinstance(g := parameter.grad, DTensor) else g).fill_(torch.nan)

        trainer.train_step, trainer.optimizer_step = noted_step, noted_update
        trainer.parameters[0].register_post_accumulate_grad_hook(spoil)
        with pytest.raises(TrainingError) as error:
            trainer.train()
        now = whole_state(trainer)
        tensors = [name for name, x in now.items() if isinstance(x, torch.Tensor)]
        return str(error.value), begun, launched, all(same(now[name], states[3][name]) for name in tensors)


def test_a_step_that_ends_the_run_is_followed_by_no_update(pool: WorkerPool, tmp_path: Path) -> None:
    for message, begun, launched, unchanged in pool.run(2, failing_case, str(tmp_path)):
        assert message.startswith("step 3: ")
        assert "the weights are from step 2" in message
        assert begun == [1, 2, 3, 4]
        assert launched == [1, 2, 3]
        assert unchanged
    assert Store(tmp_path / "checkpoint").steps() == []


def due_case(folder: str) -> list[int]:
    with trainer_in(folder, ["--training.steps=9", FUSED, *LAYOUTS["fsdp2"][1]]) as trainer:
        step_of, saves = trainer.train_step, []

        def noted_step(step: int) -> None:
            late = step >= 5 and not saves and trainer.dims.rank("world") == 1
            trainer.checkpoint.vote = lambda: float(late)  # the clock of one rank
            step_of(step)
            assert not (trainer.save_is_due and trainer.unread)
            saves.extend([step] * trainer.save_is_due)

        trainer.train_step = noted_step
        trainer.train()
        return saves


def test_a_checkpoint_by_the_time_is_that_of_the_step_that_runs_when_it_is_known(
    pool: WorkerPool, tmp_path: Path
) -> None:
    assert pool.run(2, due_case, str(tmp_path)) == [[6], [6]]
    assert 6 in Store(tmp_path / "checkpoint").steps()


def test_bad_data_stop_the_run_after_the_same_step(pool: WorkerPool, tmp_path: Path, damaged: Path) -> None:
    settings = ["--training.dataset=tokens", f"--training.dataset_path={damaged}"]
    at_once = pool.run(2, test_bad_data.train, str(tmp_path / "once"), settings)
    late = pool.run(2, test_bad_data.train, str(tmp_path / "late"), [*settings, FUSED])
    assert late == at_once
    assert f"document {test_bad_data.bad_document()}, is damaged" in late[0][0]
    assert Store(tmp_path / "late" / "checkpoint").steps() == [late[0][1]]


def slow_case(folder: str) -> None:
    with trainer_in(folder, ["--training.steps=5", FUSED, "--checkpoint.no-enable"]) as trainer:
        trainer.model_parts[0].register_forward_pre_hook(lambda *_: time.sleep(0.1))
        trainer.train()


def test_each_logged_step_has_a_time_of_its_own(pool: WorkerPool, tmp_path: Path) -> None:
    """Each step has four micro-batches that wait for 0.1 s; the last step is read right after the step before."""
    pool.run(1, slow_case, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(0.4 < line["seconds_per_step"] < 2 for line in lines)


def test_a_step_that_is_left_out_counts_for_no_source() -> None:
    losses = SourceLosses(["a", "b"], 4, SimpleNamespace(zeros=partial(torch.zeros, dtype=torch.float64)))
    labels = torch.tensor([[5, 6, 7, IGNORE_INDEX]])
    for loss, left_out in ((1.0, 0.0), (torch.inf, 1.0), (2.0, 0.0)):
        batch = {"sources": torch.tensor([1]), "labels": labels}
        losses.losses(batch, torch.tensor([[loss, 0.0, 0.0, 0.0]]))
        losses.end_step(torch.tensor(left_out))
    assert losses._totals.tolist() == [[0, 3], [0, 6]]

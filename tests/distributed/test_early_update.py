"""Law: an update that begins during the backward equals the ordinary step, bit for bit, and no error is lost."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from longshard.sharding.tensors import fsdp_groups, local_part
from tests.distributed.checkpoint_cases import merged, same, trainer_in, whole_state
from tests.distributed.pool import WorkerPool
from tests.distributed.test_late_read import lines_of
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.components.early_update import EarlyUpdates
from trainer.components.step_outcome import TrainingError
from trainer.stores.store import Store

HOST = ["--training.enable_cpu_offload", "--training.max_norm=inf", "--training.steps=4"]
EARLY = [*HOST, "--training.early_update"]
ACCUMULATED = ["--training.local_batch_size=1"]
AT_ONCE = {1: "--training.local_batch_size=8", 2: "--training.local_batch_size=4"}
GROUPS = [
    "--optimizer.groups",
    '{parameters = "layers.*.wq.weight", lr_factor = 0.5}',
    '{parameters = "*.w1.weight", weight_decay = 0.3}',
]
EXPERTS = ["--model.name=qwen3_moe", "--activation_checkpoint.mode=full"]
RECOMPUTED = ["--activation_checkpoint.mode=full", "--activation_checkpoint.group=2"]
# Their gradients come last; a tied matrix has gradients from both ends of the model.
LEFT = {"tok_embeddings", "norm", "mtp_norms"}


def alive() -> list[str]:
    """The threads of early updates."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("update")]


def training_case(folder: str, arguments: list[str], steps: int) -> dict[str, Any]:
    """Train to a step, saving every second step.

    Returns:
        The state, and the names of the parameters that each step left to the optimizer.
    """
    left: list[set[str]] = []
    finished = EarlyUpdates.finished

    @contextlib.contextmanager
    def noted(updates: EarlyUpdates) -> Iterator[None]:
        with finished(updates):
            names = (name for name, p in trainer.model_parts[0].named_parameters() if p.grad is not None)
            left.append({re.match(r"layers\.\d+|\w+", name)[0] for name in names})
            yield

    settings = [*arguments, "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]
    with mock.patch.object(EarlyUpdates, "finished", noted), trainer_in(folder, settings) as trainer:
        for step in range(trainer.start_step + 1, steps + 1):
            trainer.train_step(step)
            trainer.checkpoint.save(step, tokens_seen=trainer.metrics.tokens_seen(step))
        state = whole_state(trainer)
        if trainer.early is not None:
            trainer.early.close()
    return {"state": state, "left": left, "alive": alive()}


CASES = {
    "one, accumulated": (1, [*ACCUMULATED, *GROUPS]),
    "fsdp2": (2, [*LAYOUTS["fsdp2"][1], AT_ONCE[2], *GROUPS]),
    "fsdp2, accumulated": (2, [*LAYOUTS["fsdp2"][1], *ACCUMULATED]),
    "one, experts recomputed": (1, [*EXPERTS, *ACCUMULATED]),
    "one, in chunks": (1, ["--training.sequence_chunks=2", *ACCUMULATED]),
    "one, stochastic": (1, ["--training.dtype=bfloat16"]),
}
MORE = {
    "one, layers recomputed together": (1, RECOMPUTED),
    "one, foreach": (1, ["--optimizer.implementation=foreach", "--optimizer.name=Adam"]),
    "one, compiled": (1, ["--compile.enable"]),
    "one, tied": (1, ["--model.flavor=tiny_tied", "--optimizer.qk_clip=0.1"]),
    "one, further tokens": (1, ["--model.mtp_layers=2"]),
    "tp2": (2, [*LAYOUTS["tp2"][1], *ACCUMULATED]),
    "ddp2": (2, [*LAYOUTS["ddp2"][1], *ACCUMULATED]),
}


@pytest.mark.parametrize("case", [*CASES, *slow(*MORE)])
def test_the_update_is_that_of_the_ordinary_step(pool: WorkerPool, tmp_path: Path, case: str) -> None:
    """Weights, moments, counts of steps, rates, positions, logged lines; through a checkpoint and a resume."""
    ranks, arguments = (CASES | MORE)[case]
    wanted = pool.run(ranks, training_case, str(tmp_path / "after"), [*HOST, *arguments], 4)
    first = pool.run(ranks, training_case, str(tmp_path / "early"), [*EARLY, *arguments], 2)
    got = pool.run(ranks, training_case, str(tmp_path / "early"), [*EARLY, *arguments], 4)
    assert [result["left"] for result in wanted] == [[]] * ranks
    for result in (*first, *got):
        assert len(result["left"]) == 2
        assert all(left and left <= LEFT for left in result["left"])
        assert result["alive"] == []
    state, early_state = merged(wanted, "state"), merged(got, "state")
    assert early_state.keys() == state.keys()
    assert [name for name in state if not same(state[name], early_state[name])] == []
    assert {x.item() for name, x in early_state.items() if name.endswith(".step")} == {4}
    assert lines_of(tmp_path / "early") == lines_of(tmp_path / "after")


def test_adapters_of_a_layer_whose_input_has_no_gradient_are_left(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, training_case, str(tmp_path / "base"), HOST, 2)
    adapters = ["--lora.rank=4", f"--checkpoint.initial_load_path={tmp_path / 'base' / 'checkpoint' / 'step-2'}"]
    (wanted,) = pool.run(1, training_case, str(tmp_path / "after"), [*HOST, *adapters], 2)
    (got,) = pool.run(1, training_case, str(tmp_path / "early"), [*EARLY, *adapters], 2)
    assert got["left"] == [{"layers.0"}] * 2
    assert [name for name in wanted["state"] if not same(wanted["state"][name], got["state"][name])] == []


class Gradients:
    """In place of FSDP's event behind the copy of a gradient: which thread waits, and whether the weight is old."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.old, self.seen = parameter, local_part(parameter).detach().clone(), []

    def synchronize(self) -> None:
        is_old = torch.equal(local_part(self.parameter).detach(), self.old)
        self.seen.append((threading.current_thread().name.partition("_")[0], is_old))


def overlap_case(folder: str, arguments: list[str]) -> dict[str, Any]:
    """Let the backward of the first layer wait for the update of the last layer; return the state at this moment."""
    with trainer_in(folder, [*EARLY, *arguments]) as trainer:
        (model,) = trainer.model_parts
        trainer.train_step(1)
        first, last = model.layers["0"], model.layers["1"]
        (group,) = fsdp_groups(last)
        events = [Gradients(x.sharded_param) for x in group.fsdp_params]
        updated, update, results = threading.Event(), trainer.early._update, {}

        def noted(parameters: set[nn.Parameter], copied: list[Any]) -> None:
            update(parameters, copied)
            if parameters == {event.parameter for event in events}:
                updated.set()

        def begins(_gradient: torch.Tensor) -> None:
            results["updated"] = updated.wait(60)
            results["changed"] = all(not torch.equal(local_part(e.parameter), e.old) for e in events)
            results["first"] = [p.grad for p in first.parameters() if p.grad is not None]

        trainer.early._update = noted
        first.feed_forward.register_forward_hook(lambda _layer, _args, hidden: hidden.register_hook(begins) and None)
        for x, event in zip(group.fsdp_params, events, strict=True):
            x.grad_offload_event = event
        trainer.train_step(2)
        trainer.early.close()
        hooks = [p for p in model.parameters() if p._post_accumulate_grad_hooks]  # with which FSDP's copies wait
        return results | {"waits": [event.seen[0] for event in events], "hooks": hooks}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_layer_is_updated_before_the_backward_of_the_first_one(
    pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    """The worker updates it, and waits for each copy first."""
    arguments = [AT_ONCE[ranks], *(LAYOUTS["fsdp2"][1] if ranks == 2 else [])]
    for results in pool.run(ranks, overlap_case, str(tmp_path), arguments):
        assert results["updated"]
        assert results["changed"]
        assert results["first"] == results["hooks"] == []
        assert set(results["waits"]) == {("update", True)}


def failing_case(folder: str, where: str) -> tuple[str, str, list[str]]:
    """Fail in step 3; the error of the run, of the step after it, and the threads that are left."""
    with trainer_in(folder, [*EARLY, AT_ONCE[1], "--checkpoint.interval=2"]) as trainer:
        first, step_of, now = trainer.model_parts[0].layers["0"], trainer.train_step, 0
        update, reduced = trainer.early._update, trainer.early._reduced

        def noted_step(step: int) -> None:
            nonlocal now
            now = step
            step_of(step)

        def fail(*_: object) -> None:
            if now == 3:
                raise OSError(f"no memory in the {where}")

        def noted_update(parameters: set[nn.Parameter], copied: list[Any]) -> None:
            if where == "update" and first.attention.wq.weight in parameters:
                fail()
            update(parameters, copied)

        def changed(unit: nn.Module) -> None:
            reduced(unit)
            if where == "gradient" and now == 3:
                local_part(next(iter(trainer.early._versions)).grad).mul_(2)

        trainer.train_step, trainer.early._update, trainer.early._reduced = noted_step, noted_update, changed
        if where == "backward":
            first.register_forward_hook(lambda _layer, _args, hidden: hidden.register_hook(fail) and None)
        with pytest.raises((OSError, RuntimeError)) as error:
            trainer.train()
        threads = alive()
        with pytest.raises(RuntimeError) as after:
            trainer.train_step(4)
        return str(error.value), str(after.value), threads


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("update", "no memory in the update"),
        ("backward", "no memory in the backward"),
        ("gradient", "a gradient has changed since the update"),
    ],
)
def test_a_step_that_fails_in_its_middle_ends_the_run(
    pool: WorkerPool, tmp_path: Path, where: str, message: str
) -> None:
    ((error, after, threads),) = pool.run(1, failing_case, str(tmp_path), where)
    assert error.startswith(message)
    assert after.startswith("an earlier step failed after it had updated some parameters")
    assert threads == []
    assert Store(tmp_path / "checkpoint").steps() == [2]


def nonfinite_case(folder: str) -> tuple[str, int, list[str]]:
    """The message, the last step that began, and the threads that are left."""
    begun = []
    with trainer_in(folder, [*EARLY, *LAYOUTS["fsdp2"][1], "--checkpoint.interval=2"]) as trainer:
        step_of, last = trainer.train_step, trainer.model_parts[0].layers["1"].attention.wq.weight

        def noted_step(step: int) -> None:
            begun.append(step)
            step_of(step)

        def spoil(parameter: nn.Parameter) -> None:
            if begun[-1] == 3 and trainer.dims.rank("world") == 1:
                local_part(parameter.grad).fill_(torch.nan)

        trainer.train_step = noted_step
        last.register_post_accumulate_grad_hook(spoil)
        with pytest.raises(TrainingError) as error:
            trainer.train()
        return str(error.value), begun[-1], alive()


def test_a_step_that_is_not_finite_ends_the_run_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    for message, begun, threads in pool.run(2, nonfinite_case, str(tmp_path)):
        assert message.startswith("step 3: the loss is ")
        assert "parts of its update are done" in message
        assert "the weights are those" not in message
        assert (begun, threads) == (3, [])
    assert Store(tmp_path / "checkpoint").steps() == [2]


def repeated_case(folder: str, settings: list[str]) -> tuple[dict[str, Any], int]:
    """The state after a step in which the last layer runs twice, and how often the worker was given its parameters."""
    with trainer_in(folder, [*settings, AT_ONCE[1]]) as trainer:
        layer, updates = trainer.model_parts[0].layers["1"], []
        run_twice(layer)
        if trainer.early is not None:
            update = trainer.early._update

            def noted(parameters: set[nn.Parameter], copied: list[Any]) -> None:
                updates.append(layer.attention.wq.weight in parameters)
                update(parameters, copied)

            trainer.early._update = noted
        trainer.train_step(1)
        if trainer.early is not None:
            trainer.early.close()
        return whole_state(trainer), sum(updates)


def run_twice(layer: nn.Module) -> None:
    """Let a layer run its network in a first call, and the whole layer on the result in a second call.

    Autograd adds up the gradients of the network over both calls, so FSDP reduces the gradients of attention first.
    """
    whole_layer, calls = layer.forward, []

    def forward(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(hidden)
        return whole_layer(hidden, *args) if len(calls) % 2 == 0 else hidden + layer.feed_forward(hidden)

    def again(_layer: nn.Module, args: tuple, hidden: torch.Tensor) -> torch.Tensor | None:
        return layer(hidden, *args[1:]) if len(calls) % 2 else None

    layer.forward = forward
    layer.register_forward_hook(again)


def test_a_unit_that_runs_twice_is_updated_once_its_gradients_are_whole(pool: WorkerPool, tmp_path: Path) -> None:
    ((wanted, none),) = pool.run(1, repeated_case, str(tmp_path / "after"), HOST)
    ((got, once),) = pool.run(1, repeated_case, str(tmp_path / "early"), EARLY)
    assert (none, once) == (0, 1)
    assert [name for name in wanted if not same(wanted[name], got[name])] == []

"""Promises of the loop other than parity: precision, stops, shared batches, the speed that it reports."""

import copy
import itertools
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import harness
from tests.distributed.harness import Record, RecordingTrainer, assert_parity, run_layout
from tests.distributed.loop_trainer import build
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.components import device_clock, metrics
from trainer.components.step_outcome import TrainingError
from trainer.runtime.process_group import process_group


def bfloat16_case(folder: str, arguments: list[str]) -> dict:
    process, config, job = build(folder, *arguments)
    seen = {}
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        attention = trainer.model_parts[0].layers["0"].attention
        attention.inner_attention.register_forward_hook(lambda _m, args, out: seen.update(q=args[0].dtype))
        attention.register_forward_pre_hook(lambda _m, args: seen.update(freqs_cis=args[1].dtype))
        trainer.train_step(1)
        seen["storage"] = {p.dtype for p in trainer.model_parts[0].parameters()}
        seen["gradients"] = {p.grad.dtype for p in trainer.model_parts[0].parameters()}
        trainer.metrics.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2+tp2", "fsdp2", "one"])
def test_bfloat16_computes_and_float32_keeps(pool: WorkerPool, tmp_path, layout: str) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    seen = pool.run(world_size, bfloat16_case, str(tmp_path), [*arguments, "--training.mixed_precision_param=bfloat16"])
    assert seen[0]["q"] == torch.bfloat16
    assert seen[0]["freqs_cis"] == torch.float32
    assert seen[0]["storage"] == {torch.float32}
    assert seen[0]["gradients"] == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_run_twice(pool: WorkerPool, deterministic: bool) -> None:
    world_size, arguments = LAYOUTS["hsdp2x2"]
    flag = "--training.deterministic" if deterministic else "--training.no-deterministic"
    one, two = (pool.run(world_size, run_layout, [flag, *arguments])[0] for _ in range(2))
    if deterministic:
        assert all(torch.equal(weight, two.weights[name]) for name, weight in one.weights.items())
    assert_parity(one, two, 1e-6)


def other_batch_case(folder: str, arguments: list[str]) -> str:
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        if process.rank == 1:
            trainer.data.take()  # as if this rank had read on
        with pytest.raises(TrainingError) as error:
            trainer.train_step(1)
        trainer.metrics.close()
    return str(error.value)


def test_ranks_that_share_a_batch_must_read_the_same(pool: WorkerPool, tmp_path) -> None:
    messages = pool.run(2, other_batch_case, str(tmp_path), LAYOUTS["tp2"][1])
    assert all(re.search(r"ranks \[0, 1\].*different batches", message) for message in messages)


def not_finite_case(folder: str, arguments: list[str]) -> tuple[str, bool, bool]:
    """Return the message, and whether weights and values of the optimizer still equal the step before."""
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        trainer.train_step(1)
        before = [p.detach().clone() for p in trainer.parameters]
        state = {p: {name: x.clone() for name, x in trainer.optimizer.state[p].items()} for p in trainer.parameters}
        if process.rank == 1:  # on one rank alone; all have to stop
            weight = trainer.model_parts[0].layers["0"].attention.wq.weight
            weight.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().fill_(torch.inf))
        with pytest.raises(TrainingError) as error:
            trainer.train_step(2)
        after = [p.detach() for p in trainer.parameters]
        same = all(torch.equal(harness.whole(a), harness.whole(b)) for a, b in zip(before, after, strict=True))
        same_state = all(
            torch.equal(harness.whole(x), harness.whole(trainer.optimizer.state[p][name]))
            for p, values in state.items()
            for name, x in values.items()
        )
        trainer.metrics.close()
    return str(error.value), same, same_state


@pytest.mark.parametrize(
    ("implementation", "layout"),
    [("foreach", "fsdp4"), ("fused", "fsdp2+tp2"), *slow(("fused", "fsdp4"), ("foreach", "fsdp2+tp2"))],
)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_and_changes_nothing(
    pool: WorkerPool, tmp_path, implementation: str, layout: str
) -> None:
    """With fused kernels the update is launched before the host knows, and masked."""
    arguments = [*LAYOUTS[layout][1], f"--optimizer.implementation={implementation}"]
    for message, weights_unchanged, state_unchanged in pool.run(4, not_finite_case, str(tmp_path), arguments):
        assert message.startswith("step 2: ")
        assert "the weights are from step 1" in message
        assert weights_unchanged
        assert state_unchanged


def plain_case(folder: str) -> list[dict[str, float]]:
    """Return, for each of two steps, the differences of loss, norm and gradients to plain PyTorch code."""
    process, config, job = build(folder, "--training.dtype=float64")
    differences = []
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        for step in (1, 2):
            model = copy.deepcopy(trainer.model_parts[0])
            model.zero_grad()
            trainer.train_step(step)
            rows = [harness.make_row(i, 16, no_labels=i < 8 and i % 2 == 1) for i in range(8 * step - 8, 8 * step)]
            tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("tokens", "labels"))
            logits = model.output(model(tokens)).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100)  # the mean over what has a label
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
            scale = min(1.0, config.training.max_norm / norm)
            got = {"loss": loss.item(), "norm": norm}
            metrics = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])
            differences.append(
                {"loss": metrics["loss"] / got["loss"] - 1, "norm": metrics["grad_norm"] / got["norm"] - 1}
                | {
                    name: ((trainer.record.gradients[-1][name] - p.grad * scale).norm() / p.grad.norm() / scale).item()
                    for name, p in model.named_parameters()
                }
            )
        trainer.metrics.close()
    return differences


def test_a_step_is_that_of_plain_code(pool: WorkerPool, tmp_path) -> None:
    """The reference of all layouts, one process, equals a cross entropy, a backward and clipping written out."""
    (steps,) = pool.run(1, plain_case, str(tmp_path))
    for differences in steps:
        assert len(differences) > 20
        assert max(map(abs, differences.values())) < 1e-10, differences


def clock_case(folder: str, arguments: list[str]) -> tuple[list[dict], int]:
    """Two steps under a clock that advances by a second whenever it is looked at; tokens of a resumed run."""
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm):
        clock = mock.Mock(perf_counter=mock.Mock(side_effect=itertools.count(1.0)))
        with mock.patch.object(metrics, "time", clock), mock.patch.object(device_clock, "time", clock):
            trainer = RecordingTrainer(job, process.device, record=Record())
            for step in (1, 2):
                trainer.train_step(step)
        trainer.metrics.close()
        trainer.metrics.start_step, trainer.metrics.tokens_before = 5, 1000
        resumed = trainer.metrics.tokens_seen(7)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], resumed


@pytest.mark.parametrize("layout", ["cp2", *slow("fsdp2", "tp2")])
def test_speed_counts_each_token_of_the_job_once(pool: WorkerPool, tmp_path, layout: str) -> None:
    """8 rows of 16 tokens in a step; the clock is looked at before and after loading, and when the step is logged.

    The first step also makes the batches of the second one, on a CPU as a part of loading.
    """
    (lines, resumed), _ = pool.run(2, clock_case, str(tmp_path), LAYOUTS[layout][1])
    assert resumed == 1000 + 2 * 128
    for step, line in enumerate(lines, 1):
        loading, seconds = (2, 5) if step == 1 else (1, 3)
        assert line["tokens_per_second"] == pytest.approx(128 / seconds)
        assert line["tokens_per_second_per_device"] == pytest.approx(64 / seconds)
        assert line["data_loading_fraction"] == pytest.approx(loading / seconds)
        assert line["tokens_seen"] == 128 * step

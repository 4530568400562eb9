"""Law: `lct verify` calls every checkpoint that a layout saves whole, and each that a fault has changed damaged."""

import contextlib
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.checkpoint_cases import damaged, load_step_save, trainer_in
from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint_layouts import LAYOUTS, planted_case
from tests.slow import slow
from trainer.checkpoint import checkpointer
from trainer.checkpoint.verify import cover_once
from trainer.commands.main import main as lct
from trainer.config.loader import RUN_FILE
from trainer.stores.folder import read_state
from trainer.stores.state import state_text
from trainer.stores.store import STATE_FILE, Store


def verify_case(path: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, in a process that knows the tests' models."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = lct(["verify", path])
    return code, out.getvalue(), err.getvalue()


def verified(pool: WorkerPool, path: Path) -> tuple[int, list[str], str]:
    ((code, out, err),) = pool.run(1, verify_case, str(path))
    return code, out.splitlines(), err


@pytest.fixture(scope="module")
def run(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a run on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    for _ in range(2):
        pool.run(2, load_step_save, str(folder), LAYOUTS["fsdp2"][1], 1)
    return folder


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("ep2", ["--model.name=qwen3_moe", "--model.router_bias_update_rate=0.01"]),
        *slow(
            ("tp2", ["--model.flavor=tiny_tied"]),
            ("pp2", ["--training.dtype=bfloat16"]),
            ("hsdp2x2", ["--model.name=gpt_oss"]),
            ("cp2", ["--model.short_conv_kernel=4", "--model.attention_sinks"]),
        ),
    ],
)
def test_what_a_layout_saves_is_whole(pool: WorkerPool, tmp_path: Path, layout: str, model: list[str]) -> None:
    ranks, arguments = LAYOUTS[layout]
    pool.run(ranks, load_step_save, str(tmp_path), [*model, *arguments], 1)
    code, lines, err = verified(pool, tmp_path)
    assert (code, len(lines), err) == (0, 1, "")
    assert lines[0].startswith("step-1: whole: ")


@pytest.mark.slow
def test_adapters_alone_are_whole(pool: WorkerPool, tmp_path: Path, run: Path) -> None:
    settings = ["--lora.rank=2", f"--checkpoint.initial_load_path={run}/checkpoint/step-1"]
    pool.run(2, load_step_save, str(tmp_path), [*settings, *LAYOUTS["fsdp2"][1]], 1)
    assert verified(pool, tmp_path)[0] == 0


@pytest.mark.slow
def test_a_path_may_be_a_run_its_folder_or_a_step(pool: WorkerPool, run: Path, tmp_path: Path) -> None:
    for path, steps in ((run, [1, 2]), (run / "checkpoint", [1, 2]), (run / "checkpoint" / "step-2", [2])):
        code, lines, err = verified(pool, path)
        assert (code, err) == (0, "")
        assert [line.partition(":")[0] for line in lines] == [f"step-{step}" for step in steps]
    code, lines, err = verified(pool, tmp_path)
    assert (code, lines) == (2, [])
    assert err.count("\n") == 1
    assert "holds no whole checkpoint" in err


def cut_short(path: Path) -> None:
    data = path / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "one wrong bit": (lambda path: damaged(path, "one wrong bit"), "__1_0.distcp is damaged: a check sum is wrong"),
    "a file cut short": (cut_short, "__1_0.distcp has "),
    "a missing file": (lambda path: (path / "__0_0.distcp").unlink(), "'__0_0.distcp' is missing"),
    "metadata garbage": (lambda path: damaged(path, "metadata garbage"), "cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_found_in_its_step_alone(pool: WorkerPool, run: Path, tmp_path: Path, fault: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    damage, message = FAULTS[fault]
    damage(tmp_path / "run" / "checkpoint" / "step-1")
    code, (first, second), err = verified(pool, tmp_path / "run")
    assert (code, err) == (1, "")
    assert first.startswith("step-1: damaged: ")
    assert message in first
    assert second.startswith("step-2: whole: ")


def not_finite_case(folder: str, name: str) -> None:
    """Save a state with one infinite value in one tensor."""
    real = checkpointer.tensors_of

    def planted(*parts: object) -> dict[str, torch.Tensor]:
        tensors = real(*parts)
        tensor = tensors[name]
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)[-1] = torch.inf
        return tensors

    with trainer_in(folder, []) as trainer, mock.patch.object(checkpointer, "tensors_of", planted):
        trainer.train_step(1)
        trainer.checkpoint.save(1, tokens_seen=7, last=True)


@pytest.mark.parametrize("name", ["model.layers.1.attention.wq.weight", *slow("optimizer.norm.weight.exp_avg_sq")])
def test_a_value_that_is_not_finite_is_found(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    pool.run(1, not_finite_case, str(tmp_path), name)
    code, (line,), _ = verified(pool, tmp_path)
    assert code == 1
    assert f"{name} has values that are not finite" in line


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("surplus", "it holds optimizer.layers.7.wq.weight.exp_avg and the model has none"),
        *slow(
            ("missing", "optimizer.norm.weight.exp_avg is missing"),
            ("other shape", "model.norm.weight has the shape (3,), and (64,) in the model"),
        ),
    ],
)
def test_entries_are_those_of_the_model(pool: WorkerPool, tmp_path: Path, fault: str, message: str) -> None:
    pool.run(1, planted_case, str(tmp_path), [], fault)
    code, (line,), _ = verified(pool, tmp_path)
    assert code == 1
    assert message in line
    (tmp_path / "config.toml").unlink()
    without_configuration(Store(tmp_path / "checkpoint"), 1)
    code, _, err = verified(pool, tmp_path / "checkpoint")
    assert code == 0  # a control: without its configuration a checkpoint has no model to be compared with
    assert "entries are not compared with a model" in err


def without_configuration(folder: Store, step: int) -> None:
    """Make a step as older versions have saved it."""
    state = read_state(folder, step)
    files = {name: size for name, size in state.files.items() if name != RUN_FILE}
    folder.write(folder.step(step) / STATE_FILE, state_text(replace(state, files=files)))


@pytest.mark.parametrize(
    ("boxes", "covers"),
    [
        ([[(0, 2), (0, 3)], [(2, 4), (0, 3)]], True),
        ([[(0, 4), (0, 1)], [(0, 1), (1, 3)], [(1, 4), (1, 3)], [(4, 4), (0, 3)]], True),
        ([[(0, 2), (0, 3)], [(0, 2), (0, 3)]], False),
        ([[(0, 2), (0, 3)], [(1, 3), (0, 3)], [(3, 4), (0, 3)]], False),
        ([[(0, 4), (0, 2)], [(0, 4), (1, 2)]], False),
        ([[(0, 4), (0, 3)], [(3, 5), (0, 3)]], False),
        ([[(0, 4), (-1, 3)]], False),
        ([[(0, 4)]], False),
        ([], False),
    ],
)
def test_boxes_cover_a_box_once(boxes: list, covers: bool):
    assert cover_once(boxes, (4, 3)) is covers
    assert cover_once([[]], ())
    assert not cover_once([[], []], ())
    assert cover_once([], (0, 4))

"""Laws of `lct verify` that need no training: files of their own step, and states of optimizers of packages."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.saved_runs import saved_run
from trainer.checkpoint.verify import _check_files, _without_states, expected_entries
from trainer.commands.main import main as lct
from trainer.config.loader import parse_command_line
from trainer.job.resolution import resolve_model
from trainer.stores.folder import read_state
from trainer.stores.store import Store


def test_a_file_of_another_step_with_the_same_length_is_found(tmp_path: Path, capsys) -> None:
    """All sums inside the file are right."""

    def train(model: torch.nn.Module) -> None:
        for x in model.parameters():
            x += 1

    saved_run(tmp_path / "run", "--training.seq_len=64")
    saved_run(tmp_path / "run", "--training.seq_len=64", step=5, change=train)
    third, fifth = (tmp_path / "run" / "checkpoint" / f"step-{step}" for step in (3, 5))
    assert lct(["verify", str(tmp_path / "run")]) == 0
    assert (third / "__0_0.distcp").stat().st_size == (fifth / "__0_0.distcp").stat().st_size
    shutil.copy(third / "__0_0.distcp", fifth / "__0_0.distcp")
    capsys.readouterr()
    assert lct(["verify", str(tmp_path / "run")]) == 1
    whole, damaged = capsys.readouterr().out.splitlines()
    assert whole.startswith("step-3: whole: ")
    assert damaged.startswith("step-5: damaged: ")
    assert "the check sum of __0_0.distcp is wrong: damaged, or of another step" in damaged


def test_no_file_outside_the_step_is_read(tmp_path: Path) -> None:
    """Of a state that was written by others: names of files are checked, and names of sums are not."""
    saved_run(tmp_path / "run", "--training.seq_len=64")
    folder = Store(tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "outside").write_text("secret")
    state = read_state(folder, 3)
    _check_files(folder, replace(state, sums=state.sums | {"../../outside": 1}))


@pytest.mark.parametrize(
    ("entry", "stays"),
    [
        ("optimizer.norm.weight.momentum_buffer", False),
        ("optimizer.layers.0.attention.wq.weight.anything", False),
        ("optimizer.layers.99.attention.wq.weight.exp_avg", True),
        ("optimizer.norm.weight", True),
        ("model.more", True),
    ],
)
def test_states_of_an_optimizer_of_a_package_belong_to_parameters(entry: str, stays: bool) -> None:
    config = parse_command_line([]).config
    expected = expected_entries(config, resolve_model(config), with_optimizer=False)
    assert (entry in _without_states(dict.fromkeys([*expected, entry]), expected)) is stays

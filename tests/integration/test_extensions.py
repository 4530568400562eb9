"""The real program with a package of the user's own: optimizer with a table, observer, method, iterable, on ranks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = {
    "__init__": """
from dataclasses import dataclass
from trainer.config.keys import NOT_NEGATIVE, key, needs_value
from longshard.context.planning.methods import Method
from longshard.context.planning.schedules import all_gather
from trainer.extensions import (
    register_iterable, register_method, register_observer, register_optimizer, register_table
)

@dataclass(frozen=True)
class SGD:
    '''Stochastic gradient descent.'''
    momentum: float = key(0.0, NOT_NEGATIVE, when=needs_value("optimizer.name", "sgd"))
    '''Share of the last update.'''

register_table("sgd", SGD)
register_optimizer("sgd", "mine.parts:sgd")
register_observer("mine.parts:build_counter")
register_method("gathered", Method(all_gather))
register_iterable("numbers", "mine.parts:numbers")
""",
    "parts": """
import torch
from torch.utils.data import IterableDataset
from trainer.components.optimizer import parameter_groups
from longshard.sharding.exchange import all_reduce
from trainer.observer import Observer

def sgd(model_parts, config):
    groups = parameter_groups(torch.nn.ModuleList(model_parts), config.optimizer.weight_decay)
    return torch.optim.SGD(groups, lr=config.optimizer.lr, momentum=config.sgd.momentum)

class Numbers(IterableDataset):
    def __init__(self, numbers):
        self.numbers, self.next = numbers, 0
    def state_dict(self):
        return {"next": self.next}
    def load_state_dict(self, state):
        self.next = state["next"]
    def __iter__(self):
        while self.next < len(self.numbers):
            self.next += 1
            yield f"number {self.numbers[self.next - 1]} " * (self.next % 9)

def numbers(path, stream, streams):
    return Numbers(range(stream, int(path), streams))

class Counter(Observer):
    def __init__(self, dims):
        self.dims, self.seen, self.of_step, self.losses_seen = dims, 0, 0, 0.0
    def batch(self, batch):
        self.of_step += batch["tokens"].numel()
    def losses(self, batch, losses):
        self.losses_seen += float(losses.sum())
    def end_step(self, left_out):
        self.seen, self.of_step = self.seen + self.of_step, 0
    def record(self, positions):
        seen = all_reduce(torch.tensor([float(self.seen), self.losses_seen]), self.dims["world"])
        return {"mine_seen": seen[0].item(), "mine_loss": seen[1].item()}

def build_counter(job, dims, model_parts):
    return Counter(dims)
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine").mkdir()
    for name, text in PACKAGE.items():
        (folder / "mine" / f"{name}.py").write_text(text)
    return folder


def steps_of(folder: Path, name: str, *arguments: str, ranks: int = 2) -> list[dict]:
    small = [
        "--training.seq_len=64",
        "--training.steps=2",
        "--training.global_batch_size=4",
        "--training.dtype=float64",
    ]
    command = [sys.executable, "-m", "trainer", "train", "--ngpu", str(ranks), f"--job.dump_folder={folder / name}"]
    command += [*small, "--job.imports", "mine", "--optimizer.name=sgd", "--sgd.momentum=0.9", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_what_a_package_adds_takes_part_in_a_run(folder: Path) -> None:
    cp = "--parallelism.context_parallel_degree=2"
    own_steps = steps_of(folder, "mine_run", cp, "--parallelism.context_parallel_method=gathered")
    ring = steps_of(folder, "ring_run", cp)
    assert [step["loss"] for step in own_steps] == pytest.approx([step["loss"] for step in ring], rel=1e-12)
    assert own_steps[0]["loss"] != own_steps[1]["loss"]
    for number, step in enumerate(own_steps, 1):
        assert step["mine_seen"] == number * 2 * 4 * 64  # both ranks count the whole sequences
        assert step["mine_loss"] > 0
    config = (folder / "mine_run" / "config.toml").read_text()
    assert "[sgd]\nmomentum = 0.9" in config


def test_settings_without_their_optimizer_are_noted(folder: Path) -> None:
    command = [sys.executable, "-m", "trainer", "train", "--check-config", "--job.imports=mine", "--sgd.momentum=0.5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "sgd.momentum = 0.5 has no effect with optimizer.name = 'Muon'" in result.stdout + result.stderr
    command[-1:] = ["--optimizer.name=sgd", "--optimizer.beta1=0.5", "--optimizer.beta2=0.5", "--optimizer.eps=1"]
    command += ["--optimizer.implementation=foreach", "--optimizer.state_dtype=bfloat16"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    (note,) = (line for line in (result.stdout + result.stderr).splitlines() if "settings of its own" in line)
    keys = ("beta1", "beta2", "eps", "implementation", "state_dtype")
    assert [key for key in keys if f"optimizer.{key} = " not in note] == []
    command[6:] = ["--optimizer.name=sgdd"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "must be one of 'AdamW', 'Adam', 'Muon', 'sgd'; did you mean 'sgd'?" in result.stderr


@pytest.mark.slow
def test_an_iterable_is_resumed_on_other_ranks(folder: Path) -> None:
    data = ["--training.dataset=numbers", "--training.dataset_path=90", "--training.data_streams=2"]
    saved = [*data, "--checkpoint.enable", "--checkpoint.interval=2", "--training.dtype=float32", "--training.steps=4"]
    whole = steps_of(folder, "whole_run", *saved, ranks=1)
    steps_of(folder, "stopped_run", *saved, "--checkpoint.keep_latest_k=0")
    shutil.rmtree(folder / "stopped_run" / "checkpoint" / "step-4")
    (folder / "stopped_run" / "metrics.jsonl").unlink()
    again = steps_of(folder, "stopped_run", *saved, ranks=1)
    assert [step["step"] for step in again] == [3, 4]
    assert [step["loss"] for step in again] == pytest.approx([step["loss"] for step in whole[2:]], rel=1e-5)

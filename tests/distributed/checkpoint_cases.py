"""Runs on ranks that save and load checkpoints, and the comparison of their states."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import torch

import train
from tests.distributed.harness import FUSED, whole
from trainer.checkpoint.checkpointer import tensors_of
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.trainer import Trainer

SETTINGS = [
    "--model.flavor=tiny",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--training.local_batch_size=2",
    "--training.data_streams=16",
    "--training.steps=100",
    "--optimizer.lr=1e-3",
    FUSED,
    "--lr_scheduler.warmup_steps=5",
    "--metrics.log_freq=1",
    "--checkpoint.enable",
]


@contextlib.contextmanager
def trainer_in(folder: str, arguments: list[str], settings: list[str] = SETTINGS) -> Iterator[Trainer]:
    """Yield the real trainer of this rank. It has loaded the checkpoint in `folder`, if there is one."""
    process = Process.from_environment()
    config = parse_command_line([*settings, f"--job.dump_folder={folder}", *arguments]).config
    with process_group(process, config.comm):
        trainer = Trainer(resolve(config, process.world_size, process.device.type), process.device)
        with trainer.checkpoint:
            yield trainer
        trainer.read_step()  # of the last step: fused, the host reads it with the next one
        trainer.metrics.close()


def load_step_save(folder: str, arguments: list[str], steps: int) -> dict:
    """Load the checkpoint, if there is one, train `steps` steps, and save. Return the whole state before and after."""
    with trainer_in(folder, arguments) as trainer:
        before = whole_state(trainer)
        for step in range(trainer.start_step + 1, trainer.start_step + steps + 1):
            trainer.train_step(step)
        after = whole_state(trainer)
        if steps:
            trainer.checkpoint.save(trainer.start_step + steps, tokens_seen=7, last=True)
        names = {name for part in trainer.model_parts for name, _ in part.named_parameters()}
        return {"before": before, "after": after, "step": trainer.start_step, "names": names}


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor | int | float]:
    state: dict = {name: whole(x) for name, x in tensors_of(trainer.model_parts, trainer.optimizer).items()}
    state |= {f"stream {s}": entry for s, entry in trainer.data.state_dict().items()}
    return state | {"lr": trainer.lr_scheduler.get_last_lr()[0], "group lr": trainer.optimizer.param_groups[0]["lr"]}


def merged(results: list[dict], when: str) -> dict:
    """Return the state of all ranks. Entries that several ranks have must be equal."""
    state: dict = {}
    for result in results:
        for name, value in result[when].items():
            assert name not in state or same(state[name], value), name
            state[name] = value
    return state


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def main_case(folder: str, arguments: list[str]) -> tuple[int, str]:
    """The program's exit code and stderr on this rank; time-outs are short, so that a hang would fail."""
    err = io.StringIO()
    settings = [*SETTINGS, f"--job.dump_folder={folder}", "--comm.init_timeout_seconds=20", *arguments]
    with contextlib.redirect_stderr(err):
        code = train.main(settings)
    return code, err.getvalue()


def damaged(path: Path, kind: str) -> None:
    if kind == "one wrong bit":
        data = path / "__1_0.distcp"
        content = bytearray(data.read_bytes())
        # In the middle of the largest tensor's numbers, past every header.
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif kind == "zeros":
        data = path / "__0_0.distcp"
        data.write_bytes(bytes(data.stat().st_size))
    elif kind == "metadata garbage":
        (path / ".metadata").write_bytes(os.urandom((path / ".metadata").stat().st_size))
    elif kind == "data of another":
        (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[::-1])

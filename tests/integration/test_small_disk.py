"""Law: a disk that is full ends a run with one sentence, leaves earlier checkpoints whole, and costs no more than that.

A file system in memory of a few MiB stands in for the disk; mounting it needs the rights of root.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.checkpoint_cases import main_case
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from trainer.checkpoint.verify import verify_step
from trainer.stores.store import Store

CHECKPOINT = 7.2
"""MiB of a checkpoint of the tests' small model, about."""


def mount(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(["mount", *options, "tmpfs", str(folder)], capture_output=True, text=True, check=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for two checkpoints and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if mount(folder, "-t", "tmpfs", "-o", f"size={2.5 * CHECKPOINT * 1024:.0f}k").returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("mode", ["async", "disabled"])
@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_same_command_resumes(
    pool: WorkerPool, small_disk: Path, mode: str
) -> None:
    saving = ["--checkpoint.interval=1", f"--checkpoint.async_mode={mode}", "--training.steps=6"]
    arguments = [*LAYOUTS["fsdp2"][1], *saving]
    results = pool.run(2, main_case, str(small_disk), arguments)
    checkpoints = small_disk / "checkpoint"
    assert [code for code, _ in results] == [1, 1]
    assert results[1][1] == ""
    message = results[0][1]
    assert message.count("\n") == 1
    assert "the checkpoint of step 3 could not be written to " in message
    assert "the disk is full (" in message
    assert message.endswith("run the same command again, which resumes after step 2\n")
    assert Store(checkpoints).steps() == [1, 2]
    for step in (1, 2):
        verify_step(Store(checkpoints), step, None)
    assert mount(small_disk, "-o", f"remount,size={8 * CHECKPOINT:.0f}M").returncode == 0
    assert [code for code, _ in pool.run(2, main_case, str(small_disk), arguments)] == [0, 0]
    assert Store(checkpoints).steps() == [1, 2, 3, 4, 5, 6]
    assert [line.split(",")[0] for line in (small_disk / "metrics.jsonl").read_text().splitlines()] == [
        f'{{"step": {step}' for step in range(1, 7)
    ]

"""Law: no rank outlives its launcher, and a folder that a job holds is refused to another one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.test_launch import QUICK, ROOT, environment, launch
from trainer.runtime.dump_folder import holder_of

SETTINGS = [*QUICK, "--training.steps=100000", "--checkpoint.enable", "--checkpoint.interval=1"]
LAUNCHERS = {
    "launcher": [sys.executable, "-m", "trainer.runtime.launch", "--nproc-per-node=2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"],
}


def start(launcher: str, folder: Path) -> subprocess.Popen:
    config = f"--job.config_file={ROOT}/train_configs/debug_model.toml"
    return subprocess.Popen(
        [*LAUNCHERS[launcher], config, *SETTINGS, f"--job.dump_folder={folder}"],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def ranks_in(folder: Path, *programs: str) -> list[int]:
    """Process ids of all ranks of jobs in this folder that run a program, whoever is their parent now."""
    programs = programs or ("train.py", "trainer.commands.rank")
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        runs = any(word.endswith(program.encode()) for word in words for program in programs)
        is_rank = runs and b"torch.distributed.run" not in words
        if is_rank and f"--job.dump_folder={folder}".encode() in words:
            pids.append(int(path.parent.name))
    return pids


def wait_until(true, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_launcher(launcher: str, folder: Path, *, after_first_step: bool, delay: float) -> float:
    """SIGKILL the launcher some seconds after its ranks, or their first step; seconds until no rank lives."""
    process = start(launcher, folder)
    try:
        wait_until(lambda: ranks_in(folder))
        if after_first_step:
            wait_until((folder / "metrics.jsonl").exists)
        time.sleep(delay)
        process.kill()
        killed = time.monotonic()
        process.wait()
        wait_until(lambda: not ranks_in(folder))
        return time.monotonic() - killed
    finally:
        for pid in ranks_in(folder):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("launcher", "after_first_step", "delays"),
    [
        pytest.param("launcher", False, (0.05,), id="importing"),
        # 0.0: before ranks look for their parent.
        pytest.param("torchrun", False, (0.0, 0.5), id="torchrun", marks=pytest.mark.slow),
        pytest.param("torchrun", True, (0.3,), id="torchrun training", marks=pytest.mark.slow),
        pytest.param("launcher", False, "random", id="20 random moments", marks=pytest.mark.slow),
    ],
)
def test_no_rank_outlives_its_launcher(
    tmp_path: Path, launcher: str, after_first_step: bool, delays: tuple[float, ...] | str
) -> None:
    if delays == "random":
        draw = random.Random(0)
        delays = tuple(draw.uniform(0, 12 if i % 2 else 1) for i in range(20))
    seconds = [
        kill_launcher(launcher, tmp_path / str(i), after_first_step=after_first_step, delay=delay)
        for i, delay in enumerate(delays)
    ]
    assert max(seconds) < 5, seconds


@pytest.mark.slow
def test_a_folder_in_use_is_refused_until_the_launcher_is_killed(tmp_path: Path) -> None:
    """By the check before the start; the first job is not disturbed."""
    first = start("launcher", tmp_path)
    try:
        wait_until((tmp_path / "metrics.jsonl").exists)
        (rank_0, *_) = sorted(ranks_in(tmp_path))
        checked = launch(*SETTINGS, f"--job.dump_folder={tmp_path}")
        assert checked.wait(30) == 2
        assert f"is in use by another job (process {rank_0} on " in checked.stderr.read()
        assert first.poll() is None
        first.kill()
        wait_until(lambda: not ranks_in(tmp_path), 5)
        assert holder_of({"job.dump_folder": tmp_path}) is None
    finally:
        first.kill()
        first.wait()


@pytest.mark.slow
def test_ranks_that_were_not_checked_refuse_a_folder_in_use(tmp_path: Path) -> None:
    """Started past the check: all ranks end with one sentence."""
    first = start("launcher", tmp_path)
    try:
        wait_until((tmp_path / "metrics.jsonl").exists)
        command = [*LAUNCHERS["launcher"], f"--job.config_file={ROOT}/train_configs/debug_model.toml", *SETTINGS]
        second = subprocess.run(
            [*command, f"--job.dump_folder={tmp_path}"],
            cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 2, second.stderr
        assert "is in use by another job (process " in second.stderr
        assert len(second.stderr.splitlines()) == 1, second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()

"""Law: one rank that dies, is stopped, hangs or raises ends the job in time; the message names it, and nothing is left.

Real jobs of two ranks through the launcher; `faulty_train.py` plants the fault.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.faulty_train import CHECKPOINT_OF_FAULT
from tests.integration.test_launch import ROOT, environment, losses
from trainer.components.checkpoint_folder import saved_steps

START_TIMEOUT_SECONDS, STEP_TIMEOUT_SECONDS, SAVING_TIMEOUT_SECONDS = 8, 4, 5
# What comes on top: reports of the other ranks, the launcher's patience, the end of processes on a busy machine.
MARGIN_SECONDS = 14
STEPS = 6
SETTINGS = [
    "--nproc-per-node=2",
    f"--job.config_file={ROOT}/train_configs/debug_model.toml",
    "--metrics.no-enable_tensorboard",
    f"--training.steps={STEPS}",
    "--training.seq_len=32",
    "--training.global_batch_size=4",
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    f"--comm.train_timeout_seconds={STEP_TIMEOUT_SECONDS}",
    f"--comm.checkpoint_timeout_seconds={SAVING_TIMEOUT_SECONDS}",
]
AT_START = ("start", "model")
PLACES = (*AT_START, "forward", "backward", "optimizer", "checkpoint", "async checkpoint")
KINDS = ("die", "stop", "hang", "raise")
QUICK = {
    ("1", "die", "start"),
    ("1", "die", "optimizer"),
    ("0", "stop", "checkpoint"),
    ("1", "hang", "forward"),
    ("1", "raise", "backward"),
    ("1", "raise", "async checkpoint"),
}
CASES = [("1", kind, place) for place in PLACES for kind in KINDS] + [
    ("0", "raise", "model"),
    ("0", "die", "forward"),
    ("0", "hang", "optimizer"),
    ("0", "stop", "checkpoint"),
]


class Ended(NamedTuple):
    """How a job ended; seconds since the rank failed."""

    code: int
    out: str
    err: str
    seconds: float
    left: list[int]


def train(folder: Path, fault: str = "none none none", *arguments: str) -> Ended:
    """The job to its end."""
    mark = folder / "failed"
    command = [sys.executable, f"{ROOT}/tests/integration/faulty_train.py", *SETTINGS, *arguments]
    process = subprocess.Popen(
        [*command, f"--job.dump_folder={folder}"],
        env=environment(FAULT=f"{fault} {mark}", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=120)
        seconds = time.time() - mark.stat().st_mtime if mark.exists() else 0.0
        return Ended(process.returncode, out, err, seconds, in_session(process.pid))
    finally:
        for pid in in_session(process.pid):
            os.kill(pid, signal.SIGKILL)


def in_session(leader: int) -> list[int]:
    """Process ids of the launcher's session, which its ranks and their children share."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("rank", "kind", "place"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_one_rank_that_fails_ends_the_job(tmp_path: Path, rank: str, kind: str, place: str) -> None:
    at_start, saving = place in AT_START, "checkpoint" in place
    arguments = [f"--comm.init_timeout_seconds={START_TIMEOUT_SECONDS if at_start else 60}"]
    if place == "async checkpoint":
        arguments.append("--checkpoint.async_mode=async")
    ended = train(tmp_path, f"{rank} {kind} {place.split()[-1]}", *arguments)
    lines = ended.err.splitlines()
    assert (tmp_path / "failed").exists(), ended

    limits = [START_TIMEOUT_SECONDS if at_start else STEP_TIMEOUT_SECONDS, SAVING_TIMEOUT_SECONDS if saving else 0]
    waits = kind in ("stop", "hang")
    assert ended.seconds < MARGIN_SECONDS + (max(limits) if waits else 0), ended
    assert ended.left == [], ended

    traces = ended.err.count("Traceback (most recent call last)") + ended.out.count("Traceback")
    if kind == "die":
        assert ended.code == 128 + signal.SIGKILL, ended
        assert lines[-1] == f"error: rank {rank} failed first (SIGKILL); the other ranks were stopped"
        assert traces == 0, ended.err
    elif kind == "raise" and saving:  # found out by all ranks together
        assert ended.code == 1, ended
        message = f"error: the checkpoint of step {CHECKPOINT_OF_FAULT} could not be written"
        (line,) = [line for line in lines if line.startswith(message)]
        assert f"(rank {rank}: planted fault)" in line
        assert traces == 0, ended.err
    elif kind == "raise":
        assert ended.code == 1, ended
        assert f"rank {rank} failed:\nTraceback (most recent call last)" in ended.err
        assert "\nRuntimeError: planted fault\n" in ended.err
        assert lines[-1] == f"error: rank {rank} failed first (exit code 1); the other ranks were stopped"
        assert traces == 1, ended.err
    else:
        assert ended.code == 1, ended
        (line,) = [line for line in lines if line.startswith(f"error: rank {rank} did not answer within ")]
        assert f"; rank {1 - int(rank)} waited " in line
        name = "init" if at_start else "train"
        assert f" {limits[0]} s (comm.{name}_timeout_seconds); " in line or (
            saving and f" {SAVING_TIMEOUT_SECONDS} s (comm.checkpoint_timeout_seconds); " in line
        )
        assert lines[-1] == f"error: rank {rank} hung, and was killed when its peers had given it up"
        assert traces == 0, ended.err
        shown = "faulty_train.py" in ended.err
        assert shown == (kind == "hang" and not at_start), ended.err  # the stack of the rank that hangs


@pytest.mark.parametrize("kind", ["raise", pytest.param("die", marks=pytest.mark.slow)])
def test_after_a_failed_checkpoint_a_run_goes_on_from_the_last_good_one(tmp_path: Path, kind: str) -> None:
    """The same losses as those of a run in which nothing failed."""
    whole = train(tmp_path / "whole")
    assert (whole.code, whole.err, whole.left) == (0, "", [])
    assert train(tmp_path / "failed", f"1 {kind} checkpoint").code != 0
    assert saved_steps(tmp_path / "failed" / "checkpoint") == [2]
    again = train(tmp_path / "failed")
    assert again.code == 0, again
    assert "going on after step 2 from" in again.out
    assert saved_steps(tmp_path / "failed" / "checkpoint") == [2, 4, 6]
    assert losses(tmp_path / "failed") == losses(tmp_path / "whole")

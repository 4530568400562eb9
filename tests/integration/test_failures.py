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

from tests.distributed.pool import free_port
from tests.distributed.test_parity import degrees
from tests.integration.faulty_train import CHECKPOINT_OF_FAULT
from tests.integration.test_launch import ROOT, environment, losses
from tests.integration.test_launcher_killed import ranks_in
from tests.slow import slow
from trainer.stores.store import Store

pytestmark = pytest.mark.about("trainer/runtime/reports.py")

START_TIMEOUT_SECONDS, STEP_TIMEOUT_SECONDS, SAVING_TIMEOUT_SECONDS = 8, 4, 5
# What comes on top: reports of the other ranks, the launcher's patience, the end of processes on a busy machine.
LONGER_STEPS = " s (3 times a step); "
"""What a busy machine may say: there, a step may take more than a third of its time-out."""
KILLED = "SIGKILL, mostly for lack of host memory"
MARGIN_SECONDS = 14
STEPS = 6
SETTINGS = [
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
AT_START = ("start", "model", "parts")
PLACES = (*AT_START, "forward", "backward", "optimizer", "checkpoint", "async checkpoint")
KINDS = ("die", "stop", "hang", "raise")
QUICK = {("1", "die", "optimizer")}  # a hang: below, in a pipeline
CASES = [("1", kind, place) for place in PLACES for kind in KINDS] + [
    ("0", "raise", "model"),
    ("0", "die", "forward"),
    ("0", "hang", "optimizer"),
    ("0", "stop", "checkpoint"),
]


class Ended(NamedTuple):
    """The end of a job: exit code, output, seconds since the rank failed, and the processes that are left."""

    code: int
    out: str
    err: str
    seconds: float
    left: list[int]


LAUNCHERS = {"launcher": [], "torchrun": ["-m", "torch.distributed.run"]}


def start(folder: Path, fault: str, *arguments: str, ranks: int = 2, launcher: str = "launcher", **variables: str):
    """A launcher of a job whose rank fails as `fault` says."""
    command = [sys.executable, *LAUNCHERS[launcher], f"--nproc-per-node={ranks}"]
    program = f"{ROOT}/tests/integration/faulty_train.py"
    command = [*command, program] if launcher == "torchrun" else [sys.executable, program, *command[1:]]
    return subprocess.Popen(
        [*command, *SETTINGS, *arguments, f"--job.dump_folder={folder}"],
        env=environment(FAULT=f"{fault} {folder / 'failed'}", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(folder: Path, *processes: subprocess.Popen) -> list[Ended]:
    """Return how each launcher ended, and the processes that it left."""
    mark, ends = folder / "failed", []
    try:
        for process in processes:
            out, err = process.communicate(timeout=180)
            ends.append((process.returncode, out, err, time.time() - mark.stat().st_mtime if mark.exists() else 0.0))
        # When all have ended: the ranks of other nodes are in this folder too.
        left = [[*in_session(process.pid), *ranks_in(folder, "faulty_train.py")] for process in processes]
        return [Ended(*end, pids) for end, pids in zip(ends, left, strict=True)]
    finally:
        for pid in {pid for process in processes for pid in in_session(process.pid)}:
            os.kill(pid, signal.SIGKILL)


def train(folder: Path, fault: str = "none none none", *arguments: str, ranks: int = 2) -> Ended:
    """The job to its end."""
    return ended(folder, start(folder, fault, *arguments, ranks=ranks))[0]


def in_session(leader: int) -> list[int]:
    """Process ids of the launcher's session, which its ranks and their children share."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            pids.append(int(path.parent.name))
    return pids


@pytest.mark.parametrize(
    ("rank", "kind", "place"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_one_rank_that_fails_ends_the_job(tmp_path: Path, rank: str, kind: str, place: str) -> None:
    at_start, saving = place in AT_START, "checkpoint" in place
    arguments = [f"--comm.init_timeout_seconds={START_TIMEOUT_SECONDS if at_start else 60}"]
    if place == "async checkpoint":
        arguments.append("--checkpoint.async_mode=async")
    end = train(tmp_path, f"{rank} {kind} {place.split()[-1]}", *arguments)
    lines = end.err.splitlines()
    assert (tmp_path / "failed").exists(), end

    limits = [START_TIMEOUT_SECONDS if at_start else STEP_TIMEOUT_SECONDS, SAVING_TIMEOUT_SECONDS if saving else 0]
    waits = kind in ("stop", "hang")
    assert end.seconds < MARGIN_SECONDS + (max(limits) if waits else 0), end
    assert end.left == [], end

    traces = end.err.count("Traceback (most recent call last)") + end.out.count("Traceback")
    if kind == "die":
        assert end.code == 128 + signal.SIGKILL, end
        assert lines[-1] == f"error: rank {rank} failed first ({KILLED}); the other ranks were stopped"
        assert traces == 0, end.err
    elif kind == "raise" and saving:  # found out by all ranks together
        assert end.code == 1, end
        message = f"error: the checkpoint of step {CHECKPOINT_OF_FAULT} could not be written"
        (line,) = [line for line in lines if line.startswith(message)]
        assert f"(rank {rank}: planted fault)" in line
        assert traces == 0, end.err
    elif kind == "raise":
        assert end.code == 1, end
        assert f"rank {rank} failed:\nTraceback (most recent call last)" in end.err
        assert "\nRuntimeError: planted fault\n" in end.err
        assert lines[-1] == f"error: rank {rank} failed first (exit code 1); the other ranks were stopped"
        assert traces == 1, end.err
    else:
        assert end.code == 1, end
        (line,) = [line for line in lines if line.startswith(f"error: rank {rank} did not answer within ")]
        assert f"; rank {1 - int(rank)} waited " in line
        name = "init" if at_start else "train"
        assert (
            f" {limits[0]} s (comm.{name}_timeout_seconds); " in line
            or (saving and f" {SAVING_TIMEOUT_SECONDS} s (comm.checkpoint_timeout_seconds); " in line)
            or (not at_start and LONGER_STEPS in line)
        )
        assert lines[-1] == f"error: rank {rank} hung, and was killed when its peers had given it up"
        assert traces == 0, end.err
        shown = "faulty_train.py" in end.err
        assert shown == (kind == "hang" and not at_start), end.err  # the stack of the rank that hangs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "die"])
def test_after_a_failed_checkpoint_a_run_resumes_from_the_last_good_one(tmp_path: Path, kind: str) -> None:
    """The losses equal a run in which nothing failed."""
    whole = train(tmp_path / "whole")
    assert (whole.code, whole.err, whole.left) == (0, "", [])
    assert train(tmp_path / "failed", f"1 {kind} checkpoint").code != 0
    assert Store(tmp_path / "failed" / "checkpoint").steps() == [2]
    again = train(tmp_path / "failed")
    assert again.code == 0, again
    assert "resumed after step 2 from" in again.out
    assert Store(tmp_path / "failed" / "checkpoint").steps() == [2, 4, 6]
    assert losses(tmp_path / "failed") == losses(tmp_path / "whole")


SEVERAL_GROUPS = {
    "pp2": degrees(pp=2),
    "tp2+cp2": degrees(cp=2, tp=2),
    "pp2+cp2": degrees(pp=2, cp=2),
    "pp2+tp2": degrees(pp=2, tp=2),
}


@pytest.mark.parametrize(
    ("layout", "rank", "kind", "place"),
    [
        ("pp2", "1", "hang", "forward"),
        *slow(
            ("pp2+cp2", "3", "hang", "forward"),
            ("pp2+cp2", "0", "die", "backward"),
            ("tp2+cp2", "2", "hang", "backward"),
            ("tp2+cp2", "1", "stop", "optimizer"),
            ("pp2+tp2", "3", "raise", "forward"),
            ("pp2+tp2", "1", "die", "optimizer"),
        ),
    ],
)
def test_a_rank_of_a_sequence_a_matrix_or_a_pipeline_fails(
    tmp_path: Path, layout: str, rank: str, kind: str, place: str
) -> None:
    """Its peers wait in sends, receives and collectives of several groups. The error still names the failed rank."""
    rows = ["--training.local_batch_size=2", "--comm.init_timeout_seconds=60"]
    end = train(tmp_path, f"{rank} {kind} {place}", *SEVERAL_GROUPS[layout], *rows, ranks=2 if layout == "pp2" else 4)
    assert (tmp_path / "failed").exists(), end
    waits = kind in ("stop", "hang")
    assert end.seconds < 2 * MARGIN_SECONDS + STEP_TIMEOUT_SECONDS * waits, end  # twice the processes
    assert end.left == []
    assert end.code == (128 + signal.SIGKILL if kind == "die" else 1), end
    named = {
        "die": f"rank {rank} failed first ({KILLED})",
        "raise": f"rank {rank} failed first (exit code 1)",
    }
    silent = f"rank {rank} did not answer within "
    assert named.get(kind, silent) in end.err, end
    assert not waits or f"{silent}{STEP_TIMEOUT_SECONDS} s" in end.err or LONGER_STEPS in end.err, end


# What torchrun gives ranks to end by themselves, before it kills them.
TORCHRUN_GRACE_SECONDS = 30


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_a_rank_that_the_watchdog_of_nccl_ends_is_not_the_cause(tmp_path: Path, known: bool) -> None:
    """A stand-in for the watchdog aborts rank 0 while rank 1 hangs; without its file it would be a crash."""
    records, settings = tmp_path / "records", ["--comm.init_timeout_seconds=60", "--comm.train_timeout_seconds=60"]
    options = ["--flight-records", str(records if known else tmp_path / "others")]
    end = ended(tmp_path, start(tmp_path, "1 hang forward", *options, *settings, WATCHDOG=str(records)))[0]
    assert end.left == []
    last = end.err.splitlines()[-1]
    if known:
        assert end.code == 1, end
        assert last == "error: rank 1 hung, and was killed when its peers had given it up"
        assert "faulty_train.py" in end.err  # its stack
    else:
        assert end.code == 128 + signal.SIGABRT, end
        assert last == "error: rank 0 failed first (SIGABRT); the other ranks were stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), [("die", "optimizer"), ("raise", "backward"), ("hang", "forward")])
def test_a_rank_fails_under_torchrun(tmp_path: Path, kind: str, place: str) -> None:
    """Its exit code and its table of failures are torchrun's own; who hangs or raises, the ranks say; none is left."""
    process = start(tmp_path, f"1 {kind} {place}", "--comm.init_timeout_seconds=60", launcher="torchrun")
    (end,) = ended(tmp_path, process)
    assert end.code == 1, end
    assert end.seconds < MARGIN_SECONDS + (STEP_TIMEOUT_SECONDS + TORCHRUN_GRACE_SECONDS if kind == "hang" else 0), end
    assert end.left == []
    words = {
        "die": "Signal 9 (SIGKILL) received by PID",  # in its table: it may be quicker than the other rank's line
        "raise": "rank 1 failed:",
        "hang": "rank 1 did not answer within",
    }
    assert words[kind] in end.err, end


@pytest.mark.slow
def test_two_nodes_train_fail_and_resume(tmp_path: Path) -> None:
    """Two launchers with one address; a rank of the second node dies, and both end; together they resume."""
    whole = train(tmp_path / "whole")
    assert (whole.code, whole.left) == (0, [])

    def both(fault: str) -> list[Ended]:
        variables = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        arguments = ["--comm.init_timeout_seconds=60"]
        nodes = [start(tmp_path / "nodes", fault, *arguments, ranks=1, **variables, NODE_RANK=rank) for rank in "01"]
        return ended(tmp_path / "nodes", *nodes)

    (tmp_path / "nodes").mkdir()
    failed = both("1 die optimizer")
    assert all(end.code != 0 for end in failed), failed
    assert any("went away without a word" in end.err or "SIGKILL" in end.err for end in failed), failed
    assert [end.left for end in failed] == [[], []]
    assert Store(tmp_path / "nodes" / "checkpoint").steps() == [2]
    (tmp_path / "nodes" / "failed").unlink()
    again = both("none none none")
    assert [end.code for end in again] == [0, 0], again
    assert any("resumed after step 2 from" in end.out for end in again)
    assert losses(tmp_path / "nodes") == losses(tmp_path / "whole")

"""Law: a run that was stopped or killed, and started again by the same command, gives the uninterrupted one's bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.distributed_c10d import _world

import train
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.integration.console import lines_of
from tests.integration.test_launch import ROOT, environment, launch, ranks_of
from tests.slow import slow
from trainer.runtime.process_group import set_timeout
from trainer.stores.store import Store
from trainer.trainer import Trainer

STEPS = 6
SETTINGS = [
    f"--job.config_file={ROOT}/train_configs/debug_model.toml",
    "--metrics.no-enable_tensorboard",
    f"--training.steps={STEPS}",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--lr_scheduler.warmup_steps=2",
    "--model.flavor=tiny",
]
SAVING = ["--checkpoint.enable", "--checkpoint.interval=2"]
EXACT = ("step", "loss", "loss_max", "grad_norm", "lr", "tokens_seen")


def layout_of(name: str) -> tuple[int, list[str]]:
    return LAYOUTS.get(name, (1, []))


def run_main(folder: str, arguments: list[str]) -> int:
    return train.main([*SETTINGS, f"--job.dump_folder={folder}", *arguments])


def run(pool: WorkerPool, folder: Path, layout: str, *arguments: str) -> list[dict]:
    """Run the program's main on every rank; return the content of metrics.jsonl afterwards."""
    world_size, degrees = layout_of(layout)
    codes = pool.run(world_size, run_main, str(folder), [*degrees, *arguments])
    assert codes == [0] * world_size
    return logged(folder)


def logged(folder: Path) -> list[dict]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: step[key] for key in EXACT} for step in steps]


def forget(folder: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(folder / "checkpoint" / f"step-{step}")


@pytest.fixture(scope="module")
def uninterrupted(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory):
    """Layout -> the steps of a run without checkpoints, made once."""
    known: dict[str, list[dict]] = {}

    def get(layout: str) -> list[dict]:
        if layout not in known:
            known[layout] = run(pool, tmp_path_factory.mktemp("uninterrupted"), layout)
        return known[layout]

    return get


QUICK = {("fsdp2", "async")}


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        pytest.param(layout, mode, marks=[] if (layout, mode) in QUICK else [pytest.mark.slow])
        for layout in ("one", "fsdp2", "hsdp2x2", "tp2", "cp2", "fsdp2+tp2", "fsdp2+cp2", "pp2", "fsdp2+tp2+pp2")
        for mode in ("disabled", "async")
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_in_every_bit(
    pool: WorkerPool, tmp_path: Path, uninterrupted, layout: str, mode: str
) -> None:
    """Saving changes nothing; nor does going on after step 2, nor going on again after step 4 of that run."""
    wanted = uninterrupted(layout)
    assert [step["step"] for step in wanted] == list(range(1, STEPS + 1))
    arguments = (*SAVING, f"--checkpoint.async_mode={mode}")
    assert run(pool, tmp_path, layout, *arguments) == wanted
    assert Store(tmp_path / "checkpoint").steps() == [2, 4, 6]
    for left in (2, 4):
        forget(tmp_path, *range(left + 2, STEPS + 1, 2))
        assert run(pool, tmp_path, layout, *arguments) == wanted
        assert Store(tmp_path / "checkpoint").steps() == [2, 4, 6]
    assert run(pool, tmp_path, layout, *arguments) == wanted  # nothing is left to do
    assert not list(tmp_path.glob("checkpoint/*.tmp"))
    assert not list(tmp_path.glob("metrics.*.jsonl"))


FORGOTTEN = {
    "data": ("BatchLoader.load_state_dict", mock.DEFAULT),
    "learning rate": ("restart_lr_scheduler", mock.DEFAULT),
    "moments": (
        "tensors_of",
        lambda parts, _: {f"model.{name}": p.detach() for name, p in parts[0].named_parameters()},
    ),
}


def forgetful_case(folder: str, arguments: list[str], forgotten: str) -> int:
    name, replacement = FORGOTTEN[forgotten]
    with mock.patch(f"trainer.checkpoint.checkpointer.{name}", replacement):
        return run_main(folder, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_negative_control(pool: WorkerPool, tmp_path: Path, uninterrupted, forgotten: str) -> None:
    """A part of the state that is not restored shows in the comparison, after the steps that were restored."""
    arguments = [*layout_of("fsdp2")[1], *SAVING]
    run(pool, tmp_path, "fsdp2", *SAVING)
    forget(tmp_path, 4, 6)
    assert pool.run(2, forgetful_case, str(tmp_path), arguments, forgotten) == [0, 0]
    got, wanted = logged(tmp_path), uninterrupted("fsdp2")
    assert got[:2] == wanted[:2]
    assert all(ours["loss"] != theirs["loss"] for ours, theirs in zip(got[3:], wanted[3:], strict=True))


@pytest.mark.slow
def test_a_run_resumes_with_other_degrees(pool: WorkerPool, tmp_path: Path, uninterrupted) -> None:
    run(pool, tmp_path / "first", "fsdp2", *SAVING)
    forget(tmp_path / "first", 4, 6)
    for layout in ("tp2", "hsdp2x2", "one", "cp2", "pp2"):
        shutil.copytree(tmp_path / "first", tmp_path / layout)
        got = run(pool, tmp_path / layout, layout, *SAVING)
        for ours, theirs in zip(got, uninterrupted("fsdp2"), strict=True):
            for key in EXACT:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (layout, ours["step"], key)


def test_load_step_goes_back(pool: WorkerPool, tmp_path: Path, uninterrupted) -> None:
    """From step 2 on the run has another history: its checkpoints replace the first run's."""
    run(pool, tmp_path, "fsdp2", *SAVING)
    other = run(pool, tmp_path, "fsdp2", *SAVING, "--checkpoint.load_step=2", "--optimizer.lr=1e-3")
    wanted = uninterrupted("fsdp2")
    assert other[:2] == wanted[:2]
    assert [step["lr"] / theirs["lr"] for step, theirs in zip(other[2:-1], wanted[2:-1], strict=True)] == pytest.approx(
        [1 / 4] * 3
    )
    forget(tmp_path, 6)
    assert run(pool, tmp_path, "fsdp2", *SAVING, "--optimizer.lr=1e-3") == other


@pytest.mark.slow
def test_only_the_latest_are_kept(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-1.old").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-4.tmp").mkdir()  # of a run that was killed
    for mode in ("disabled", "async"):
        run(
            pool,
            tmp_path,
            "fsdp2",
            *("--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"),
            f"--checkpoint.async_mode={mode}",
        )
        assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-1.old", "step-5", "step-6"]
        forget(tmp_path, 5, 6)


def test_max_minutes_saves_before_it_stops(pool: WorkerPool, tmp_path: Path, uninterrupted) -> None:
    assert len(run(pool, tmp_path, "fsdp2", *SAVING, "--job.max_minutes=0.0001")) == 1
    assert Store(tmp_path / "checkpoint").steps() == [1]
    assert run(pool, tmp_path, "fsdp2", *SAVING) == uninterrupted("fsdp2")


@pytest.mark.slow
def test_tensorboard_continues(pool: WorkerPool, tmp_path: Path, uninterrupted) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):
        run(pool, tmp_path, "fsdp2", *SAVING, "--metrics.enable_tensorboard")
        if (tmp_path / "checkpoint" / "step-4").exists():
            forget(tmp_path, 4, 6)
    run(pool, tmp_path, "fsdp2", *SAVING, "--metrics.enable_tensorboard")
    (folder,) = (tmp_path / "tb").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))
    wanted = [step["loss"] for step in uninterrupted("fsdp2")]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(wanted, rel=1e-6)


def signalled_case(folder: str, arguments: list[str], number: int) -> tuple[int, bool]:
    """Signal rank 1 alone in step 2; return the exit code, and whether its signal handler is restored."""
    step_of = Trainer.train_step

    def train_step(trainer: Trainer, step: int) -> None:
        if step == 2 and trainer.dims.rank("world") == 1:
            os.kill(os.getpid(), number)
            time.sleep(0.5)
        step_of(trainer, step)

    before = signal.getsignal(number)
    with mock.patch.object(Trainer, "train_step", train_step):
        code = run_main(folder, arguments)
    return code, signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, *slow(signal.SIGINT)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    pool: WorkerPool, tmp_path: Path, uninterrupted, number: signal.Signals
) -> None:
    arguments = [*layout_of("fsdp2")[1], "--checkpoint.enable"]
    assert pool.run(2, signalled_case, str(tmp_path), arguments, int(number)) == [(0, True)] * 2
    assert Store(tmp_path / "checkpoint").steps() == [2]
    assert len(logged(tmp_path)) == 2
    assert run(pool, tmp_path, "fsdp2", *SAVING) == uninterrupted("fsdp2")


def timeouts_case(folder: str, arguments: list[str]) -> list[timedelta]:
    """Return the longest time-out in the first step, then the time-outs of the world and of the checkpoint's group."""
    seen = []

    def timeout(group) -> timedelta:
        return group._get_backend(torch.device("cpu")).options._timeout

    def observed(seconds: float, *, except_group=None) -> None:
        if except_group is not None:
            groups = [group for group in _world.pg_map if torch.distributed.get_backend(group) != "fake"]
            seen.append(max(timeout(group) for group in groups if group is not except_group))
        set_timeout(seconds, except_group=except_group)
        if except_group is not None:
            seen.extend([timeout(torch.distributed.group.WORLD), timeout(except_group)])

    with mock.patch("trainer.assembly.set_timeout", observed):
        assert run_main(folder, arguments) == 0
    return seen


@pytest.mark.slow
def test_time_outs_are_lowered_in_resumed_runs_too_but_not_that_of_saving(pool: WorkerPool, tmp_path: Path) -> None:
    for _ in range(2):
        arguments = [
            *layout_of("hsdp2x2")[1],
            *SAVING,
            "--comm.train_timeout_seconds=33",
            "--comm.checkpoint_timeout_seconds=1234",
        ]
        for first, lowered, saving in pool.run(4, timeouts_case, str(tmp_path), arguments):
            assert first == timedelta(seconds=300)  # also of groups of some ranks
            assert lowered == timedelta(seconds=33)
            assert saving == timedelta(seconds=1234)
        forget(tmp_path, 4, 6)


# ---- as a user types it

LONG = [
    "--metrics.no-enable_tensorboard",
    "--training.steps=24",
    "--training.seq_len=64",
    "--training.global_batch_size=4",
    "--checkpoint.enable",
    "--checkpoint.interval=3",
]


@pytest.fixture(scope="module")
def whole_run(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    arguments = [*LONG, "--checkpoint.no-enable", "--model.flavor=debugmodel", "--lr_scheduler.warmup_steps=10"]
    return run(pool, tmp_path_factory.mktemp("whole_run"), "fsdp2", *arguments)


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_full_checkpoint(tmp_path: Path, whole_run: list[dict]) -> None:
    """Stopped by SIGTERM to the launcher, then killed with all its ranks, then run to its end."""
    process = launch(*LONG, f"--job.dump_folder={tmp_path}")
    wait_for_steps(tmp_path, 3, process)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == "SIGTERM: stopping after this step; a second signal ends the run at once\n"
    stopped = len(logged(tmp_path))
    assert 3 <= stopped < 24
    assert (
        lines_of(out)[-1]
        == f"stopped by SIGTERM after step {stopped}; checkpoint saved: the same command resumes from it"
    )
    assert Store(tmp_path / "checkpoint").steps()[-1] == stopped

    process = launch(*LONG, f"--job.dump_folder={tmp_path}")
    wait_for_steps(tmp_path, stopped + 4, process)
    for pid in (process.pid, *ranks_of(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    killed = len(logged(tmp_path))
    assert stopped + 4 <= killed < 24
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')  # a line that was not finished

    process = launch(*LONG, f"--job.dump_folder={tmp_path}")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert any(line.startswith("resumed after step ") for line in lines_of(out))
    assert logged(tmp_path) == whole_run
    assert Store(tmp_path / "checkpoint").steps()[-1] == 24


@pytest.mark.slow
def test_torchrun_stops_in_good_order_too(tmp_path: Path) -> None:
    """It prints a trace of its own, but its ranks have their time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py", *LONG]
    process = subprocess.Popen(
        [*command, f"--job.config_file={ROOT}/train_configs/debug_model.toml", f"--job.dump_folder={tmp_path}"],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(tmp_path, 2, process)
    process.terminate()
    process.communicate(timeout=60)
    assert Store(tmp_path / "checkpoint").steps()[-1] == len(logged(tmp_path)) < 24


def test_a_bad_checkpoint_stops_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-4").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-4" / "state.json").write_text("{")
    for arguments, part in (([], "step-4 cannot be read"), (["--checkpoint.load_step=3"], "saved steps: 4")):
        process = launch("--checkpoint.enable", f"--job.dump_folder={tmp_path}", *arguments)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert len(out.splitlines()) == 1  # what starts
        assert err.startswith("error: ")
        assert part in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--print-config"], *slow(["--help"])])
def test_a_reader_that_has_seen_enough(arguments: list[str]) -> None:
    command = f"{sys.executable} {ROOT}/train.py {arguments[0]} | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert result.stderr == ""
    assert result.returncode == 0

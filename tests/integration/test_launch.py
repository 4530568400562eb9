"""The launcher as a user types it: exit codes, one-line errors, several nodes, a killed rank."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import free_port
from tests.integration.console import lines_of
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]
SAVES = "with --checkpoint.enable a run saves, and the same command resumes it"
QUICK = [
    "--metrics.no-enable_tensorboard",
    "--training.steps=3",
    "--training.seq_len=64",
    "--training.global_batch_size=4",
]


def environment(**variables: str) -> dict[str, str]:
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    }
    return inherited | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable} | variables


def launch(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [str(ROOT / "run_llama_train.sh"), *arguments],
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_by_default_without_a_gpu(tmp_path: Path) -> None:
    """From another folder, with a relative dump folder, and quiet: rank 0's lines and nothing else."""
    process = launch(*QUICK, "--job.dump_folder=out", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    lines = lines_of(out)
    assert re.fullmatch(r"Llama 3 debug model.* on 2 CPU ranks; output goes to out", lines[0])
    assert any(re.match(r"mesh +dp_shard 2 = 2 CPU ranks", line) for line in lines)
    steps = [line for line in lines if line.startswith("step ") and "loss" in line]
    assert [line.split("/")[0] for line in steps] == ["step 1", "step 2", "step 3"]
    printed = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in steps]
    assert printed == pytest.approx(losses(tmp_path / "out"), abs=1e-3)
    assert {"metrics      out/metrics.jsonl", "weights      not saved; --checkpoint.enable saves them"} <= {*lines}


def test_a_python_without_the_packages_is_one_sentence(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    process = launch(*QUICK, PYTHON=str(bare))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1
    assert "lacks numpy safetensors torch tiktoken; run `make train` once" in err
    rank = subprocess.run([bare, ROOT / "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (rank.returncode, rank.stderr) == (2, err)


@pytest.mark.slow
def test_log_rank_chooses_who_speaks(tmp_path: Path) -> None:
    process = launch(*QUICK, f"--job.dump_folder={tmp_path}", LOG_RANK="1")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    steps = [line for line in lines_of(out) if "grad" in line]
    assert len(steps) == 3
    assert all(line.startswith("[rank 1] ") for line in steps)


@pytest.mark.slow
def test_a_pytorch_without_the_gpus_of_the_machine_is_told(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\n")
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = launch(*QUICK, f"--job.dump_folder={tmp_path}/out", PATH=path, CUDA_VISIBLE_DEVICES="0")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    if not torch.cuda.is_available():
        assert "note: this machine has cuda, and the installed PyTorch uses cpu: so does the run" in lines_of(out)


@pytest.mark.slow
def test_torchrun_by_hand(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py", *QUICK]
    result = subprocess.run(
        [*command, f"--job.config_file={ROOT}/train_configs/debug_model.toml", f"--job.dump_folder={tmp_path}"],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(losses(tmp_path)) == 3


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Two launchers with one MASTER_ADDR:MASTER_PORT are one job of two ranks."""
    port, arguments = str(free_port()), [*QUICK, f"--job.dump_folder={tmp_path}"]
    nodes = [
        launch(*arguments, NGPU="1", NNODES="2", MASTER_ADDR="localhost", MASTER_PORT=port, NODE_RANK=rank)
        for rank in "10"
    ]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "dp_shard 2" in "".join(out for out, _ in outputs)
    assert len(losses(tmp_path)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallelism.data_parallel_shard_degree=3"], "world size of 2"),
        *slow((["--training.stepz=3"], "training.steps"), (["--model.flavor=9B"], "debugmodel")),
    ],
)
def test_a_wrong_setting_stops_before_anything_starts(tmp_path: Path, arguments: list[str], message: str) -> None:
    started = time.monotonic()
    process = launch(f"--job.dump_folder={tmp_path}/out", *arguments)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 5
    assert process.returncode == 2
    assert len(out.splitlines()) <= 1  # what starts
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["two", *slow("0", "-1")])
def test_a_wrong_number_of_ranks(value: str) -> None:
    process = launch(NGPU=value)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == f"error: NGPU = '{value}' must be a whole number from 1 up, such as NGPU=2\n"


@pytest.mark.slow
def test_data_that_turns_bad_during_the_run(tmp_path: Path) -> None:
    """Errors that only the running job can find are also one sentence and exit code 2."""
    data = tmp_path / "data.txt"
    documents = [tmp_path / f"{i}.txt" for i in range(4)]
    for document in documents[:3]:
        document.write_text("word " * 50)
    documents[3].write_bytes(b"\xff\xfe broken")
    process = launch(
        *QUICK,
        "--training.dataset=text",
        f"--training.dataset_path={tmp_path}/*.txt",
        "--training.data_streams=4",
        f"--job.dump_folder={tmp_path}/out",
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, (out, err)
    assert "3.txt" in err
    assert "Traceback" not in err
    assert not data.exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_all_ranks(tmp_path: Path) -> None:
    """Named with its step, before the optimizer step; exit code 1."""
    process = launch(*QUICK, "--optimizer.lr=1e30", "--lr_scheduler.warmup_steps=0", f"--job.dump_folder={tmp_path}")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "step 2" in err
    assert "must be finite" in err
    assert "Traceback" not in err + out
    assert len(losses(tmp_path)) == 1


@pytest.mark.slow
def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    process = launch(*QUICK, "--training.steps=100000", f"--job.dump_folder={tmp_path}")
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or not losses(tmp_path):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 failed first (SIGKILL, mostly for lack of host memory)" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_signal_to_the_launcher_ends_the_job_in_good_order(tmp_path: Path) -> None:
    """After the step, with one line and exit code 0; nothing is saved, because nothing asks for it."""
    process = launch(*QUICK, "--training.steps=100000", f"--job.dump_folder={tmp_path}")
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or not losses(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert lines == ["SIGTERM: stopping after this step; a second signal ends the run at once"]
    assert lines_of(out)[-1] == f"stopped by SIGTERM after step {len(losses(tmp_path))}; nothing saved: {SAVES}"


@pytest.mark.parametrize(
    ("number", "to_rank"),
    [(signal.SIGUSR1, False), *slow((signal.SIGUSR2, False), (signal.SIGHUP, False), (signal.SIGHUP, True))],
    ids=lambda value: getattr(value, "name", value),
)
def test_any_stop_signal_saves(tmp_path: Path, number: signal.Signals, to_rank: bool) -> None:
    process = launch(*QUICK, "--training.steps=100000", "--checkpoint.enable", f"--job.dump_folder={tmp_path}")
    while not re.search(r"step +1/.*loss", line := process.stdout.readline()):
        assert line, process.wait()
    os.kill(ranks_of(process.pid)[1] if to_rank else process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "checkpoint saved" in lines_of(out)[-1]
    steps = [path.name for path in (tmp_path / "checkpoint").glob("step-*")]
    assert steps == [f"step-{len(losses(tmp_path))}"]


def test_a_run_whose_output_has_no_reader_goes_on_and_saves(tmp_path: Path) -> None:
    """As `lct train 2>&1 | head` and a `tee` that dies leave it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "train", *QUICK, "--checkpoint.enable", f"--job.dump_folder={tmp_path}"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not re.search(r"step +1/.*loss", line := process.stdout.readline()):
        assert line, process.wait()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert len(losses(tmp_path)) == 3
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-3"]


@pytest.mark.slow
@pytest.mark.parametrize("second", [True, False], ids=["second signal", "time-out"])
def test_a_stop_that_takes_too_long_ends_at_once(tmp_path: Path, second: bool) -> None:
    """In a step of minutes."""
    long_step = ["--training.global_batch_size=4096", "--training.seq_len=256"]
    timeout = "--checkpoint.stop_timeout_seconds=" + ("100" if second else "1")
    process = launch(*long_step, timeout, f"--job.dump_folder={tmp_path}")
    while "training starts" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(1.5)
    process.terminate()
    if second:
        time.sleep(2.5)
        assert process.poll() is None
        process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-2:] == ["error: stopped by SIGTERM at once", f"nothing is saved: {SAVES}"]
    assert ("not stopped within checkpoint.stop_timeout_seconds = 1" in err) is not second


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher started, in their order."""
    return sorted(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))

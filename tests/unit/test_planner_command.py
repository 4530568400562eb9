"""What `lct estimate` prints, what it refuses, and the memory that a run compares with it."""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lct_planner import worker
from lct_planner.timing import StepTime
from lct_tools import check
from lct_tools import estimate as command
from trainer.commands import train
from trainer.commands.main import main as lct
from trainer.commands.start import parse
from trainer.components import metrics
from trainer.config.loader import parse_command_line
from trainer.runtime.devices import Machine

pytestmark = pytest.mark.about("lct_planner/estimate.py", "lct_planner/calibrate.py", "lct_planner/shim.py")

# ---- the command


def cpu_record(tmp_path: Path, memory: float = 1e10) -> str:
    path = tmp_path / "cpu.toml"
    peaks = f"flops = 1e11\nbandwidth = 1e10\nlink = 1e9\nnetwork = 1e9\nmemory = {memory}\n"
    path.write_text(f'[cpu]\nname = "a CPU"\ntype = "cpu"\n{peaks}')
    return str(path)


def test_the_command_prints_memory_traffic_and_time(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    arguments = ["debug_model", "--gpu", cpu_record(tmp_path), "--world-size", "2"]
    assert command.main([*arguments, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["fits"]
    assert answer["ranks"] == 2
    assert answer["total"] >= answer["reserved"] >= answer["allocated"]
    assert math.isclose(sum(answer["memory"].values()), answer["allocated"], rel_tol=1e-9)
    assert any("fsdp" in name for name in answer["messages"])
    assert command.main([*arguments, "--training.local_batch_size", "1", "--picture", str(tmp_path / "step.svg")]) == 0
    printed = capfd.readouterr().out
    for word in ("memory", "it fits", "traffic", "fsdp", "time", "tokens a second"):
        assert word in printed
    assert (tmp_path / "step.svg").stat().st_size > 1000


def test_other_answers_as_json_print_json_alone(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    job = [
        "debug_model",
        "--gpu",
        cpu_record(tmp_path, memory=2e8),
        "--world-size",
        "1",
        "--training.local_batch_size=1",
    ]
    assert command.main([*job, "--training.global_batch_size=-1", "--max-seq-len", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["fits"]
    assert "longest" in err
    assert "beyond" in err


def test_a_time_out_that_is_too_short_for_the_predicted_step_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only several ranks get the note, because one rank waits for nobody."""
    time = StepTime(313.4, {})
    of = SimpleNamespace(profile=SimpleNamespace(peak=1.0), reserved=1.0, by_purpose={}, time=time, record=dict)
    comm = "--comm.init_timeout_seconds=1000"
    expected = "comm.train_timeout_seconds = 100 is too short for a step of 313 s, as predicted: the run allows"

    def estimated(_worker: object, arguments: Sequence[str], *_: object, **__: object) -> SimpleNamespace:
        job = SimpleNamespace(config=parse_command_line(list(arguments)).config)
        return SimpleNamespace(**vars(of), job=job)

    monkeypatch.setattr(command, "estimate", estimated)
    monkeypatch.setattr("lct_planner.estimate.estimate", estimated)
    for module in (command, worker):
        monkeypatch.setattr(module, "Worker", lambda **_: nullcontext())
    for ranks in ("1", "2"):
        job = ["debug_model", "--world-size", ranks, "--training.global_batch_size=-1"]
        assert command.main([*job, "--gpu", cpu_record(tmp_path), "--json", comm]) == 0
        assert (expected in capfd.readouterr().err) == (ranks == "2")
        arguments = ["--job.config_file", "debug_model", comm]
        assert expected in check.peak_of_a_step(arguments, int(ranks), "cuda")[1] or ranks == "1"
        assert not check.peak_of_a_step(arguments, int(ranks), "cpu")[1]
    assert check.peak_of_a_step([*arguments, "--comm.train_timeout_seconds=1000"], 2, "cuda")[1] == ""


def test_a_wrong_setting_is_one_sentence(capfd: pytest.CaptureFixture, tmp_path: Path) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text("flops = 1e15\n")
    for arguments, words in (
        (["debug_model", "--gpu", str(bare)], "nor a .toml file with a record"),
        (["debug_model", "--gpu", "h10"], "is no known GPU"),
        (["debug_model", "--gpu", "missing.toml"], "--gpu 'missing.toml' is no known GPU"),
        (["debug_model", "--world-size", "x"], "--world-size"),
        (["debug_model", "--gpu", cpu_record(tmp_path), "--training.seq_len", "0"], "training.seq_len"),
        (
            ["debug_model", "--gpu", cpu_record(tmp_path), "--parallelism.tensor_parallel_degree", "3"],
            "tensor_parallel_degree = 3",
        ),
    ):
        assert lct(["estimate", *arguments]) == 2
        error = capfd.readouterr().err
        assert error.startswith("error: ")
        assert words in error


def test_the_times_of_a_gpu_are_not_measured_as_those_of_a_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "this_machine", lambda: Machine(1, 80 << 30, 1 << 34))
    measured: list[int] = []
    monkeypatch.setattr(command, "calibrate", lambda *_a, memory, **_k: measured.append(memory) or "")
    assert lct(["estimate", "debug_model", "--calibrate", str(tmp_path / "gpu.toml")]) == 2
    assert "--calibrate measures a CPU" in capfd.readouterr().err
    assert command.main(["debug_model", "--calibrate", str(tmp_path / "cpu.toml"), "--job.device", "cpu"]) == 0
    assert measured == [1 << 34]


# ---- a run and its estimate


def test_a_run_on_gpus_starts_an_estimate_of_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(train.subprocess, "Popen", lambda arguments, **_: started.append(arguments))
    monkeypatch.delenv("NNODES", raising=False)
    for machine, expected in ((Machine(0, None, 1 << 34), 0), (Machine(8, 80 << 30, 1 << 34), 1)):
        monkeypatch.setattr(train, "this_machine", lambda machine=machine: machine)
        start = parse(["debug_model", "--job.dump_folder", str(tmp_path / "run")])
        train._start_estimate(start, parse_command_line(start.arguments).config)
        assert len(started) == expected
    assert started[0][3:] == ["estimate", *start.arguments, "--world-size", "8", "--ngpu", "8", "--json"]
    options, job_options = command._options(started[0][4:])
    assert (options.world_size, job_options.ranks) == ("8", 8)
    assert parse_command_line(job_options.arguments).config.job.dump_folder == str(tmp_path / "run")


def test_a_run_without_an_estimate_has_none_of_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "this_machine", lambda: Machine(8, 80 << 30, 1 << 34))
    for name, value in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "other"}.items():
        monkeypatch.setenv(name, value)
    estimate = tmp_path / "estimate.json"
    estimate.write_text(json.dumps({"step_seconds": 1200.0}))
    start = parse(["debug_model", "--job.dump_folder", str(tmp_path)])
    assert train._start_estimate(start, parse_command_line(start.arguments).config) is None
    assert not estimate.exists()


def test_metrics_have_the_measured_and_the_predicted_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", said.append)
    run = SimpleNamespace(_predicted=None, _estimate=tmp_path / "estimate.json", device=torch.device("cuda"))
    run._estimated = lambda name: metrics.MetricsLogger._estimated(run, name)
    beside = metrics.MetricsLogger._predicted_memory
    assert beside(run, 3.0) == {}
    run._estimate.write_text('{"alloc')  # it is being written
    assert beside(run, 3.0) == {}
    run._estimate.write_text(json.dumps({"allocated": 2.5 * 2**30}))
    assert beside(run, 3.0) == {"memory_predicted_gib": 2.5}
    assert beside(run, 3.1) == {"memory_predicted_gib": 2.5}
    assert said == ["memory: 3.0 GiB allocated at the peak, 2.5 GiB predicted"]

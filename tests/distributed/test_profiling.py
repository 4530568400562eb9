"""Traces with named regions, snapshots, and what a run leaves behind when memory or time runs out."""

import contextlib
import io
import json
import pickle
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

import train
from tests.distributed.harness import run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from trainer.components.profiling import profiling
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.runtime.determinism import set_determinism
from trainer.runtime.process_group import Process, process_group, set_timeout
from trainer.trainer import Trainer

QUICK = [
    "--training.seq_len=32",
    "--training.local_batch_size=1",
    "--metrics.log_freq=100",
    "--training.data_streams=4",
]


def main_case(folder: str, arguments: list[str]) -> tuple[int, str]:
    """The program's own main on each rank: exit code and stderr."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = train.main([*QUICK, f"--job.dump_folder={folder}", *arguments])
    return code, stderr.getvalue()


@pytest.mark.slow
def test_traces_of_every_rank_name_the_parts_of_a_step(pool: WorkerPool, tmp_path: Path) -> None:
    arguments = [
        "--profiling.enable_profiling",
        "--profiling.profile_freq=3",
        "--profiling.profiler_warmup=1",
        "--profiling.profiler_active=2",
        "--training.global_batch_size=4",
        "--training.steps=7",
    ]
    assert pool.run(2, main_case, str(tmp_path), arguments) == [(0, ""), (0, "")]
    folder = tmp_path / "profile_trace"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json")) == [
        f"iteration_{step}/rank{rank}_trace.json" for step in (3, 6) for rank in (0, 1)
    ]
    for path in folder.rglob("*.json"):
        events = json.loads(path.read_text())["traceEvents"]
        regions = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        two_steps = {"data_loading": 2, "forward": 4, "backward": 4, "grad_norm": 2, "clip": 2, "optimizer": 2}
        two_steps["next_batches"] = 2
        assert {name: regions[name] for name in two_steps} == two_steps


def test_memory_snapshots_need_a_gpu(pool: WorkerPool, tmp_path: Path) -> None:
    outcomes = pool.run(2, main_case, str(tmp_path), ["--profiling.enable_memory_snapshot", "--training.steps=100"])
    assert [code for code, _ in outcomes] == [2, 2]
    assert outcomes[0][1].startswith("error: profiling.enable_memory_snapshot = true")
    assert outcomes[0][1].count("\n") == 1
    assert outcomes[1][1] == ""


def run_out_of_memory_after_three_steps(config: JobConfig) -> None:
    with profiling(config.profiling, Path(config.job.dump_folder), 1, torch.device("cuda")) as (step_is_over,):
        for step in (1, 2, 3):
            step_is_over(step)
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_snapshots_are_written_regularly_and_before_an_out_of_memory_error_is_raised(tmp_path: Path) -> None:
    """With the allocator's recorder replaced, so that it runs without a GPU."""
    config = parse_command_line(
        [
            f"--job.dump_folder={tmp_path}",
            *("--profiling.enable_memory_snapshot", "--profiling.profile_freq=2"),
        ]
    ).config
    with (
        mock.patch("torch.cuda.memory._record_memory_history") as record,
        mock.patch("torch.cuda.memory._dump_snapshot", lambda path: Path(path).write_text("snapshot")),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            run_out_of_memory_after_three_steps(config)
        assert record.call_args_list[0].kwargs["max_entries"] > 0
        assert record.call_args_list[-1].kwargs == {"enabled": None}
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pickle")) == [
        "memory_snapshot/iteration_2/rank1_snapshot.pickle",
        "memory_snapshot/iteration_3_exit/rank1_snapshot.pickle",
    ]


def out_of_memory_case(folder: str, step: int) -> tuple[int, str]:
    real = Trainer.train_step

    def train_step(self: Trainer, now: int) -> None:
        if now == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        real(self, now)

    with mock.patch.object(Trainer, "train_step", train_step):
        return main_case(folder, ["--training.local_batch_size=2", "--training.steps=4"])


def test_an_out_of_memory_error_fails_the_run_and_names_settings(pool: WorkerPool, tmp_path: Path) -> None:
    code, error = pool.run(1, out_of_memory_case, str(tmp_path), 2)[0]
    assert code == 1
    assert "CUDA out of memory. Tried to allocate 20.00 GiB." in error
    for name in (
        "training.local_batch_size = 1",
        'activation_checkpoint.mode = "full"',
        "training.seq_len = 16",
        "parallelism.data_parallel_shard_degree = 2",
    ):
        assert name in error


def hanging_case(folder: str) -> str:
    """Let rank 1 hang between two collectives; return the log of rank 0."""
    process, records = Process.from_environment(), Path(folder) / "comm_traces"
    comm = parse_command_line([]).config.comm

    def train() -> None:
        with process_group(process, comm, records):
            torch.distributed.all_reduce(torch.ones(3))
            set_timeout(1.0)
            if process.rank == 1:
                time.sleep(3)
            else:
                torch.distributed.broadcast(torch.ones(5), src=1)

    if process.rank == 1:
        train()
        return ""
    with mock.patch("trainer.runtime.process_group.logger.warning") as warning:
        with pytest.raises(RuntimeError, match="Timed out"):
            train()
        return warning.call_args.args[0]


@pytest.mark.slow
def test_a_rank_that_hangs_leaves_a_record_on_the_rank_that_noticed(pool: WorkerPool, tmp_path: Path) -> None:
    line, _ = pool.run(2, hanging_case, str(tmp_path))
    (path,) = (tmp_path / "comm_traces").iterdir()
    assert path.name == "rank_0"
    assert str(path) in line
    assert "broadcast" in line
    entries = pickle.loads(path.read_bytes())["entries"][-2:]  # this process has served other cases before
    assert [entry["profiling_name"].split(":")[-1] for entry in entries] == ["all_reduce", "broadcast"]
    assert entries[-1]["input_sizes"] == [[5]]
    assert entries[-1]["timeout_ms"] == 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("cp2", ["--activation_checkpoint.mode=full"]),
        ("fsdp2", ["--activation_checkpoint.mode=selective"]),
        ("hsdp2x2+tp2", []),
        ("fsdp2+cp2+tp2", []),
    ],
)
def test_deterministic_runs_have_the_same_bits(pool: WorkerPool, layout: str, settings: list[str]) -> None:
    world_size, arguments = LAYOUTS[layout]
    case = ["--training.deterministic", *settings, *arguments]
    one, two = (pool.run(world_size, run_layout, case)[0] for _ in range(2))
    assert one.gradients
    for tensors, others in zip([*one.gradients, one.weights], [*two.gradients, two.weights], strict=True):
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert [step["loss"] for step in one.metrics] == [step["loss"] for step in two.metrics]


@pytest.mark.parametrize(("setting", "used"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":4096:8")])
def test_determinism_prepares_cuda_too(monkeypatch: pytest.MonkeyPatch, setting: str | None, used: str) -> None:
    import os

    if setting is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    try:
        set_determinism(True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == used
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
    finally:
        set_determinism(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic

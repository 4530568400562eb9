"""The real program on real text: every layout prints the losses of one rank."""

import json
from pathlib import Path

import pytest

import train
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import degrees
from trainer.runtime.process_group import Process

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
COMPARED = 5  # steps of the same schedule that every layout runs
SETTINGS = [
    f"--job.config_file={ROOT}/train_configs/debug_model.toml",
    "--metrics.no-enable_tensorboard",
    f"--training.steps={STEPS}",
    f"--lr_scheduler.total_steps={STEPS}",
    "--lr_scheduler.warmup_steps=4",
    "--training.seq_len=64",
    "--training.global_batch_size=8",
    "--training.mixed_precision_param=float32",  # on GPUs too, for the bound of parity
]
# One case generates code, which takes long; for the others tracing and partitioning are what depends on the layout.
TRACED = ["--compile.enable", "--compile.backend=aot_eager"]
LOOPED = "--parallelism.pipeline_parallel_schedule"
LAYOUTS = {
    "default": (2, []),
    "ddp": (2, degrees(dp_replicate=2)),
    "hsdp": (4, degrees(dp_replicate=2, dp_shard=2)),
    "2d_eager": (4, degrees(dp_shard=2, tp=2)),
    "hsdp+tp": (8, degrees(dp_replicate=2, dp_shard=2, tp=2)),
    "1d_compile": (2, ["--compile.enable"]),
    "1d_compile_sac_op": (2, [*TRACED, "--activation_checkpoint.mode=selective"]),
    "2d_compile": (4, [*degrees(dp_shard=2, tp=2), *TRACED]),
    "cp": (4, [*degrees(cp=4), "--training.local_batch_size=8"]),
    "fsdp+cp": (4, [*degrees(dp_shard=2, cp=2), "--training.local_batch_size=4"]),
    "ddp+cp": (4, [*degrees(dp_replicate=2, cp=2), "--training.local_batch_size=4"]),
    "tp+cp": (4, [*degrees(cp=2, tp=2), "--training.local_batch_size=8"]),
    "hsdp+cp": (8, degrees(dp_replicate=2, dp_shard=2, cp=2)),
    "fsdp+tp+cp": (8, degrees(dp_shard=2, cp=2, tp=2)),
    "pp_1f1b": (2, degrees(pp=2)),
    "pp_gpipe": (2, [*degrees(pp=2), f"{LOOPED}=GPipe"]),
    "pp_dp_1f1b": (4, [*degrees(pp=2, dp_shard=2), "--training.local_batch_size=4"]),
    "pp_dp_gpipe": (4, [*degrees(pp=2, dp_shard=2), "--training.local_batch_size=2", f"{LOOPED}=GPipe"]),
    "pp_tp": (4, degrees(pp=2, tp=2)),
    "pp_dp_tp": (8, [*degrees(pp=2, dp_shard=2, tp=2), "--training.local_batch_size=4"]),
    "3d_compile": (8, [*degrees(pp=2, dp_shard=2, tp=2), "--training.local_batch_size=4", *TRACED]),
    "pp_looped_1f1b": (2, [*degrees(pp=2), f"{LOOPED}=Interleaved1F1B"]),
    "pp_looped_zero_bubble": (2, [*degrees(pp=2), f"{LOOPED}=InterleavedZeroBubble"]),
    "pp+cp": (4, degrees(pp=2, cp=2)),
    "pp+cp+tp": (8, degrees(pp=2, cp=2, tp=2)),
    "cp_all_gather": (2, [*degrees(cp=2), "--parallelism.context_parallel_method=all_gather"]),
    "cp_all_to_all": (4, [*degrees(dp_shard=2, cp=2), "--parallelism.context_parallel_method=all_to_all"]),
}
DOCUMENTS = ["--training.attention_mask=document", "--model.sliding_window=48", "--model.sliding_window_every=2"]


def run_main(folder: str, arguments: list[str]) -> list[dict]:
    """On each rank: the program's own main; the logged steps from rank 0's file."""
    code = train.main([*SETTINGS, f"--job.dump_folder={folder}", *arguments])
    assert code == 0, code
    if Process.from_environment().rank:
        return []
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return pool.run(1, run_main, str(tmp_path_factory.mktemp("one_rank")), [])[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_one_rank(pool: WorkerPool, one_rank: list[dict], tmp_path: Path, name: str) -> None:
    world_size, arguments = LAYOUTS[name]
    got = pool.run(world_size, run_main, str(tmp_path), [f"--training.steps={COMPARED}", *arguments])[0]
    assert [step["step"] for step in got] == list(range(1, COMPARED + 1))
    for ours, theirs in zip(got, one_rank, strict=False):
        for key in ("loss", "loss_max", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)
        assert ours["lr"] == theirs["lr"]
        assert ours["tokens_seen"] == theirs["tokens_seen"] == ours["step"] * 8 * 64


@pytest.mark.slow
def test_packed_documents_on_eight_ranks_are_those_of_one(pool: WorkerPool, tmp_path: Path) -> None:
    """Real documents, assigned by their cost again for every batch."""
    balanced = ["--parallelism.context_parallel_load_balancer=balanced", "--comm.check_consistency"]
    runs = []
    for world_size, options in ((1, []), (8, [*degrees(dp_shard=2, cp=2, tp=2), *balanced])):
        folder = str(tmp_path / str(world_size))
        runs.append(pool.run(world_size, run_main, folder, [*DOCUMENTS, *options, "--training.steps=4"])[0])
    for ours, theirs in zip(*runs, strict=True):
        for key in ("loss", "loss_max", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)


def test_it_learns_and_reports(one_rank: list[dict]) -> None:
    assert one_rank[0]["loss"] == pytest.approx(8.38, abs=0.02)
    assert one_rank[-1]["loss"] < one_rank[0]["loss"] - 0.5
    for step in one_rank:
        assert step["loss_max"] >= step["loss"]
        assert step["tokens_per_second"] == pytest.approx(step["tokens_per_second_per_device"])
        assert step["tflops"] > 0
        assert step["mfu"] is None
        assert step["mfu_causal"] is None
        assert 0.1 < step["memory_gib"] < 20
        assert 0 <= step["data_loading_fraction"] < 0.9


def test_the_effective_configuration_is_saved_and_runs_again(pool: WorkerPool, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    short = ["--training.steps=2", "--training.global_batch_size=-1"]
    losses = [step["loss"] for step in pool.run(1, run_main, str(first), short)[0]]
    arguments = [f"--job.config_file={first}/config.toml", f"--job.dump_folder={again}"]
    pool.run(1, train_main, arguments)
    steps = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert [step["loss"] for step in steps] == losses


def train_main(arguments: list[str]) -> int:
    return train.main(arguments)


def test_tensorboard_has_every_metric(pool: WorkerPool, tmp_path: Path) -> None:
    arguments = ["--training.steps=2", "--training.global_batch_size=-1", "--metrics.enable_tensorboard"]
    steps = pool.run(1, run_main, str(tmp_path), arguments)[0]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (tmp_path / "tb").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    for key, value in steps[1].items():
        if key != "step" and value is not None:
            assert events.Scalars(key)[1].value == pytest.approx(value, rel=1e-6), key


def test_max_minutes_stops_after_a_step(pool: WorkerPool, tmp_path: Path) -> None:
    steps = pool.run(2, run_main, str(tmp_path), ["--job.max_minutes=0.0001"])[0]
    assert [step["step"] for step in steps] == [1]

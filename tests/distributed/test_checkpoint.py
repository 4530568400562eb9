"""Laws of checkpoints on ranks: any layout loads any other's exactly, also while training goes on."""

import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from longshard.sharding import exchange
from longshard.sharding.tensors import local_part
from tests.distributed.checkpoint_cases import SETTINGS, load_step_save, merged, same, trainer_in, whole_state
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.checkpoint import dcp_files
from trainer.checkpoint.checkpointer import tensors_of
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.stores.store import Store
from trainer.trainer import Trainer

CHAIN = ("fsdp2", "tp2", "pp2", "hsdp2x2", "one")
VARIANTS = {
    "plain": [],
    "tied embeddings": ["--model.flavor=tiny_tied"],
    "np_layernorm": ["--model.norm_type=np_layernorm"],
    "cpu offload": ["--training.enable_cpu_offload"],
    "foreach": ["--optimizer.implementation=foreach"],
    "bfloat16": ["--training.dtype=bfloat16"],
    "moments in bfloat16": ["--optimizer.state_dtype=bfloat16"],
    "accumulation": ["--training.local_batch_size=1"],
}


@pytest.mark.parametrize(
    "variant",
    [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS],
)
def test_every_layout_loads_exactly_what_another_saved(pool: WorkerPool, tmp_path: Path, variant: str) -> None:
    """Weights, both moments and the step of every parameter, learning rate, position of every data stream."""
    layouts = CHAIN if variant in ("plain", "tied embeddings") else (*CHAIN, "fsdp2+tp2", "ddp4", "cp2", "fsdp2")
    saved: dict | None = None
    if variant in ("tied embeddings", "accumulation"):  # a pipeline refuses the one, and needs two rows for the other
        layouts = tuple(layout for layout in layouts if layout != "pp2")
    for done, layout in enumerate(layouts):
        world_size, arguments = LAYOUTS.get(layout, (1, []))
        results = pool.run(world_size, load_step_save, str(tmp_path), [*VARIANTS[variant], *arguments], 1)
        assert {result["step"] for result in results} == {done}
        got = merged(results, "before")
        if saved is not None:
            assert got.keys() == saved.keys()
            assert [name for name in saved if not same(saved[name], got[name])] == []
        names = set().union(*(result["names"] for result in results))
        assert {name.removeprefix("model.") for name in got if name.startswith("model.")} == names
        saved = merged(results, "after")
    moments = [value for name, value in saved.items() if name.endswith("exp_avg")]
    assert moments
    assert all(moment.any() for moment in moments)
    assert {value.item() for name, value in saved.items() if name.endswith(".step")} == {len(layouts)}
    assert sum(entry["samples"] for name, entry in saved.items() if name.startswith("stream ")) == len(layouts) * 8


def samples_after(folder: str, arguments: list[str]) -> list[torch.Tensor]:
    with trainer_in(folder, arguments) as trainer:
        tokens = torch.cat([batch["tokens"] for _ in range(2) for batch in trainer.data.take()])
        gathered = exchange.all_gather(tokens, trainer.dims["dp"])
        return sorted(row.tolist() for row in gathered.flatten(0, 1))


@pytest.mark.slow
def test_any_number_of_data_parallel_ranks_resumes_with_the_same_samples(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, load_step_save, str(tmp_path), LAYOUTS["fsdp2"][1], 3)
    wanted = pool.run(1, samples_after, str(tmp_path), [])[0]
    assert len({tuple(row) for row in wanted}) == len(wanted) == 16
    for layout in ("fsdp2", "hsdp2x2", "tp2"):
        world_size, arguments = LAYOUTS[layout]
        for got in pool.run(world_size, samples_after, str(tmp_path), arguments):
            assert got == wanted, layout


# ---- in the background


def overtaken_case(folder: str, arguments: list[str], mode: str) -> tuple[dict, dict, list[int], list[int]]:
    """Train on while the writer waits; the checkpoint must have the state of its own step."""
    trained = threading.Event()
    write = dcp_files.Writer.write_data

    def held_up(writer, *files):
        assert trained.wait(60)
        return write(writer, *files)

    with trainer_in(folder, [*arguments, f"--checkpoint.async_mode={mode}", "--checkpoint.interval=1"]) as trainer:
        path = Path(folder) / "checkpoint"
        with mock.patch.object(dcp_files.Writer, "write_data", held_up):
            trainer.train_step(1)
            wanted = whole_state(trainer)
            assert trainer.checkpoint.save(1, tokens_seen=0)
            for step in (2, 3):
                trainer.train_step(step)
            meanwhile = Store(path).steps()
            trained.set()
            trainer.checkpoint.wait()
        return wanted, whole_state(trainer), meanwhile, Store(path).steps()


@pytest.mark.parametrize(
    ("layout", "mode"),
    [("fsdp2", "async"), ("one", "async_with_pinned_mem"), *slow(("one", "async"), ("fsdp2", "async_with_pinned_mem"))],
)
def test_training_does_not_change_what_is_being_written(
    pool: WorkerPool, tmp_path: Path, layout: str, mode: str
) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    results = pool.run(world_size, overtaken_case, str(tmp_path), arguments, mode)
    assert [(meanwhile, afterwards) for *_, meanwhile, afterwards in results] == [([], [1])] * world_size
    loaded = merged(pool.run(world_size, load_step_save, str(tmp_path), arguments, 0), "before")
    wanted = merged([{"wanted": wanted} for wanted, *_ in results], "wanted")
    assert [name for name in wanted if not same(wanted[name], loaded[name])] == []
    assert not same(results[0][0]["model.norm.weight"], results[0][1]["model.norm.weight"])


def kept_memory_case(folder: str) -> list[tuple[int, bool]]:
    """Return for each of three saves the number of new addresses, and whether the copies have the state of the step."""
    arguments = [*LAYOUTS["fsdp2"][1], "--checkpoint.async_mode=async_with_pinned_mem", "--checkpoint.interval=1"]
    results, known = [], set()
    with trainer_in(folder, arguments) as trainer:
        copies = trainer.checkpoint._copies
        assert copies is not None
        for step in (1, 2, 3):
            trainer.train_step(step)
            trainer.checkpoint.save(step, tokens_seen=0)
            state = tensors_of(trainer.model_parts, trainer.optimizer)
            held, theirs = ({local_part(x).data_ptr() for x in tensors.values()} for tensors in (copies.tensors, state))
            assert held & theirs <= {0}, "a copy has memory of its own"
            is_it = copies.tensors.keys() == state.keys() and all(
                same(local_part(copies.tensors[name]), local_part(x)) for name, x in state.items()
            )
            results.append((len(held - known), is_it))
            known |= held
    return results


def test_the_memory_of_copies_is_kept(pool: WorkerPool, tmp_path: Path) -> None:
    for first, *later in pool.run(2, kept_memory_case, str(tmp_path)):
        assert first[0] > 10
        assert first[1]
        assert later == [(0, True)] * 2


def read_case(folder: str, arguments: list[str]) -> list[str]:
    """The files and folders of checkpoints that this rank opens and lists, from its start to its first step."""
    seen: list[str] = []
    counting = [True]

    def note(event: str, args: tuple) -> None:
        if counting and event in ("open", "os.scandir", "os.listdir") and f"{folder}/checkpoint" in str(args[0]):
            seen.append(Path(str(args[0])).name)

    process = Process.from_environment()
    config = parse_command_line([*SETTINGS, f"--job.dump_folder={folder}", *arguments]).config
    sys.addaudithook(note)
    with process_group(process, config.comm):
        device = process.device
        job = resolve(config, process.world_size, device.type, weights_checked=True)
        with Trainer(job, device).checkpoint:
            counting.clear()
            return seen


def test_a_rank_that_is_no_reader_opens_files_of_tensors_alone(pool: WorkerPool, tmp_path: Path) -> None:
    """Among a thousand ranks, one rank reads the metadata, once, and lists the files."""
    arguments = LAYOUTS["fsdp2"][1]
    pool.run(2, load_step_save, str(tmp_path), arguments, 1)
    first, other = pool.run(2, read_case, str(tmp_path), arguments)
    assert first.count(".metadata") == 1
    assert {"checkpoint", "step-1", "state.json"} <= {*first}
    assert {*other} <= {"__0_0.distcp", "__1_0.distcp"}
    assert len(other) == len({*other}) > 0


def stop_case(folder: str, arguments: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Calls of our own collectives in a second step, and after it."""
    with trainer_in(folder, [*arguments, *LAYOUTS["fsdp2"][1]]) as trainer:
        trainer.train_step(1)
        exchange.calls.clear()
        trainer.train_step(2)
        in_step = dict(exchange.calls)
        exchange.calls.clear()
        assert trainer.stop_reason is None
        assert not trainer.checkpoint.save(1, tokens_seen=0)
        return in_step, dict(exchange.calls)


@pytest.mark.parametrize("arguments", [["--job.max_minutes=10"], *slow([])], ids=["signals and minutes", "signals"])
def test_loss_norm_and_stop_are_one_reduction(pool: WorkerPool, tmp_path: Path, arguments) -> None:
    arguments = [*arguments, "--metrics.log_freq=100", "--training.steps=100"]
    # The other reduction adds up the numbers of labels, before the backward.
    assert pool.run(2, stop_case, str(tmp_path), arguments) == [({"all_reduce": 2}, {})] * 2

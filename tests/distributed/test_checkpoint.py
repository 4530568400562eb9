"""Laws of checkpoints on ranks: any layout loads any other's exactly, and what goes wrong stops all ranks alike."""

import contextlib
import errno
import io
import os
import sys
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch

import train
from tests.distributed.harness import whole
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.checkpoint import weights
from trainer.checkpoint.checkpointer import CheckpointError, tensors_of
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.distributed.sharding import exchange
from trainer.distributed.sharding.tensors import local_part
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.stores.store import LocalStore
from trainer.trainer import Trainer

SETTINGS = [
    "--model.flavor=tiny",
    "--training.seq_len=32",
    "--training.global_batch_size=8",
    "--training.local_batch_size=2",
    "--training.data_streams=16",
    "--training.steps=100",
    "--optimizer.lr=1e-3",
    "--lr_scheduler.warmup_steps=5",
    "--metrics.log_freq=1",
    "--checkpoint.enable",
]


@contextlib.contextmanager
def trainer_in(folder: str, arguments: list[str], settings: list[str] = SETTINGS) -> Iterator[Trainer]:
    """The real trainer on this rank, which has loaded what is in `folder`."""
    process = Process.from_environment()
    config = parse_command_line([*settings, f"--job.dump_folder={folder}", *arguments]).config
    with process_group(process, config.comm):
        trainer = Trainer(resolve(config, process.world_size, process.device.type), process.device)
        with trainer.checkpoint:
            yield trainer
        trainer.metrics.close()


def load_step_save(folder: str, arguments: list[str], steps: int) -> dict:
    """Load what is there, train `steps`, save; all state before and after, whole."""
    with trainer_in(folder, arguments) as trainer:
        before = whole_state(trainer)
        for step in range(trainer.start_step + 1, trainer.start_step + steps + 1):
            trainer.train_step(step)
        after = whole_state(trainer)
        if steps:
            trainer.checkpoint.save(trainer.start_step + steps, tokens_seen=7, last=True)
        names = {name for part in trainer.model_parts for name, _ in part.named_parameters()}
        return {"before": before, "after": after, "step": trainer.start_step, "names": names}


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor | int | float]:
    state: dict = {name: whole(x) for name, x in tensors_of(trainer.model_parts, trainer.optimizer).items()}
    state |= {f"stream {s}": entry for s, entry in trainer.data.state_dict().items()}
    return state | {"lr": trainer.lr_scheduler.get_last_lr()[0], "group lr": trainer.optimizer.param_groups[0]["lr"]}


def merged(results: list[dict], when: str) -> dict:
    """The state of all ranks, which must agree on what they all have."""
    state: dict = {}
    for result in results:
        for name, value in result[when].items():
            assert name not in state or same(state[name], value), name
            state[name] = value
    return state


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


CHAIN = ("fsdp2", "tp2", "pp2", "hsdp2x2", "one")
VARIANTS = {
    "plain": [],
    "tied embeddings": ["--model.flavor=tiny_tied"],
    "np_layernorm": ["--model.norm_type=np_layernorm"],
    "cpu offload": ["--training.enable_cpu_offload"],
    "fused": ["--optimizer.implementation=fused"],
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
        mine = torch.cat([batch["tokens"] for _ in range(2) for batch in trainer.data.take()])
        gathered = exchange.all_gather(mine, trainer.dims["dp"])
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
    """Train on while the writer is held up; what is saved must be the state of its own step."""
    trained = threading.Event()
    write = weights.Writer.write_data

    def held_up(writer, *rest):
        assert trained.wait(60)
        return write(writer, *rest)

    with trainer_in(folder, [*arguments, f"--checkpoint.async_mode={mode}", "--checkpoint.interval=1"]) as trainer:
        path = Path(folder) / "checkpoint"
        with mock.patch.object(weights.Writer, "write_data", held_up):
            trainer.train_step(1)
            wanted = whole_state(trainer)
            assert trainer.checkpoint.save(1, tokens_seen=0)
            for step in (2, 3):
                trainer.train_step(step)
            meanwhile = LocalStore(path).steps()
            trained.set()
            trainer.checkpoint.wait()
        return wanted, whole_state(trainer), meanwhile, LocalStore(path).steps()


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
    """Of each of three saves: addresses that are new, and whether the copies are the state of that step."""
    arguments = [*LAYOUTS["fsdp2"][1], "--checkpoint.async_mode=async_with_pinned_mem", "--checkpoint.interval=1"]
    found, known = [], set()
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
            found.append((len(held - known), is_it))
            known |= held
    return found


def test_the_memory_of_copies_is_kept(pool: WorkerPool, tmp_path: Path) -> None:
    for first, *later in pool.run(2, kept_memory_case, str(tmp_path)):
        assert first[0] > 10
        assert first[1]
        assert later == [(0, True)] * 2


def full_disk_case(folder: str, mode: str, rank: int, number: int) -> tuple[str, str, list[int]]:
    """Rank `rank` cannot write, with this error; where it arrives, and how it reads."""
    target = (weights.Writer, "write_data") if rank else (LocalStore, "publish")
    broken = getattr(*target)

    def no_space(*_: object) -> None:
        if Process.from_environment().rank == rank:
            raise OSError(number, os.strerror(number))
        return broken(*_)

    with trainer_in(folder, [f"--checkpoint.async_mode={mode}", *LAYOUTS["fsdp2"][1]]) as trainer:
        trainer.train_step(1)
        where, text = "nowhere", ""
        with mock.patch.object(*target, no_space):
            try:
                where = "save"
                trainer.checkpoint.save(500, tokens_seen=0)
                trainer.train_step(2)
                where = "next save"
                trainer.checkpoint.save(1000, tokens_seen=0)
            except CheckpointError as error:
                text = str(error)
        return where, text, LocalStore(Path(folder) / "checkpoint").steps()


ROOM_ERRORS = {errno.ENOSPC: "the disk is full (", errno.EDQUOT: "the quota of this user is used up (about "}
QUICK_ERRORS = {("disabled", 0, errno.EDQUOT), ("async", 1, errno.ENOSPC), ("async_with_pinned_mem", 0, errno.ENOSPC)}


@pytest.mark.parametrize(
    ("mode", "rank", "number"),
    [
        pytest.param(*case, marks=[] if case in QUICK_ERRORS else [pytest.mark.slow])
        for case in product(("disabled", "async", "async_with_pinned_mem"), (0, 1), ROOM_ERRORS)
    ],
)
def test_an_error_while_writing_reaches_every_rank(
    pool: WorkerPool, tmp_path: Path, mode: str, rank: int, number: int
) -> None:
    for where, text, steps in pool.run(2, full_disk_case, str(tmp_path), mode, rank, number):
        assert where == ("save" if mode == "disabled" else "next save")
        assert text.startswith("the checkpoint of step 500 could not be written to ")
        assert f"(rank {rank}: {ROOM_ERRORS[number]}" in text
        assert "are needed)); make room, or name another job.dump_folder, and run the same command again" in text
        assert "\n" not in text
        assert steps == []


# ---- what cannot be loaded


def main_case(folder: str, arguments: list[str]) -> tuple[int, str]:
    """The program's exit code and stderr on this rank; time-outs are short, so that a hang would fail."""
    err = io.StringIO()
    settings = [*SETTINGS, f"--job.dump_folder={folder}", "--comm.init_timeout_seconds=20", *arguments]
    with contextlib.redirect_stderr(err):
        code = train.main(settings)
    return code, err.getvalue()


def damaged(path: Path, kind: str) -> None:
    if kind == "one wrong bit":
        data = path / "__1_0.distcp"
        content = bytearray(data.read_bytes())
        # In the middle of the largest tensor's numbers, past every header.
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif kind == "zeros":
        data = path / "__0_0.distcp"
        data.write_bytes(bytes(data.stat().st_size))
    elif kind == "metadata garbage":
        (path / ".metadata").write_bytes(os.urandom((path / ".metadata").stat().st_size))
    elif kind == "data of another":
        (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[::-1])


@pytest.mark.parametrize("kind", ["one wrong bit", *slow("zeros", "metadata garbage", "data of another")])
def test_a_damaged_checkpoint_is_one_sentence_on_every_layout(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    pool.run(2, load_step_save, str(tmp_path), LAYOUTS["fsdp2"][1], 1)
    pool.run(2, load_step_save, str(tmp_path), LAYOUTS["fsdp2"][1], 1)
    damaged(tmp_path / "checkpoint" / "step-2", kind)
    for layout in ("fsdp2", "tp2"):
        world_size, arguments = LAYOUTS[layout]
        results = pool.run(world_size, main_case, str(tmp_path), arguments)
        assert [code for code, _ in results] == [2] * world_size
        assert [err for _, err in results[1:]] == [""] * (world_size - 1)
        message = results[0][1]
        assert message.startswith(f"error: the checkpoint {tmp_path}/checkpoint/step-2 cannot be read (")
        assert message.endswith("use another with checkpoint.load_step (there are 1), or remove it\n")
        assert message.count("\n") == 1
    for code, err in pool.run(2, main_case, str(tmp_path), ["--checkpoint.load_step=1", "--training.steps=2"]):
        assert (code, err) == (0, "")


def test_other_data_are_found_by_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    """A data set of another size: only the running job can see that."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "some words that are read"}\n' * 20)
    arguments = ["--training.dataset=jsonl", f"--training.dataset_path={data}", *LAYOUTS["fsdp2"][1]]
    pool.run(2, load_step_save, str(tmp_path), arguments, 1)
    data.write_text('{"text": "some words that are read"}\n' * 21)
    results = pool.run(2, main_case, str(tmp_path), arguments)
    assert [code for code, _ in results] == [2, 2]
    assert results[0][1].startswith("error: the data set has 21 documents, and had 20 when the checkpoint was saved, ")
    assert results[1][1] == ""


def test_folders_that_cannot_be_made_are_one_sentence(pool: WorkerPool, tmp_path: Path) -> None:
    for arguments in (["--job.dump_folder=/proc/x"], ["--checkpoint.folder=/proc/x"]):
        results = pool.run(2, main_case, str(tmp_path), [*arguments, *LAYOUTS["fsdp2"][1]])
        assert [code for code, _ in results] == [2, 2]
        assert results[0][1].count("\n") == 1
        assert "/proc/x" in results[0][1]
        assert "cannot be written" in results[0][1]
        assert results[1][1] == ""


def steps_seen_case(folder: str) -> str:
    """Rank 1 does not see the checkpoints of rank 0: a folder that is not shared."""
    if Process.from_environment().rank == 1:
        elsewhere = mock.patch.dict(os.environ, {"LOCAL_RANK": "0"})  # of another machine
        with elsewhere, mock.patch("trainer.checkpoint.checkpointer.step_to_load", return_value=None):
            return main_case(folder, LAYOUTS["fsdp2"][1])
    return main_case(folder, LAYOUTS["fsdp2"][1])


def test_ranks_that_see_different_folders_stop(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, load_step_save, str(tmp_path), LAYOUTS["fsdp2"][1], 1)
    results = pool.run(2, steps_seen_case, str(tmp_path))
    assert [code for code, _ in results] == [2, 2]
    assert "one rank finds step 1 in" in results[0][1]
    assert "one folder that all machines share" in results[0][1]


# ---- cost


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
    """Of a thousand ranks one reads the metadata, once, and lists the files."""
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
    # The other reduction is that of the number of labels, before the backward.
    assert pool.run(2, stop_case, str(tmp_path), arguments) == [({"all_reduce": 2}, {})] * 2


def late_case(folder: str) -> str:
    """The message for a checkpoint of another model that another job saves after this one was checked."""
    process = Process.from_environment()
    config = parse_command_line([*SETTINGS, f"--job.dump_folder={folder}"]).config
    job = resolve(config, process.world_size, process.device.type)
    with trainer_in(folder, ["--model.norm_type=layernorm"]) as trainer:
        trainer.train_step(1)
        trainer.checkpoint.save(1, tokens_seen=7, last=True)
    with process_group(process, config.comm), pytest.raises(ConfigError) as error:
        Trainer(job, process.device)
    return str(error.value)


def test_what_appears_after_the_check_is_checked_again(pool: WorkerPool, tmp_path: Path) -> None:
    (message,) = pool.run(1, late_case, str(tmp_path))
    assert "whose norm_type = 'rmsnorm' is not the 'layernorm' of the checkpoint" in message

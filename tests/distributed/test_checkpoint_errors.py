"""Law: what goes wrong with a checkpoint stops all ranks alike, with one sentence."""

import errno
import os
from itertools import product
from pathlib import Path
from unittest import mock

import pytest

from tests.distributed.checkpoint_cases import SETTINGS, damaged, load_step_save, main_case, trainer_in
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.checkpoint import dcp_files
from trainer.checkpoint.failed_save import CheckpointError
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.stores.store import Store
from trainer.trainer import Trainer


def full_disk_case(folder: str, mode: str, rank: int, number: int) -> tuple[str, str, list[int]]:
    """Rank `rank` cannot write, with this error; where it arrives, and how it reads."""
    target = (dcp_files.Writer, "write_data") if rank else (Store, "publish")
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
        return where, text, Store(Path(folder) / "checkpoint").steps()


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
        with elsewhere, mock.patch("trainer.checkpoint.run_folder.step_to_load", return_value=None):
            return main_case(folder, LAYOUTS["fsdp2"][1])
    return main_case(folder, LAYOUTS["fsdp2"][1])


def test_ranks_that_see_different_folders_stop(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, load_step_save, str(tmp_path), LAYOUTS["fsdp2"][1], 1)
    results = pool.run(2, steps_seen_case, str(tmp_path))
    assert [code for code, _ in results] == [2, 2]
    assert "one rank finds step 1 in" in results[0][1]
    assert "one folder that all machines share" in results[0][1]


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

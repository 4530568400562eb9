"""Laws of what a run saves by the time, of a run that only reads, and of parts that are not loaded on purpose."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.distributed.checkpoint_cases import load_step_save, main_case, merged, same, trainer_in
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.checkpoint.verify import verify_step
from trainer.runtime.process_group import Process
from trainer.stores.folder import read_state
from trainer.stores.store import Store

FSDP2 = LAYOUTS["fsdp2"][1]


def timed_case(folder: str, arguments: list[str], passed: dict[int, int]) -> list[int]:
    """After which steps a checkpoint is written, if the time has passed in step S on rank `passed[S]` alone."""
    with trainer_in(folder, [*FSDP2, *arguments]) as trainer:
        checkpoint = trainer.checkpoint
        for step in range(1, 6):
            if passed.get(step) == trainer.dims.rank("world"):
                checkpoint._saved_at -= 1001
            trainer.train_step(step)
            checkpoint.save(step, tokens_seen=0, due=trainer.save_is_due)
        return Store(Path(folder) / "checkpoint").steps()


def test_one_rank_whose_time_is_up_makes_all_save(pool: WorkerPool, tmp_path: Path) -> None:
    """The vote is summed over all ranks, and the clock starts again with a save on all of them."""
    votes_at_once = "--optimizer.implementation=foreach"  # fused, the votes of a step are read with the next one
    timed = ["--checkpoint.interval_seconds=1000", "--checkpoint.interval=4", votes_at_once]
    assert pool.run(2, timed_case, str(tmp_path / "timed"), timed, {2: 1, 5: 0}) == [[2, 4, 5]] * 2
    assert pool.run(2, timed_case, str(tmp_path / "untimed"), timed[1:], {2: 1, 5: 0}) == [[4]] * 2


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_load_only_resumes_and_writes_no_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    """The leftovers of an interrupted save stay too."""
    pool.run(2, load_step_save, str(tmp_path / "a"), FSDP2, 2)
    (tmp_path / "a" / "checkpoint" / "step-9.tmp").mkdir()
    before = contents(tmp_path / "a")
    arguments = [
        *FSDP2,
        f"--checkpoint.folder={tmp_path}/a/checkpoint",
        "--training.steps=4",
        "--checkpoint.interval=1",
    ]
    results = pool.run(2, main_case, str(tmp_path / "b"), [*arguments, "--checkpoint.load_only"])
    assert [code for code, _ in results] == [0, 0]
    assert contents(tmp_path / "a") == before
    assert len((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()) == 2
    assert [code for code, _ in pool.run(2, main_case, str(tmp_path / "b"), arguments)] == [0, 0]
    assert Store(tmp_path / "a" / "checkpoint").steps() == [2, 3, 4]  # a control: without it, there are more


@pytest.mark.parametrize("excluded", [["optimizer"], *slow(["dataloader"], ["optimizer", "dataloader"])])
def test_what_is_excluded_is_not_loaded_and_all_else_is(pool: WorkerPool, tmp_path: Path, excluded: list[str]) -> None:
    wanted = merged(pool.run(2, load_step_save, str(tmp_path), FSDP2, 2), "after")
    excluding = ["--checkpoint.load_step=2", "--checkpoint.exclude_from_loading", *excluded]
    results = pool.run(2, load_step_save, str(tmp_path), [*LAYOUTS["tp2"][1], *excluding], 1)
    got = merged(results, "before")
    assert got.keys() == wanted.keys()
    assert results[0]["step"] == 2
    for name, value in wanted.items():
        if name.startswith("optimizer.") and "optimizer" in excluded:
            assert value.any()
            assert not got[name].any()
        elif name.startswith("stream ") and "dataloader" in excluded:
            assert got[name]["samples"] == 0
        else:
            assert same(got[name], value), name
    # The checkpoint of the new history holds what it has become: nothing is excluded from here on.
    after = merged(results, "after")
    again = merged(pool.run(2, load_step_save, str(tmp_path), FSDP2, 0), "before")
    assert [name for name in after if not same(after[name], again[name])] == []
    assert after["optimizer.norm.weight.step"] == torch.tensor(1.0 if "optimizer" in excluded else 3.0)


@pytest.mark.parametrize("excluded", [[], *slow(["dataloader"])])
def test_a_run_continues_another_one_and_then_itself(pool: WorkerPool, tmp_path: Path, excluded: list[str]) -> None:
    """On another layout; the folder of the other run stays as it is."""
    wanted = merged(pool.run(2, load_step_save, str(tmp_path / "a"), FSDP2, 2), "after")
    before = contents(tmp_path / "a")
    branch = [f"--checkpoint.initial_load_path={tmp_path}/a/checkpoint/step-2"]
    branch += ["--checkpoint.initial_load_model_only", "false"]
    branch += ["--checkpoint.exclude_from_loading", *excluded] if excluded else []
    results = pool.run(2, load_step_save, str(tmp_path / "b"), [*LAYOUTS["tp2"][1], *branch], 1)
    got = merged(results, "before")
    assert results[0]["step"] == 2
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if name.startswith("stream ") and excluded:
            assert got[name]["samples"] == 0
        else:
            assert same(got[name], value), name
    assert contents(tmp_path / "a") == before
    assert Store(tmp_path / "b" / "checkpoint").steps() == [3]
    after = merged(results, "after")
    again = merged(pool.run(2, load_step_save, str(tmp_path / "b"), [*FSDP2, *branch], 0), "before")
    assert [name for name in after if not same(after[name], again[name])] == []


def best_unreadable_case(folder: str, arguments: list[str]) -> tuple[int, str]:
    """Rank 0 cannot read which checkpoint is the best one."""
    failing = OSError(errno.EIO, os.strerror(errno.EIO)) if Process.from_environment().rank == 0 else None
    with mock.patch("trainer.checkpoint.run_folder.best_saved", side_effect=failing, return_value=None):
        return main_case(folder, arguments)


def test_a_mark_of_the_best_that_one_rank_cannot_read_stops_all(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, load_step_save, str(tmp_path), FSDP2, 1)
    results = pool.run(2, best_unreadable_case, str(tmp_path), [*FSDP2, "--training.steps=2"])
    assert all(code != 0 for code, _ in results)
    assert "best.json cannot be read (Input/output error)" in "".join(text for _, text in results)
    assert Store(tmp_path / "checkpoint").steps() == [1]


def test_the_last_save_may_be_of_weights_alone(pool: WorkerPool, tmp_path: Path) -> None:
    """No run resumes from them by itself; other commands take them, and a new optimizer may start from them."""
    run, arguments = str(tmp_path), [*FSDP2, "--checkpoint.last_save_model_only", "--checkpoint.interval=1"]
    wanted = merged(pool.run(2, load_step_save, run, [*arguments, "--training.steps=2"], 2), "after")
    state = read_state(Store(tmp_path / "checkpoint"), 2)
    assert state.model_only
    whole = pool.run(2, load_step_save, str(tmp_path / "stopped"), [*arguments, "--training.steps=3"], 2)
    assert same(merged(whole, "after")["model.norm.weight"], wanted["model.norm.weight"])
    stopped = read_state(Store(tmp_path / "stopped" / "checkpoint"), 2)  # before its last step
    assert not stopped.model_only
    assert sum(state.files.values()) < 0.5 * sum(stopped.files.values())
    *_, tensors = verify_step(Store(tmp_path / "checkpoint"), 2, None)
    assert tensors == sum(name.startswith("model.") for name in wanted)

    results = pool.run(2, main_case, run, [*arguments, "--training.steps=3"])
    text = "".join(text for code, text in results if code)
    assert text.count("training.steps = 3 is beyond the checkpoint") == 1
    assert "which holds the weights alone (checkpoint.last_save_model_only)" in text
    assert [code for code, _ in pool.run(2, main_case, run, [*arguments, "--training.steps=2"])] == [0, 0]

    excluded = ["--checkpoint.load_step=2", "--checkpoint.exclude_from_loading", "optimizer", "--training.steps=3"]
    results = pool.run(2, load_step_save, run, [*LAYOUTS["tp2"][1], *excluded], 1)
    got = merged(results, "before")
    assert results[0]["step"] == 2
    assert [name for name in wanted if name.startswith("model.") and not same(got[name], wanted[name])] == []
    assert not any(got[name].any() for name in got if name.startswith("optimizer."))
    assert not read_state(Store(tmp_path / "checkpoint"), 3).model_only

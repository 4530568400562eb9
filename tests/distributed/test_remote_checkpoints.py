"""Laws of checkpoints in a remote store: ranks save there and load from there what they would in a folder."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.checkpoint_cases import load_step_save, main_case, merged, same, trainer_in
from tests.distributed.harness import TINY
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.s3_server import ADDRESS, reached_by, s3_server
from tests.slow import slow
from trainer.checkpoint.checkpointer import tensors_of
from trainer.checkpoint.failed_save import CheckpointError
from trainer.commands import convert, verify
from trainer.families.registry import MODELS
from trainer.runtime.process_group import Process
from trainer.stores.addresses import store_of
from trainer.stores.remote_store import RemoteStore

FSDP2, TP2 = LAYOUTS["fsdp2"][1], LAYOUTS["tp2"][1]
Variables = dict[str, str]


@pytest.fixture(scope="module")
def server() -> Iterator[Variables]:
    with s3_server() as variables, reached_by(variables):
        yield variables


@pytest.fixture
def folder(server: Variables, tmp_path: Path) -> RemoteStore:
    return store_of("checkpoint.folder", f"{ADDRESS}/{tmp_path.name}")


def at(variables: Variables, case: Callable[..., Any], *args: Any) -> Any:
    """A case on a rank that finds the server."""
    with reached_by(variables):
        return case(*args)


def different(got: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    assert got.keys() == wanted.keys()
    return [name for name, value in wanted.items() if not same(got[name], value)]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
@pytest.mark.slow
def test_any_layout_resumes_from_what_another_saved(
    pool: WorkerPool, server: Variables, folder: RemoteStore, tmp_path: Path, mode: str
) -> None:
    there = [f"--checkpoint.folder={folder}", f"--checkpoint.async_mode={mode}", "--checkpoint.interval=1"]
    there += ["--checkpoint.keep_latest_k=2", "--training.steps=3"]
    run = str(tmp_path / "run")
    assert [code for code, _ in pool.run(2, at, server, main_case, run, [*FSDP2, *there])] == [0, 0]
    assert folder.steps() == [2, 3]
    assert {name.split("/")[0] for name in folder.objects()} == {"step-2", "step-3"}
    assert not (tmp_path / "run" / "checkpoint").exists()
    locally = str(tmp_path / "control")
    assert [code for code, _ in pool.run(2, main_case, locally, [*FSDP2, "--training.steps=3"])] == [0, 0]
    control = merged(pool.run(2, load_step_save, locally, TP2, 0), "before")
    results = pool.run(2, at, server, load_step_save, run, [*TP2, *there], 1)
    assert results[0]["step"] == 3
    assert different(merged(results, "before"), control) == []
    again = merged(pool.run(2, at, server, load_step_save, run, [*FSDP2, *there], 0), "before")
    assert different(again, merged(results, "after")) == []


def killed_case(folder: str, arguments: list[str], rank: int) -> None:
    """Rank `rank` is killed in the second save: 0 before it publishes, another one before it has written."""
    target = (
        "trainer.stores.remote_store.RemoteStore.publish"
        if rank == 0
        else "trainer.checkpoint.dcp_files.Writer.write_data"
    )
    with trainer_in(folder, arguments) as trainer:
        trainer.train_step(1)
        trainer.checkpoint.save(1, tokens_seen=0, due=True)
        trainer.train_step(2)
        if Process.from_environment().rank == rank:
            with mock.patch(target, side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
                trainer.checkpoint.save(2, tokens_seen=0, due=True)
        trainer.checkpoint.save(2, tokens_seen=0, due=True)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_saves_loses_nothing(
    pool: WorkerPool, server: Variables, folder: RemoteStore, tmp_path: Path, rank: int
) -> None:
    arguments = [*FSDP2, f"--checkpoint.folder={folder}"]
    with pytest.raises(RankFailedError):
        pool.run(2, at, server, killed_case, str(tmp_path), arguments, rank)
    assert folder.steps() == [1]
    assert "step-2/saving" in folder.objects()
    results = pool.run(2, at, server, load_step_save, str(tmp_path), arguments, 0)
    assert results[0]["step"] == 1
    assert {name.split("/")[0] for name in folder.objects()} == {"step-1"}


def gone_case(folder: str, arguments: list[str], mode: str) -> tuple[str, str]:
    """The store does not answer any more from the second save on; where that is found, and how it reads."""
    with trainer_in(folder, [*arguments, f"--checkpoint.async_mode={mode}"]) as trainer:
        trainer.train_step(1)
        trainer.checkpoint.save(1, tokens_seen=0, due=True)
        trainer.checkpoint.wait()
        trainer.train_step(2)
        away = mock.patch.object(
            type(trainer.checkpoint.folder.path.fs), "_call_s3", side_effect=RuntimeError("no answer")
        )
        where = "save"
        with away:
            try:
                trainer.checkpoint.save(2, tokens_seen=0, due=True)
                where = "wait"
                trainer.checkpoint.wait()
            except CheckpointError as error:
                return where, str(error)
    return "nowhere", ""


@pytest.mark.parametrize(("mode", "expected"), [("disabled", "save"), *slow(("async", "wait"))])
def test_a_store_that_stops_to_answer_ends_the_run_on_every_rank(
    pool: WorkerPool, server: Variables, folder: RemoteStore, tmp_path: Path, mode: str, expected: str
) -> None:
    results = pool.run(2, at, server, gone_case, str(tmp_path), [*FSDP2, f"--checkpoint.folder={folder}"], mode)
    for where, text in results:
        assert where == expected
        assert text == (
            f"the checkpoint of step 2 could not be written to {folder} (rank 0: no answer); when the cause is gone, "
            "run the same command again"
        )
    assert folder.steps() == [1]


@pytest.mark.slow
def test_commands_read_a_run_whose_checkpoints_are_there(
    pool: WorkerPool,
    server: Variables,
    folder: RemoteStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another run branches off, the steps are verified, and the weights equal a run with a local folder."""
    monkeypatch.setitem(MODELS["llama3"].flavors, "tiny", TINY)
    there = f"--checkpoint.folder={folder}"
    for run, options in (("far", [there]), ("near", [])):
        assert pool.run(1, at, server, main_case, str(tmp_path / run), ["--training.steps=2", *options])[0][0] == 0
    for path in (str(folder), f"{folder}/step-2", str(tmp_path / "far")):
        assert verify.main([path]) == 0
        assert "step-2: whole" in capsys.readouterr().out
    for run in ("far", "near"):
        assert convert.main(["to-hf", str(tmp_path / run), str(tmp_path / f"{run}-hf")]) == 0
    written = [(tmp_path / f"{run}-hf" / "model.safetensors").read_bytes() for run in ("far", "near")]
    assert written[0] == written[1]

    branch = [f"--checkpoint.initial_load_path={folder}/step-2", "--checkpoint.initial_load_model_only", "false"]
    assert pool.run(1, at, server, load_step_save, str(tmp_path / "branch"), branch, 1)[0]["step"] == 2
    weights = branch[:1]
    assert pool.run(1, at, server, load_step_save, str(tmp_path / "weights"), weights, 1)[0]["step"] == 0

    (name,) = (name for name in folder.sizes(2) if name.endswith(".distcp"))
    damaged = folder.step(2) / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    assert verify.main([str(folder)]) == 1
    assert "step-2: damaged" in capsys.readouterr().out


def requests_case(folder: str, arguments: list[str]) -> tuple[int, int]:
    """Return the number of requests for contents while this rank resumed, and the number of tensors of its parts."""
    import s3fs

    asked: list[str] = []
    real = s3fs.S3FileSystem._call_s3

    def counted(self: object, method: str, *args: object, **kwargs: object) -> Any:
        asked.append(method)
        return real(self, method, *args, **kwargs)

    with mock.patch.object(s3fs.S3FileSystem, "_call_s3", counted), trainer_in(folder, arguments) as trainer:
        return asked.count("get_object"), len(tensors_of(trainer.model_parts, trainer.optimizer))


@pytest.mark.slow
def test_a_part_of_a_tensor_is_one_request(
    pool: WorkerPool, server: Variables, folder: RemoteStore, tmp_path: Path
) -> None:
    arguments = [*FSDP2, f"--checkpoint.folder={folder}"]
    pool.run(2, at, server, load_step_save, str(tmp_path), arguments, 1)
    results = pool.run(2, at, server, requests_case, str(tmp_path), arguments)
    for asked, tensors, other_requests in zip(*zip(*results, strict=True), (3, 1), strict=True):
        assert tensors > 50
        assert (
            asked == tensors + other_requests
        )  # state.json before the job starts; on rank 0 also when it loads, and the metadata

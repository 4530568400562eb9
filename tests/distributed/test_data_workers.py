"""Laws: a run with data workers is the run without them; one that dies stops all ranks after a checkpoint."""

import os
import signal
from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint import trainer_in
from trainer.checkpoint.store import LocalStore
from trainer.components.step_totals import StepTotals
from trainer.config.errors import ConfigError
from trainer.trainer import Trainer

KILLED_AFTER = 3


def workers_of(trainer: Trainer) -> list[int]:
    workers = trainer.data._loader._workers
    return [process.pid for process in workers._processes] if workers else []


def train(folder: str, arguments: list[str], rank_to_kill: int | None) -> tuple[str, list[float], int, dict]:
    """What stopped the run, its losses, the number of data workers, and the position of the data at the end."""
    with trainer_in(folder, ["--training.steps=7", *arguments]) as trainer:
        losses, found, read = [], set(), trainer.reduce_step

        def reading(step: int, totals: StepTotals) -> tuple[float, float, bool]:
            result = read(step, totals)
            losses.append(result[0])
            found.update(workers_of(trainer))
            if step == KILLED_AFTER and trainer.dims.rank("world") == rank_to_kill:
                os.kill(workers_of(trainer)[0], signal.SIGKILL)
            return result

        trainer.reduce_step = reading
        try:
            trainer.train()
        except ConfigError as error:
            return str(error), losses, len(found), trainer.data.state_dict()
        finally:
            trainer.data._loader._stop()
        return "", losses, len(found), trainer.data.state_dict()


@pytest.mark.parametrize("packing", ["concatenate", pytest.param("best_fit", marks=pytest.mark.slow)])
def test_a_run_with_workers_is_the_run_without_them(pool: WorkerPool, tmp_path: Path, packing: str) -> None:
    given = ["--checkpoint.no-enable", f"--training.packing={packing}"]
    alone = pool.run(2, train, str(tmp_path / "alone"), given, None)
    helped = pool.run(2, train, str(tmp_path / "helped"), [*given, "--training.data_workers=2"], None)
    for without, having in zip(alone, helped, strict=True):
        assert (without[2], having[2]) == (0, 2)
        assert without[:2] == having[:2]
        assert without[3] == having[3]


def test_a_worker_that_dies_stops_all_ranks_after_a_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    """The same command goes on from it, as if nothing had happened."""
    given = ["--training.data_workers=1"]
    whole = pool.run(2, train, str(tmp_path / "whole"), given, None)
    folder = str(tmp_path / "killed")
    stopped = pool.run(2, train, folder, given, 1)
    (told,) = {told for told, *_ in stopped}
    assert told.startswith("data worker 1 of 1 of process ")
    assert " ended by SIGKILL" in told
    (steps,) = {len(losses) for _, losses, *_ in stopped}
    assert KILLED_AFTER <= steps <= KILLED_AFTER + 2
    assert LocalStore(Path(folder) / "checkpoint").steps()[-1] == steps
    on = pool.run(2, train, folder, given, None)
    for first, second, third in zip(stopped, on, whole, strict=True):
        assert second[0] == ""
        assert first[1] + second[1] == pytest.approx(third[1], abs=1e-6)
        assert second[3] == third[3]

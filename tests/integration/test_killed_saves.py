"""Law: a run that is killed while it saves loses no whole checkpoint, and its next start resumes with the same bits.

Each life saves every step, and all its ranks are killed at a random moment of a save.
"""

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from tests.distributed.pool import RankFailedError, WorkerPool
from tests.integration.test_resume import SETTINGS, layout_of, logged, run_main
from tests.slow import slow
from trainer.checkpoint.verify import verify_step
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.stores.store import Store
from trainer.trainer import Trainer

RUN = ["--training.steps=5000", "--training.global_batch_size=-1"]  # more steps than all lives together have
SAVING = ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=2"]
SAVE_SECONDS = 0.05
"""About what a save takes on an idle machine; the kill comes at a random part of that."""


class Killer(threading.Thread):
    """Kills all ranks of the pool at a random moment after a save of this life has begun, or later in the next ones."""

    def __init__(self, pool: WorkerPool, folder: Path, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._pool, self._folder = pool, folder
        self._saves, self._seconds = chance.randrange(1, 3), chance.uniform(0, SAVE_SECONDS)
        self.done = threading.Event()

    def run(self) -> None:
        old, begun = self._unfinished(), set()
        while len(begun) < self._saves and not self.done.wait(0.001):
            now = self._unfinished()
            old &= now  # what the life before has left is removed by this one
            begun |= now - old
        if not self.done.wait(self._seconds):
            for process, _ in self._pool._workers:
                os.kill(process.pid, signal.SIGKILL)

    def _unfinished(self) -> set[str]:
        return {path.name for path in self._folder.glob("*.tmp")}


def without_a_save_case(folder: str, arguments: list[str], steps: int) -> None:
    """The first steps of the same run, in one life that saves nothing."""
    process = Process.from_environment()
    config = parse_command_line([*SETTINGS, f"--job.dump_folder={folder}", *arguments]).config
    with process_group(process, config.comm):
        trainer = Trainer(resolve(config, process.world_size, process.device.type), process.device)
        for step in range(1, steps + 1):
            trainer.train_step(step)
        trainer.metrics.close()


@pytest.mark.parametrize(
    ("layout", "mode", "kills"),
    [
        ("fsdp2", "disabled", 3),
        *slow(("fsdp2", "disabled", 100), ("one", "async", 100)),
    ],
)
def test_a_run_that_is_killed_while_it_saves_loses_nothing(
    pool: WorkerPool, tmp_path: Path, layout: str, mode: str, kills: int
) -> None:
    """With two kept, the newest whole step never goes back, and each that is there is whole in every byte."""
    world_size, degrees = layout_of(layout)
    arguments = [*degrees, *RUN, *SAVING, f"--checkpoint.async_mode={mode}"]
    folder, chance = tmp_path / "killed" / "checkpoint", random.Random(kills)
    newest, interrupted = 0, 0
    for kill in range(4 * kills):
        killer = Killer(pool, folder, chance)
        killer.start()
        try:
            with pytest.raises(RankFailedError, match="died"):
                pool.run(world_size, run_main, str(tmp_path / "killed"), arguments)
        finally:
            killer.done.set()
            killer.join()
        steps = Store(folder).steps()
        assert newest <= max(steps, default=0), f"lost by kill {kill}"
        for step in steps:
            verify_step(Store(folder), step, None)
        newest, interrupted = max(steps, default=0), interrupted + any(folder.glob("*.tmp"))
        if kill + 1 >= kills and interrupted >= kills // 3:  # on a fast disk most saves end before their kill
            break
    assert newest >= kills // 2
    assert interrupted >= kills // 3, "too few kills came in a save"
    last = pool.run(world_size, run_main, str(tmp_path / "killed"), [*arguments, "--job.max_minutes=1e-6"])
    assert last == [0] * world_size
    done = logged(tmp_path / "killed")
    assert [line["step"] for line in done] == [*range(1, newest + 2)]
    pool.run(world_size, without_a_save_case, str(tmp_path / "whole"), [*degrees, *RUN], newest + 1)
    assert logged(tmp_path / "whole") == done

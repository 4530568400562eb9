"""Laws of time-outs: each group has the time-out of its setting, and the pool names the rank that failed first."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.distributed.harness import Record, RecordingTrainer
from tests.distributed.loop_trainer import build
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.config.loader import parse_command_line
from trainer.distributed.sharding import exchange
from trainer.runtime.process_group import Process, process_group, set_timeout


def timeout_case(what: str) -> float:
    """Seconds that rank 0 waits for a collective, or a message, of a rank that does not come."""
    import time

    process = Process.from_environment()
    config = parse_command_line([]).config
    with process_group(process, config.comm):
        set_timeout(2.0)
        started, x = time.monotonic(), torch.ones(1)
        group = torch.distributed.group.WORLD
        if process.rank == 0:
            arriving = [exchange.Transfer(x, peer=1, is_send=False)]
            wait = {
                "collective": lambda: torch.distributed.all_reduce(x),
                "message": lambda: exchange.send_receive(arriving, group, kind="kv").wait(),
            }[what]
            with pytest.raises(RuntimeError, match="Timed out"):
                wait()
        else:
            time.sleep(4)
        return time.monotonic() - started


@pytest.mark.parametrize("what", ["message", *slow("collective")])
def test_a_lowered_timeout_is_in_force(pool: WorkerPool, what: str) -> None:
    """gloo keeps for messages the time-out that a group was made with, unless it is said again."""
    assert pool.run(2, timeout_case, what)[0] < 4


def stage_timeout_case(folder: str) -> float:
    """Seconds that rank 0 waits for a message of the other stage, which sends none, when steps have their time-out."""
    import time

    process, config, job = build(folder, *LAYOUTS["pp2"][1])
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        trainer._set_timeout(2.0)
        started, group = time.monotonic(), trainer.pipeline._group
        if process.rank == 0:
            with pytest.raises(RuntimeError, match="Timed out"):
                torch.distributed.recv(torch.ones(1), group=group, group_src=1)
        else:
            time.sleep(4)
        waited = time.monotonic() - started
        trainer.metrics.close()
    return waited


def test_stages_wait_for_each_other_as_long_as_for_a_step(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, stage_timeout_case, str(tmp_path))[0] < 4


def init_timeout_case() -> timedelta:
    process = Process.from_environment()
    config = parse_command_line(["--comm.init_timeout_seconds=77"]).config
    with process_group(process, config.comm):
        group = torch.distributed.group.WORLD
        return group._get_backend(torch.device("cpu")).options._timeout


def test_the_first_timeout_is_the_setting(pool: WorkerPool) -> None:
    assert pool.run(1, init_timeout_case) == [timedelta(seconds=77)]


def raising_case(rank: int) -> None:
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        if process.rank == rank:
            raise ValueError(f"rank {rank} is the cause")
        torch.distributed.all_reduce(torch.ones(1))


def test_the_pool_names_the_rank_that_has_the_cause_and_starts_again(pool: WorkerPool) -> None:
    for rank in (0, 1):
        with pytest.raises(RankFailedError, match=f"rank {rank} is the cause"):
            pool.run(2, raising_case, rank)
    assert pool.run(1, init_timeout_case)

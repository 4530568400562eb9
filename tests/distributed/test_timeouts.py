"""Laws of time-outs: each group has the time-out of its setting, and the pool names the rank that failed first."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

from longshard.context.execution import build as execution
from longshard.sharding import exchange
from longshard.sharding.exchange import group_timeout
from tests.distributed.harness import Record, RecordingTrainer
from tests.distributed.loop_trainer import build
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.config.loader import parse_command_line
from trainer.runtime.process_group import Process, process_group, set_timeout


def timeout_case(case: str) -> float:
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
            }[case]
            with pytest.raises(RuntimeError, match="Timed out"):
                wait()
        else:
            time.sleep(4)
        return time.monotonic() - started


@pytest.mark.parametrize("kind", ["message", *slow("collective")])
def test_a_lowered_timeout_is_in_force(pool: WorkerPool, kind: str) -> None:
    """Gloo keeps the time-out of the group's creation for messages, unless each message sets it again."""
    assert pool.run(2, timeout_case, kind)[0] < 4


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


def late_groups_case() -> list[float]:
    """The time-outs in seconds of a ring's own group, made lazily before and after the end of the first step."""
    process = Process.from_environment()
    with process_group(process, parse_command_line(["--comm.init_timeout_seconds=50"]).config.comm):
        timeouts = []
        for purpose, seconds in (("kv", 70), ("dkv", 60)):
            set_timeout(seconds)
            with (
                mock.patch.object(execution, "_is_queue", return_value=True),
                # Where the library is used without this program, PyTorch's default is in force.
                mock.patch.object(distributed_c10d, "_get_default_timeout", return_value=timedelta(seconds=600)),
            ):
                late = execution.own_group(torch.distributed.group.WORLD, purpose, "cpu")
            timeouts.append(group_timeout(late, process.device).total_seconds())
        return timeouts


def test_a_group_that_is_made_late_has_the_time_out_that_its_ranks_have_then(pool: WorkerPool) -> None:
    assert pool.run(2, late_groups_case) == [[70.0, 60.0]] * 2


def test_options_of_nccl_have_the_time_out_too() -> None:
    """They have one of their own, ten minutes by default, which a split group may take."""
    nccl = SimpleNamespace(Options=lambda **settings: SimpleNamespace(_timeout=timedelta(minutes=10), **settings))
    with mock.patch.object(torch.distributed, "ProcessGroupNCCL", nccl, create=True):
        options = execution._high_priority(timedelta(seconds=70))
    assert (options._timeout, options.is_high_priority_stream) == (timedelta(seconds=70), True)


def limits_case(folder: str) -> list[float]:
    """The time-outs that a run of four steps sets: rank 1 predicts 200 s a step; later rank 0's steps take 500 s."""
    steps = ["--training.steps=4", "--lr_scheduler.warmup_steps=0"]
    process, config, job = build(folder, *LAYOUTS["fsdp2"][1], *steps)
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        seen: list[float] = []
        trainer._set_timeout = seen.append
        trainer.metrics.predicted_seconds = lambda: 200.0 * process.rank
        noted, reads = trainer.limits.step_was_read, []

        def slower(asked: bool) -> None:
            reads.append(asked)
            noted(asked)
            if len(reads) == 3 and process.rank == 0:
                trainer.limits._longest = 500.0

        trainer.limits.step_was_read = slower
        trainer.train()
        assert reads == [False, False, False, True]  # rank 0 has asked with the totals of the last step
    return seen


def test_all_ranks_set_the_limits_that_the_slowest_one_needs(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, limits_case, str(tmp_path)) == [[600.0, 1500.0]] * 2

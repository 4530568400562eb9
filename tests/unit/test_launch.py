"""Laws of the launcher: no other machine reaches the store of a job on one node, and nobody unpickles its entries.

NCCL's watchdog writes a file. By this file, the launcher knows a rank that the watchdog ended from a crashed rank.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import TCPStore

from trainer.runtime import launch
from trainer.runtime.launch import Watchdog
from trainer.runtime.nodes import Nodes
from trainer.runtime.rank_processes import LOST_PEERS, RankEnd, RankProcesses, RankProgram, flight_record

ABORTED, KILLED = -signal.SIGABRT, -signal.SIGKILL


def end_of(watchdog: Watchdog, codes: list[int], capsys: pytest.CaptureFixture) -> tuple[int, str]:
    """Exit code and line of the launcher when its ranks ended with these codes, rank 0 first."""
    ends = [RankEnd(rank, code) for rank, code in enumerate(codes)]
    return launch._failed(ends, [], watchdog), capsys.readouterr().err.strip()


@pytest.fixture
def watchdog(tmp_path: Path) -> Watchdog:
    """The watchdogs of ranks 0 and 1 have written."""
    made = Watchdog(tmp_path)
    for rank in (0, 1):
        (tmp_path / flight_record(rank)).touch()
    return made


def test_the_rank_that_still_ran_hung(watchdog: Watchdog, capsys: pytest.CaptureFixture) -> None:
    code, line = end_of(watchdog, [ABORTED, ABORTED, KILLED], capsys)
    assert (code, line) == (1, "error: rank 2 hung, and was killed when its peers had given it up")


def test_a_rank_that_crashed_is_the_cause(watchdog: Watchdog, capsys: pytest.CaptureFixture) -> None:
    code, line = end_of(watchdog, [ABORTED, ABORTED, -signal.SIGSEGV], capsys)
    assert (code, line) == (128 + signal.SIGSEGV, "error: rank 2 failed first (SIGSEGV); the other ranks were stopped")


def test_all_ranks_waited(watchdog: Watchdog, capsys: pytest.CaptureFixture) -> None:
    code, line = end_of(watchdog, [ABORTED, ABORTED], capsys)
    assert code == 1
    assert line.startswith("error: rank 0 waited too long for its peers, and NCCL's watchdog ended it; the last coll")
    assert str(watchdog.folder) in line


def test_without_a_fresh_file_it_is_a_crash(watchdog: Watchdog, capsys: pytest.CaptureFixture) -> None:
    os.utime(watchdog.folder / flight_record(0), (0, 0))  # of an earlier run
    assert not watchdog.ended(0, ABORTED)
    assert watchdog.ended(1, ABORTED)
    assert watchdog.ended(None, ABORTED)
    assert not watchdog.ended(1, LOST_PEERS)
    assert not Watchdog(None).ended(1, ABORTED)
    code, line = end_of(watchdog, [ABORTED, ABORTED], capsys)
    assert (code, line) == (128 + signal.SIGABRT, "error: rank 0 failed first (SIGABRT); the other ranks were stopped")
    (watchdog.folder / flight_record(1)).unlink()
    (watchdog.folder / flight_record(2)).symlink_to("gone")
    assert not watchdog.ended(None, ABORTED)


def listeners(port: int) -> list[str]:
    """The addresses, in the kernel's hexadecimal digits, on which this machine listens at a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    ours = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    return [place.partition(":")[0] for place in ours]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux shows who listens where")
def test_the_store_of_one_machine_is_reached_from_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that its value is put back at the end
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    variables, store = started(Nodes(address="0.0.0.0"))
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert listeners(int(variables["MASTER_PORT"])) == ["0100007F"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    del store
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    started(Nodes())
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def started(nodes: Nodes) -> tuple[Mapping[str, str], TCPStore]:
    """Return the variables of the second of two ranks, which are not started, and the store."""
    processes = mock.Mock(spec=RankProcesses)
    store = launch._start(launch.Launch(nodes, 2, 5, RankProgram("rank", [])), processes)
    (_, variables), _ = processes.start.call_args
    assert variables[1]["RANK"] == variables[1]["LOCAL_RANK"] == "1"
    assert variables[1]["WORLD_SIZE"] == variables[1]["LOCAL_WORLD_SIZE"] == "2"
    return variables[1], store


def test_ranks_of_a_second_node_are_the_last_ones() -> None:
    second = launch.Launch(Nodes(count=2, rank=1, job="a job"), 4, 5, RankProgram("rank", []))
    variables = second.variables("node-a", 29500)
    assert [(own["RANK"], own["LOCAL_RANK"]) for own in variables.values()] == [(str(4 + i), str(i)) for i in range(4)]
    assert {own["WORLD_SIZE"] for own in variables.values()} == {"8"}


def test_a_process_with_threads_or_with_cuda_is_not_forked() -> None:
    code = "from trainer.runtime.rank_processes import can_fork; {}; print(can_fork())"
    cases = {
        "pass": "True",
        "import torch, trainer.trainer": "True",
        "import threading, time; threading.Thread(target=time.sleep, args=(1,)).start()": "False",
        "from unittest import mock; mock.patch('os.readlink', lambda _: '/dev/nvidia-uvm').start()": "False",
    }
    for before, answer in cases.items():
        run = [sys.executable, "-c", code.format(before)]
        assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip() == answer, before


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize(
    ("number", "sent"),
    [(signal.SIGUSR1, signal.SIGUSR2), (signal.SIGHUP, signal.SIGHUP), (signal.SIGINT, signal.SIGINT)],
)
def test_a_stop_signal_is_passed_on_and_sigusr1_as_another_one(number: signal.Signals, sent: signal.Signals) -> None:
    """At SIGUSR1 itself a rank shows its stacks and goes on."""
    processes = mock.Mock(running=[0])
    with launch._passing_signals_on(processes, [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]) as passed_on:
        os.kill(os.getpid(), number)
        assert passed_on == [sent]
    processes.send.assert_called_once_with(sent)


def test_a_rank_that_ended_early_with_code_0_is_the_cause(capsys: pytest.CaptureFixture) -> None:
    code, line = end_of(Watchdog(None), [0, LOST_PEERS], capsys)
    assert (code, line) == (1, "error: rank 0 ended before the others, with exit code 0, and they lost it")


def test_a_rank_that_runs_on_after_the_others_is_killed_and_noted() -> None:
    processes = RankProcesses()
    running = subprocess.Popen(["sleep", "10"])
    processes._processes = {0: mock.Mock(pid=0, poll=lambda: 0), 1: running}
    processes.wait(Watchdog(None).grace_of, end_seconds=0.1)
    assert processes.overdue == [1]
    assert running.poll() is not None

"""Laws of the launcher: no other machine reaches the store of a job on one node, and nobody unpickles what it holds.

A rank that NCCL's watchdog ended is told from one that crashed, by the file that the watchdog wrote.
"""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer.runtime import launch
from trainer.runtime.launch import Watchdog
from trainer.runtime.nodes import Nodes
from trainer.runtime.process_group import LOST_PEERS, flight_record

ABORTED, KILLED = -signal.SIGABRT, -signal.SIGKILL


def end_of(watchdog: Watchdog, codes: list[int], capsys: pytest.CaptureFixture) -> tuple[int, str]:
    """Exit code and line of the launcher when its ranks ended with these codes, rank 0 first."""
    failures = {
        rank: mock.Mock(exitcode=code, timestamp=rank, signal_name=lambda code=code: signal.Signals(-code).name)
        for rank, code in enumerate(codes)
    }
    return launch._failed(ChildFailedError("job", failures), [], watchdog), capsys.readouterr().err.strip()


@pytest.fixture
def watchdog(tmp_path: Path) -> Watchdog:
    """The watchdogs of ranks 0 and 1 have written."""
    made = Watchdog(tmp_path)
    for rank in (0, 1):
        (tmp_path / flight_record(rank)).touch()
    return made


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChildFailedError, "format_msg", lambda _: "")


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


def listeners(port: int) -> list[str]:
    """The addresses, in the kernel's hexadecimal digits, on which this machine listens at a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    ours = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    return [place.partition(":")[0] for place in ours]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux shows who listens where")
def test_the_store_of_one_machine_is_reached_from_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that its value is put back at the end
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    config, store = launch._configured(Nodes(address="0.0.0.0"), 2, 5)
    host, _, port = config.rdzv_endpoint.rpartition(":")
    assert (host, listeners(int(port))) == ("127.0.0.1", ["0100007F"])
    assert config.rdzv_backend == "static"  # the state of "c10d" is a pickle in the store
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    del store
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    launch._configured(Nodes(), 2, 5)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"

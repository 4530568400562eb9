"""Law: a rank that NCCL's watchdog ended is told from one that crashed, by the file that the watchdog wrote."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer.runtime import launch
from trainer.runtime.launch import Watchdog
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

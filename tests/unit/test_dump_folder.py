"""The lock of a dump folder: one holder at a time, gone with its process, named in the refusal."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from trainer.config import ConfigError
from trainer.runtime import folder_held, holder_of

HOLD = """
import sys, time
from pathlib import Path
from trainer.runtime import folder_held
with folder_held(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder: Path) -> subprocess.Popen:
    """Another process that holds the folder."""
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    return other


def test_the_holder_is_named_and_its_end_frees_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert holder_of(folder) is None
    other = hold(folder)
    taken = holder_of(folder, patience_seconds=0)
    assert f"(process {other.pid} on {socket.gethostname()}, started 20" in str(taken)
    with (
        pytest.raises(ConfigError, match="belongs to one job at a time"),
        folder_held(folder, pytest.fail, patience_seconds=0),
    ):
        pass
    os.kill(other.pid, signal.SIGKILL)  # it can clean nothing up
    with folder_held(folder, pytest.fail):
        assert f"process {os.getpid()} " in str(holder_of(folder, patience_seconds=0))
    assert holder_of(folder, patience_seconds=0) is None
    other.wait()
    other.stdout.close()


def test_a_job_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    other = hold(tmp_path)
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {other.pid}"])
    with folder_held(tmp_path, pytest.fail, patience_seconds=20):
        assert other.wait() == -signal.SIGKILL
    other.stdout.close()


def test_a_file_system_without_locks_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    with (
        mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")),
        folder_held(tmp_path, lines.append),
    ):
        pass
    assert lines == [f"the file system of {tmp_path} has no locks: let no other job use this folder as job.dump_folder"]


def test_an_error_inside_stays_what_it_is(tmp_path: Path) -> None:
    """Only making and locking the folder is about the setting."""
    with pytest.raises(FileNotFoundError), folder_held(tmp_path, pytest.fail):
        Path(tmp_path / "missing").read_text()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"), folder_held(tmp_path / "file", pytest.fail):
        pass

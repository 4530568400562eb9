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
from trainer.config.loader import parse_command_line
from trainer.runtime.console import logger
from trainer.runtime.dump_folder import folder_held, folders_of, holder_of

HOLD = """
import sys, time
from pathlib import Path
from trainer.runtime.dump_folder import folder_held
with folder_held(Path(sys.argv[1])):
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
    assert holder_of({"job.dump_folder": folder}) is None
    other = hold(folder)
    taken = holder_of({"job.dump_folder": folder}, patience_seconds=0)
    assert f"(process {other.pid} on {socket.gethostname()}, started 20" in str(taken)
    with (
        pytest.raises(ConfigError, match="belongs to one job at a time"),
        folder_held(folder, patience_seconds=0),
    ):
        pass
    os.kill(other.pid, signal.SIGKILL)  # it can clean nothing up
    with folder_held(folder):
        assert f"process {os.getpid()} " in str(holder_of({"job.dump_folder": folder}, patience_seconds=0))
    assert holder_of({"job.dump_folder": folder}, patience_seconds=0) is None
    other.wait()
    other.stdout.close()


def test_the_folder_of_checkpoints_is_held_where_the_job_saves_to_it(tmp_path: Path) -> None:
    """A job with another dump folder, or another name of the folder, sees the lock."""

    def folders(*arguments: str) -> dict[str, Path]:
        return folders_of(parse_command_line([f"--job.dump_folder={tmp_path}/one", *arguments]).config)

    enabled, dump = "--checkpoint.enable", {"job.dump_folder": tmp_path / "one"}
    assert folders(enabled) == dump | {"checkpoint.folder": tmp_path / "one" / "checkpoint"}
    for nothing in ([], [enabled, "--checkpoint.load_only"], [enabled, "--checkpoint.folder=s3://bucket/run"]):
        assert folders(*nothing) == dump
    assert folders(enabled, "--checkpoint.folder=.") == dump  # one lock: a second one would wait for the first
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    other = hold(tmp_path / "one" / "checkpoint")
    elsewhere = [f"--job.dump_folder={tmp_path}/two", enabled, f"--checkpoint.folder={tmp_path}/link/checkpoint"]
    taken = holder_of(folders_of(parse_command_line(elsewhere).config), patience_seconds=0)
    assert str(taken).startswith(f"checkpoint.folder = '{tmp_path}/link/checkpoint' is in use by another job (process")
    other.kill()
    other.wait()
    other.stdout.close()


def test_a_job_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    other = hold(tmp_path)
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {other.pid}"])
    with folder_held(tmp_path, patience_seconds=20):
        assert other.wait() == -signal.SIGKILL
    other.stdout.close()


def test_a_file_system_without_locks_is_told(tmp_path: Path) -> None:
    with (
        mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")),
        mock.patch.object(logger, "warning") as warned,
        folder_held(tmp_path),
    ):
        pass
    line = f"the file system of {tmp_path} has no locks: let no other job use this folder as job.dump_folder"
    warned.assert_called_once_with(line)


def test_an_error_inside_stays_what_it_is(tmp_path: Path) -> None:
    """Only making and locking the folder is about the setting."""
    with pytest.raises(FileNotFoundError), folder_held(tmp_path):
        Path(tmp_path / "missing").read_text()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"), folder_held(tmp_path / "file"):
        pass

"""Law: output that nobody reads is dropped, and ends no work; only text that is itself the result must be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.runtime.output import LastingOutput, outlasting_readers

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")


@pytest.fixture
def broken_pipe() -> int:
    """Write end of a pipe whose reader has gone."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    yield write_end
    os.close(write_end)


@pytest.mark.parametrize("is_log", [True, False])
def test_a_reader_that_goes_away_is_told_once_and_only_of_a_log(
    broken_pipe: int, is_log: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    output = LastingOutput(broken_pipe, is_log=is_log)
    assert [output.write(b"step 1\n"), output.write(b"step 2\n")] == [7, 7]
    assert os.write(broken_pipe, b"native code") == 11, "the descriptor is the null device"
    line = "note: standard output cannot be written (Broken pipe): the work goes on without it\n"
    assert capfd.readouterr().err == (line if is_log else "")


@pytest.mark.skipif(not FULL.exists(), reason="/dev/full is a device of Linux")
def test_a_full_disk_drops_a_log_and_stops_a_result() -> None:
    with FULL.open("wb", buffering=0) as full:
        assert LastingOutput(full.fileno(), is_log=True).write(b"step 1\n") == 7
        with pytest.raises(OSError, match="No space"):
            LastingOutput(full.fileno(), is_log=False).write(b"a result\n")


def test_all_of_a_text_reaches_a_slow_reader_of_a_non_blocking_pipe() -> None:
    """Larger than the pipe; a thread reads it."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    reader = subprocess.Popen(["wc", "-c"], stdin=read_end, stdout=subprocess.PIPE, text=True)
    os.close(read_end)
    assert LastingOutput(write_end, is_log=True).write(bytes(1_000_000)) == 1_000_000
    os.close(write_end)
    assert int(reader.communicate(timeout=10)[0]) == 1_000_000


def test_streams_come_back_and_streams_of_a_test_stay(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with outlasting_readers(is_log=True):
        print("a line")
        assert sys.stdout is before
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.parametrize("closing", ["| true", ">&-"], ids=["pipe", "closed descriptor"])
def test_help_without_a_reader_is_quiet(closing: str) -> None:
    command = f"{sys.executable} -m trainer help {closing}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

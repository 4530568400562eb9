"""A disk that is full, a quota, a limit on files: told in words, whatever PyTorch makes of them."""

import errno
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from trainer.components import sinks
from trainer.components.sinks import JsonLines, TensorBoard
from trainer.config import ConfigError
from trainer.config.writable import full_disk, os_error_of
from trainer.runtime.dump_folder import writing_to

ROOT = Path(__file__).resolve().parents[2]
# Files may have 64 KiB: what PyTorch writes beyond fails as on a full disk.
SAVE = """
import resource, signal, sys
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from trainer.checkpoint.dcp_files import Writer
from trainer.stores.state import RunState
from trainer.stores.store import Store
from trainer.config.writable import full_disk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
writer = Writer(Store(Path(sys.argv[1])), RunState(1, 0, {}, {}, {}), keep_latest_k=0)
try:
    dcp.save({"x": torch.zeros(1 << 20)}, storage_writer=writer, no_dist=True)
except CheckpointException as error:
    ((cause, _),) = error.failures.values()
    print(type(cause).__name__, cause.errno, full_disk(cause, Path(sys.argv[1]), needed=4 << 20))
"""


def test_a_checkpoint_that_does_not_fit_has_the_cause_and_not_pytorchs_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVE, str(tmp_path / "step-1.tmp")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    cause = "a file has reached the largest size that this user may write (ulimit -f) (about 4.0 MiB are needed)"
    assert result.stdout == f"OSError {errno.EFBIG} {cause}\n", result.stderr[-2000:]


def test_the_cause_is_found_behind_other_errors(tmp_path: Path) -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    error.__context__ = ValueError("between")
    error.__context__.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert os_error_of(error).errno == errno.ENOSPC
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=3 << 20)):
        cause = full_disk(error, tmp_path, needed=5 << 30)
    assert cause == "the disk is full (3.0 MiB are free, about 5.0 GiB are needed)"
    assert full_disk(OSError(errno.EDQUOT, "x"), tmp_path) == "the quota of this user is used up"
    for other in (RuntimeError("x"), OSError(errno.EIO, "x"), OSError("no number")):
        assert full_disk(other, tmp_path) == ""


def test_a_full_dump_folder_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error, writing_to(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    message = str(error.value)
    assert message.startswith(f"job.dump_folder = '{tmp_path}/out' cannot be written: the disk is full (")
    assert message.endswith("are free); make room there, or name another folder, and run the same command again")


def test_metrics_wait_for_room_and_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run continues to its next checkpoint, whose error says how to make room."""
    path = tmp_path / "metrics.jsonl"
    metrics = JsonLines(path)
    disk = metrics._file
    with Path("/dev/full").open("ab", buffering=0) as metrics._file, caplog.at_level("INFO", logger="trainer"):
        metrics.write({"step": 1})
        metrics.write({"step": 2})
        metrics._file = disk
        metrics.write({"step": 3})
        metrics.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    warned, note = caplog.messages
    assert warned.startswith(f"lines of {path} are not written: the disk is full (")
    assert note == f"there is room again: the lines of {path} that waited are written"


def test_metrics_that_never_fit_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_MOST_PENDING_BYTES", 20)
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    metrics._file.close()
    with Path("/dev/full").open("ab", buffering=0) as metrics._file, caplog.at_level("WARNING", logger="trainer"):
        for step in range(5):
            metrics.write({"step": step})
        metrics.close()
    assert caplog.messages[1:] == [f"the last lines of {tmp_path}/metrics.jsonl are not written: 5 are lost"]


def test_a_damaged_line_of_an_earlier_run_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last line too, if a killed run left it incomplete: this is no damage."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n{"step": 4}\n{"ste')
    with caplog.at_level("WARNING", logger="trainer"):
        JsonLines(path, 3).close()
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    assert caplog.messages == [f"damaged lines of {path} are removed: 2"]


def test_tensorboard_goes_on_when_there_is_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_RETRY_SECONDS", 0.0)
    board = TensorBoard(tmp_path)
    full = mock.patch.object(board._writer, "add_scalar", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full, caplog.at_level("INFO", logger="trainer"):
        for step in (1, 2, 3):
            board.write({"step": step, "loss": 1.0})
        board.close()
    warned, note = caplog.messages
    assert warned.startswith(f"TensorBoard's events in {board._run} are not written: the disk is full (")
    assert note == f"TensorBoard's events are written again; 1 steps are missing in {board._run}"


def _last_line_without_disk(code: str, folder: Path) -> str:
    """Return the last line on stderr of a process of its own, in which no file may have a byte."""
    limited = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    )
    command = [sys.executable, "-c", limited + code, str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stderr.splitlines()[-1]


def test_earlier_metrics_that_do_not_fit_at_a_resume_are_one_sentence(tmp_path: Path) -> None:
    """They are written again without later steps, under another name: nothing is lost."""
    lines = '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    last = _last_line_without_disk(
        "from trainer.components.sinks import JsonLines\nJsonLines(Path(sys.argv[1], 'metrics.jsonl'), 1)\n", tmp_path
    )
    assert "ConfigError: job.dump_folder = " in last
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_a_lock_that_does_not_fit_is_told(tmp_path: Path) -> None:
    """With a limit of no bytes, in a process of its own; nothing is written again when the file is closed."""
    last = _last_line_without_disk(
        "from trainer.runtime.dump_folder import folder_held\nwith folder_held(Path(sys.argv[1])): pass\n", tmp_path
    )
    assert "ConfigError: job.dump_folder = " in last
    assert "a file has reached the largest size" in last


def test_a_folder_that_cannot_be_written_is_told_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").touch()
    with pytest.raises(ConfigError) as error, writing_to(Path("outputs")):
        pass
    assert "cannot be written (File exists: outputs); name a folder that can, such as '" in str(error.value)
    assert not str(error.value).endswith("'./outputs'")

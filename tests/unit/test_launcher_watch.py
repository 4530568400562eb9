"""A process that watches its launcher ends with it: a parent or not, also one that has ended before."""

import subprocess
import sys
import time

from trainer.runtime.launcher_watch import launcher_of

RANK = (
    "import sys, time; from trainer.runtime.launcher_watch import end_with; end_with(int(sys.argv[1])); time.sleep(60)"
)


def killed_after(launcher: int) -> float:
    """Seconds until a process that watches `launcher`, and is no child of it, is killed."""
    started = time.monotonic()
    rank = subprocess.run([sys.executable, "-c", RANK, str(launcher)], timeout=30, check=False)
    assert rank.returncode == -9
    return time.monotonic() - started


def test_a_launcher_that_is_no_parent_is_watched() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    assert killed_after(launcher.pid) > 0.5  # not before it has ended; nobody collects it here
    launcher.wait()


def test_a_launcher_that_has_ended_before_is_noticed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    assert killed_after(launcher.pid) < 10


def test_who_launched_a_process() -> None:
    assert launcher_of(["--launched-by", "12", "--a=1"], {}) == (12, ["--a=1"])
    assert launcher_of(["--a=1"], {}) == (None, ["--a=1"])
    launcher, left = launcher_of(["--a=1"], {"TORCHELASTIC_RUN_ID": "x"})
    assert launcher > 0
    assert left == ["--a=1"]

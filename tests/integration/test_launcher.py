"""Laws of the launcher, seen with ranks that have no torch: exit codes, signals, a killed rank, a killed launcher.

Each holds for ranks that are fresh processes and for forks of the launcher. tests/integration/test_launch.py has a real
job for each of them.
"""

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.test_launch import ROOT, environment
from tests.slow import slow

# What starts ranks after a process that fails, in which little time is given to ranks when another has failed.
_BESIDE = """
import subprocess, sys
from trainer.runtime import launch

launch._GRACE_SECONDS = 0.1
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(1)"], stdin=0)
sys.exit(launch.main(sys.argv[1:]))
"""


@pytest.fixture(params=["fresh", "forked"], autouse=True)
def preload(request: pytest.FixtureRequest) -> list[str]:
    """The option by which ranks are forked, after the import of a module without threads."""
    return ["--preload", "tests.integration.stub_rank"] if request.param == "forked" else []


def start(
    folder: Path, preload: list[str], *words: str, how: Sequence[str] = ("-m", "trainer.runtime.launch")
) -> subprocess.Popen:
    """Start a launcher with a rank for each word."""
    return subprocess.Popen(
        [
            sys.executable,
            *how,
            f"--nproc-per-node={len(words)}",
            *preload,
            "--program",
            "tests.integration.stub_rank",
            str(folder),
            *words,
        ],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_of(folder: Path, count: int, launcher: subprocess.Popen) -> list[int]:
    """Return the process ids of the ranks, once all have started."""
    files = [folder / f"rank-{rank}" for rank in range(count)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_all_ranks_end_well(tmp_path: Path, preload: list[str]) -> None:
    process = start(tmp_path, preload, "exit-0", "exit-0")
    assert (process.communicate(timeout=60), process.returncode) == (("", ""), 0)


def test_a_rank_prints_at_once(tmp_path: Path, preload: list[str]) -> None:
    """Its text is read while it still runs, also without the end of a line."""
    process = start(tmp_path, preload, "print")
    ranks_of(tmp_path, 1, process)
    readable, _, _ = select.select([process.stdout], [], [], 5)
    assert process.poll() is None
    (tmp_path / "done").touch()
    assert readable
    assert process.stdout.read(6) == "a word"
    assert (process.communicate(timeout=60), process.returncode) == (("", ""), 0)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        *slow((1, "error: rank 1 failed first (exit code 1); the other ranks were stopped\n")),
        (2, ""),  # the rank has named the wrong setting
        (7, "error: rank 1 failed first (exit code 7); the other ranks were stopped\n"),
        (3, "error: the ranks of this node lost their peers; the cause is on another node\n"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(
    tmp_path: Path, preload: list[str], code: int, line: str
) -> None:
    process = start(tmp_path, preload, "wait", f"exit-{code}")
    started = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code if code != 3 else 1, line)
    assert time.monotonic() - started < 40


@pytest.mark.parametrize("number", [signal.SIGKILL, *slow(signal.SIGSEGV)])
def test_a_killed_rank_ends_the_job(tmp_path: Path, preload: list[str], number: signal.Signals) -> None:
    process = start(tmp_path, preload, "wait", "wait")
    ranks = ranks_of(tmp_path, 2, process)
    os.kill(ranks[1], number)
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 15
    assert process.returncode == 128 + number
    why = "SIGKILL, mostly for lack of host memory" if number == signal.SIGKILL else "SIGSEGV"
    assert err == f"error: rank 1 failed first ({why}); the other ranks were stopped\n"
    assert not any(map(runs, ranks))


def test_a_rank_that_hangs_is_killed_and_named(tmp_path: Path, preload: list[str]) -> None:
    """When its peer has given it up, and before PyTorch's agent would, which waits for half a minute."""
    process = start(tmp_path, preload, "leave", "hang")
    ranks_of(tmp_path, 2, process)
    (tmp_path / "leave").touch()
    _, err = process.communicate(timeout=22)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "error: rank 1 hung, and was killed when its peers had given it up"


def test_a_process_beside_the_ranks_may_fail(tmp_path: Path, preload: list[str]) -> None:
    """`lct train` estimates the memory of a job meanwhile; a rank's own failure is seen after that too."""
    for after, code in (("done", 0), ("leave", 1)):
        folder = tmp_path / after
        folder.mkdir()
        process = start(folder, preload, "leave", "wait", how=("-c", _BESIDE))
        ranks = ranks_of(folder, 2, process)
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(1)
        assert all(map(runs, ranks))
        (folder / after).touch()
        assert process.wait(timeout=60) == code


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, *slow(signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)]
)
def test_a_signal_reaches_every_rank(tmp_path: Path, preload: list[str], number: signal.Signals) -> None:
    """They end in good order: exit code 0."""
    process = start(tmp_path, preload, "wait", "wait")
    ranks_of(tmp_path, 2, process)
    process.send_signal(number)
    assert (process.communicate(timeout=60), process.returncode) == (("", ""), 0)


def test_a_signal_that_is_no_stop_ends_all_at_once(tmp_path: Path, preload: list[str]) -> None:
    process = start(tmp_path, [*preload, "--stop-signals=SIGTERM"], "wait", "wait")
    ranks = ranks_of(tmp_path, 2, process)
    process.send_signal(signal.SIGUSR2)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + signal.SIGUSR2, "error: stopped by SIGUSR2\n")
    assert not any(map(runs, ranks))


# What sends itself a signal within an import that ignores every error, as Python does in callbacks.
_IN_AN_IMPORT = """
import contextlib, os, signal, sys
from trainer.runtime import launch

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "torch":
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), signal.SIGUSR2)
                sum(range(1000))

sys.meta_path.insert(0, Finder)
sys.exit(launch.main(sys.argv[1:]))
"""


def test_a_signal_within_an_import_is_not_lost(tmp_path: Path, preload: list[str]) -> None:
    process = start(tmp_path, [*preload, "--stop-signals=SIGTERM"], "wait", "wait", how=("-c", _IN_AN_IMPORT))
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + signal.SIGUSR2, "error: stopped by SIGUSR2\n")


def test_no_rank_outlives_its_launcher(tmp_path: Path, preload: list[str]) -> None:
    draw = random.Random(0)
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        process = start(folder, preload, "wait", "hang")
        ranks = ranks_of(folder, 2, process)
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        killed = time.monotonic()
        process.communicate()
        while any(map(runs, ranks)):
            assert time.monotonic() - killed < 5
            time.sleep(0.01)

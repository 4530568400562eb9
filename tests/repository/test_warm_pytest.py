"""Laws of scripts/warm_pytest.py: a session reads the tree as it is, ends in time with its processes, and is warm."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import mutants
from scripts.warm_pytest import WarmPytest
from tests.mutants import Mutant

PLAIN = ["-q", "-p", "no:cacheprovider"]
# The server is forked from the warm process, and has the variables that the session has set since.
RANKS = """
import multiprocessing, os, sys

def rank(pipe):
    pipe.send(("torch" in sys.modules, os.environ["SET_BY_THE_SESSION"], os.getcwd()))

def test_ranks():
    os.environ["SET_BY_THE_SESSION"] = "yes"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["value"])
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank, args=(theirs,))
        process.start()
        assert ours.recv() == (True, "yes", os.getcwd())
        process.join()
        assert process.exitcode == 0
"""
HANGS = """
import subprocess, time

def test_hangs():
    child = subprocess.Popen(["sleep", "1000"])
    open("child", "w").write(str(child.pid))
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    (folder / "test_value.py").write_text("from value import VALUE\n\ndef test_value():\n    assert VALUE == 1\n")
    (folder / "test_ranks.py").write_text(RANKS)
    (folder / "test_hangs.py").write_text(HANGS)
    (folder / "value.py").write_text("VALUE = 1\n")
    return folder


@pytest.fixture(scope="module")
def warm(tree: Path) -> Iterator[WarmPytest]:
    sessions = WarmPytest(tree)
    yield sessions
    sessions.close()


def test_each_session_reads_the_tree_as_it_is(tree: Path, warm: WarmPytest) -> None:
    assert warm.run([*PLAIN, "test_value.py"], 60)[0] == 0
    (tree / "value.py").write_text("VALUE = 22\n")
    code, printed = warm.run([*PLAIN, "test_value.py"], 60)
    assert code == 1
    assert "FAILED test_value.py::test_value" in printed
    (tree / "value.py").write_text("VALUE =\n")
    assert warm.run([*PLAIN, "test_value.py"], 60)[0] == 2  # not run, which is no failure
    (tree / "value.py").write_text("VALUE = 1\n")
    assert warm.run([*PLAIN, "test_value.py"], 60)[0] == 0


def test_ranks_are_forked_from_a_warm_process(warm: WarmPytest) -> None:
    code, printed = warm.run([*PLAIN, "test_ranks.py"], 60)
    assert code == 0, printed


def test_a_session_that_does_not_end_is_killed_with_its_processes(tree: Path, warm: WarmPytest) -> None:
    assert warm.run([*PLAIN, "test_hangs.py"], 10)[0] is None
    child = Path(f"/proc/{(tree / 'child').read_text()}/stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"
    assert warm.run([*PLAIN, "test_value.py"], 60)[0] == 0


def test_a_mistake_is_planted_and_taken_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a time of its own: Python would take the bytecode of another one of the same size and second."""
    monkeypatch.setattr(mutants, "ROOT", tree)
    monkeypatch.setattr(mutants, "WarmPytest", lambda _tree: None)
    bench = mutants.Bench()
    file = bench.tree / "value.py"
    before = file.read_text(), os.stat(file).st_mtime_ns
    times = {before[1] // 10**9}
    for wrong in ("VALUE = 2", "VALUE = 3"):
        with bench.planted(Mutant("", "value.py", "VALUE = 1", wrong, "")):
            assert file.read_text() == f"{wrong}\n"
            times.add(os.stat(file).st_mtime_ns // 10**9)
    assert (file.read_text(), os.stat(file).st_mtime_ns) == before
    assert len(times) == 3
    with pytest.raises(ValueError, match="stands 0 times"), bench.planted(Mutant("m", "value.py", "no", "", "")):
        pass


@pytest.mark.parametrize(
    ("code", "printed", "how"),
    [
        (1, "..F\nFAILED test_x.py::test_y[a] - assert 1\n", "killed by test_x.py::test_y[a]"),
        (0, "3 passed\n", "SURVIVED: exit code 0, 3 passed"),
        (2, "1 error\n", "SURVIVED: exit code 2, 1 error"),
        (-9, "", "SURVIVED: exit code -9, nothing"),
        (None, "", "SURVIVED: its tests did not end in time"),
    ],
)
def test_only_a_test_that_fails_kills(
    code: int | None, printed: str, how: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tree)
    monkeypatch.setattr(mutants, "WarmPytest", lambda _tree: None)
    bench = mutants.Bench()
    ran = []
    monkeypatch.setattr(bench, "run_tests", lambda tests, *_: ran.extend(tests) or (code, printed))
    mutant = Mutant("", "value.py", "VALUE = 1", "VALUE = 2", "tests/distributed/test_a.py tests/unit/test_b.py")
    assert mutants.outcome(mutant, bench) == how
    assert ran == ["tests/unit/test_b.py", "tests/distributed/test_a.py"]

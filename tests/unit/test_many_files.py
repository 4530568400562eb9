"""Data sets of very many files: limits of open files, links in circles, and work that grows with the files only."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trainer.data.datasets import open_source
from trainer.data.file_index import allow_open_files
from trainer.data.token_writer import parts_of

from trainer.data import file_index


def lines(folder: Path, files: int) -> Path:
    folder.mkdir()
    for i in range(files):
        (folder / f"{i:04d}.jsonl").write_text(json.dumps({"text": f"document {i}"}) + "\n")
    return folder


@pytest.mark.parametrize(("hard", "works"), [(2000, True), (700, False)])
def test_more_files_than_a_process_may_open_at_first(tmp_path: Path, hard: int, works: bool) -> None:
    folder = lines(tmp_path / "data", 400)
    program = f"""
import resource, sys
sys.path[:] = {sys.path!r}
resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}))
from trainer.data.datasets import open_source
source = open_source("jsonl", {str(folder)!r})
print([source[i] for i in range(400)] == [f"document {{i}}" for i in range(400)])
"""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout == "True\n") == works, done.stderr
    assert "kept in memory" not in done.stderr
    if not works:
        assert "needs 912 open files, and a process may have 700 here (ulimit -Hn)" in done.stderr


def test_a_limit_that_is_high_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_index.resource, "setrlimit", pytest.fail)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft > 600:
        allow_open_files(soft - 600)


def test_links_in_circles_are_left_out_and_other_links_are_followed(tmp_path: Path) -> None:
    folder = lines(tmp_path / "data", 2)
    (folder / "here").symlink_to(".")
    (folder / "below").mkdir()
    (folder / "below" / "up").symlink_to("..")
    (folder / "elsewhere").symlink_to(lines(tmp_path / "other", 3))
    (folder / ".hidden").symlink_to(tmp_path / "other")
    assert len(open_source("jsonl", str(folder))) == 5


def test_small_files_are_grouped_by_one_look_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Size(int):
        looks = 0

        def __radd__(self, other: int) -> int:
            Size.looks += 1
            return int(other) + int(self)

    sizes = [3, 3, 3, 9, 1, 1] * 50
    monkeypatch.setattr("os.path.getsize", lambda file: Size(sizes[int(file)]))
    parts = parts_of("text", [str(i) for i in range(300)], 9)
    assert [len(part.files) for part in parts[:4]] == [3, 1, 4, 1]
    assert [file for part in parts for file in part.files] == [str(i) for i in range(300)]
    assert [part.size for part in parts] == [sum(sizes[int(file)] for file in part.files) for part in parts]
    assert Size.looks <= 2 * 300


def test_a_cache_on_a_full_disk_is_done_without_and_keeps_no_part_of_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n' * 20_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # writes behind it fail
    try:
        with caplog.at_level("WARNING", "trainer"):
            source = open_source("jsonl", str(file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert source[19_999] == "a"
    assert "cannot be written (File too large)" in caplog.text
    assert [path.suffix for path in (tmp_path / "cache" / "long-context-trainer").iterdir()] == [".lock"]

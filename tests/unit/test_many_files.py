"""Data sets of very many files: limits of open files, links in circles, and work that grows with the files only."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.data.sources.registry import DATASETS, DataSettings, files_of
from trainer.data.token_files.catalog import open_documents

pytestmark = pytest.mark.about("trainer/grouping.py")


def lines(folder: Path, files: int) -> Path:
    folder.mkdir()
    for i in range(files):
        (folder / f"{i:04d}.jsonl").write_text(json.dumps({"text": f"document {i}"}) + "\n")
    return folder


@pytest.mark.parametrize("hard", [2000, 300])
def test_more_files_than_a_process_may_open(tmp_path: Path, hard: int) -> None:
    """It raises its own limit as far as it may, and closes files that were not read for long."""
    program = f"""
import resource, sys
sys.path[:] = {sys.path!r}
from tests.numbered import write_pair
for i in range(400):
    write_pair(f"{{sys.argv[1]}}/{{i:03d}}", [5, 6, i])
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files.catalog import catalog_of, open_documents
catalog = catalog_of(DataSettings("tokens", sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (200, {hard}))
source = open_documents(DataSettings("tokens", sys.argv[1]), catalog)
print([source[i].ids.tolist() for _ in range(2) for i in range(400)] == 2 * [[5, 6, i] for i in range(400)])
"""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "data").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "data")], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


def test_links_in_circles_are_left_out_and_other_links_are_followed(tmp_path: Path) -> None:
    folder = lines(tmp_path / "data", 2)
    (folder / "here").symlink_to(".")
    (folder / "below").mkdir()
    (folder / "below" / "up").symlink_to("..")
    (folder / "elsewhere").symlink_to(lines(tmp_path / "other", 3))
    (folder / ".hidden").symlink_to(tmp_path / "other")
    assert len(files_of(DataSettings("jsonl", str(folder)))) == 5


def test_small_files_are_grouped_by_one_look_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Size(int):
        looks = 0

        def __radd__(self, other: int) -> int:
            Size.looks += 1
            return int(other) + int(self)

    sizes = [3, 3, 3, 9, 1, 1] * 50
    monkeypatch.setattr("os.path.getsize", lambda file: Size(sizes[int(file)]))
    parts = DATASETS["text"].parts(DataSettings("text"), [str(i) for i in range(300)], 9)
    assert [len(part.files) for part in parts[:4]] == [3, 1, 4, 1]
    assert [file for part in parts for file in part.files] == [str(i) for i in range(300)]
    assert [part.size for part in parts] == [sum(sizes[int(file)] for file in part.files) for part in parts]
    assert Size.looks <= 2 * 300


def test_a_full_disk_is_one_sentence_and_keeps_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": "a few words " * (100 if i < 9000 else 200_000)}) for i in range(9001)]
    file.write_text("\n".join(rows))
    settings = DataSettings("jsonl", str(file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("trainer.data.token_files.made._ALONE_BYTES", 1 << 30)  # no other process
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900_000, hard))  # writes behind it fail
    try:
        with pytest.raises(
            ConfigError, match=r"cannot be written \(File too large\); make room there, or name another"
        ):
            open_documents(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    folder = next((tmp_path / "cache" / "long-context-trainer" / "tokens").iterdir())
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.idx")}
    assert before
    assert not list(folder.glob("*.tmp"))
    assert len(open_documents(settings)) == 9001
    assert {name: (folder / name).stat().st_mtime_ns for name in before} == before

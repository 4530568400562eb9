"""Law: a path finds the files that `glob` finds, each file once, also through links."""

import glob
import logging
import os
from pathlib import Path

import pytest

from trainer.data.sources.files import DataKeys, find_files

ENDINGS = (".jsonl",)


def files_of(path: str | Path) -> list[str]:
    return find_files(str(path), ENDINGS, dataset="jsonl", others={}, keys=DataKeys())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "a.jsonl",
        "b/c.jsonl",
        "b/d/e.jsonl",
        "b/.hidden.jsonl",
        ".git/f.jsonl",
        "b/d/x/[1].jsonl",
        "b/y.txt",
    ):
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        *("*.jsonl", "*/*.jsonl", "**/*.jsonl", "b/**/e.jsonl", "**/d/**", "b/**", "**", "**/**/*.jsonl"),
        *(".git/*", "b/.*", "?/[cd]*", "**/[[]1].jsonl", "b/../*.jsonl"),
    ],
)
def test_a_glob_finds_the_files_that_glob_finds(tree: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.chdir(tree)
    for start in ("", f"{tree}/"):
        wanted = {file for file in glob.glob(start + pattern, recursive=True) if os.path.isfile(file)}
        assert wanted
        assert files_of(start + pattern) == sorted(wanted)


@pytest.mark.parametrize("path", ["", "**/*.jsonl", "**", "*/**/*.jsonl"])
def test_links_in_circles_are_followed_once(tree: Path, path: str) -> None:
    before = [os.path.realpath(file) for file in files_of(tree / path) if file.endswith(".jsonl")]
    for n in range(9):
        (tree / f"latest{n}").symlink_to(".")
        (tree / "b" / f"up{n}").symlink_to("..")
        (tree / "b" / "d" / f"beside{n}").symlink_to("../../b")
    (tree / "loop").symlink_to("loop")
    after = [os.path.realpath(file) for file in files_of(tree / path) if file.endswith(".jsonl")]
    assert len(after) == len(set(after))
    assert set(before) <= set(after)


def test_a_file_with_two_names_is_read_once_and_a_line_says_so(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tree / "again.jsonl").symlink_to("a.jsonl")
    (tree / "z").symlink_to("b")
    caplog.set_level(logging.INFO, "trainer")
    assert files_of(tree / "*.jsonl") == [str(tree / "a.jsonl")]
    assert f"finds 1 files by a second name, such as {tree}/again.jsonl for {tree}/a.jsonl" in caplog.text
    below = [str(tree / name) for name in ("a.jsonl", "b/c.jsonl", "b/d/e.jsonl", "b/d/x/[1].jsonl")]
    assert files_of(tree) == files_of(tree / "**" / "*.jsonl") == below


def test_links_to_elsewhere_are_followed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (outside := tmp_path_factory.mktemp("outside") / "o.jsonl").write_text("{}\n")
    (tree / "b" / "out").symlink_to(outside.parent)
    for path in (tree, tree / "**" / "*.jsonl", tree / "b" / "o*" / "*.jsonl"):
        assert f"{tree}/b/out/o.jsonl" in files_of(path)

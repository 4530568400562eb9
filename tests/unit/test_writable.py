"""A message that refuses a folder suggests one that works, never the refused one."""

import os
import re
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import Job, JobConfig
from trainer.config.writable import is_writable, nearest_existing, writable_folder
from trainer.job import resolve
from trainer.job.files import check_dump_folder


def config_of(folder: str) -> JobConfig:
    return JobConfig(job=Job(dump_folder=folder))


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, in which nothing may be written; the tests may run as root, who may write everywhere."""
    (folder := tmp_path / "read_only").mkdir()
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: not Path(path).is_relative_to(folder) and access(path, mode))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def refusal(folder: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_dump_folder(config_of(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("folder", ["./outputs", "outputs", "deep/down", "."])
def test_the_suggested_folder_is_accepted(read_only: Path, tmp_path: Path, folder: str):
    message = refusal(folder)
    assert message.startswith(f"job.dump_folder = {folder!r}: {read_only} is not writable for this user; name a folder")
    suggested = re.search(r"such as '(.*)'$", message)[1]
    assert suggested == str(tmp_path / "home" / "outputs")
    check_dump_folder(config_of(suggested))


def test_without_a_home_the_temporary_folder_is_suggested(read_only: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(read_only / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert refusal("./outputs").endswith(f", such as '{tmp_path}/temporary/outputs'")
    monkeypatch.setattr("tempfile.tempdir", str(read_only))
    assert refusal("./outputs").endswith("; name a folder that is")


def test_a_folder_at_the_root_does_not_rule_out_all_others(tmp_path: Path, monkeypatch):
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != Path("/") and access(path, mode))
    monkeypatch.chdir(tmp_path)
    assert refusal("/not_there/outputs").endswith(
        "/ is not writable for this user; name a folder that is, such as './outputs'"
    )


def test_a_file_in_the_way_is_told_with_another_folder(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("outputs").touch()
    message = refusal("./outputs")
    assert f"{tmp_path}/outputs is a file; name a folder, such as '{tmp_path}/home/outputs'" in message
    Path("other").touch()
    Path("outputs").unlink()
    assert refusal("other/deep").endswith("such as './outputs'")


def test_writable_is_a_matter_of_the_nearest_folder_that_exists(tmp_path: Path):
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert is_writable(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert not is_writable(tmp_path / "file" / "b")
    assert "outputs" in writable_folder(tmp_path / "file")


def test_an_address_is_no_dump_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_command_line(["--checkpoint.enable", "--job.dump_folder=s3://bucket/run"]).config
    with pytest.raises(ConfigError) as error:
        resolve(config, 1, "cpu")
    assert str(error.value) == (
        "job.dump_folder = 's3://bucket/run' is an address, and only checkpoints may be in a remote store; name a "
        "folder, and the address as checkpoint.folder"
    )
    assert not list(tmp_path.iterdir())

"""Law: `make test-versions` changes one pin, runs the tests by that environment, and fails if one of them does."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import test_versions as versions


def test_only_the_version_of_torch_changes() -> None:
    files = [(versions.ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt")]
    ours = "".join(files).replace("-r requirements.txt\n", "").splitlines()
    theirs = versions.requirements("2.11.0").splitlines()
    differing = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert len(differing) == 1
    assert differing[0][0].startswith("torch==")
    assert differing[0][1].startswith("torch==2.11.0 ")


@pytest.mark.parametrize(("verdict", "code"), [("True", 0), ("False", 1)])
def test_a_failing_test_fails_the_version(
    verdict: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f"def test_it():\n    assert {verdict}\n")
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "environment", lambda _: Path(sys.executable))
    (tmp_path / "1.0").mkdir()
    assert versions.main(["1.0", "--tests", str(file)]) == code
    out = capsys.readouterr().out
    assert ("FAILED " in out) == bool(code)
    assert f"1 {'failed' if code else 'passed'}" in out


def test_a_version_that_cannot_be_installed_is_told_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: str) -> Path:
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "environment", missing)
    assert versions.main(["0.1", "0.2"]) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["0.1", "0.2"]

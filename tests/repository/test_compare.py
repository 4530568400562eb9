"""The comparison of two runs: its arithmetic, its arguments, and real runs in one process each."""

import math
import os
from pathlib import Path

import pytest

from scripts import compare as loss_compare
from scripts.compare import CompareError, Step, compare, main, table

CONFIG = "train_configs/debug_model.toml"
TINY = ["--training.seq_len=32", "--training.global_batch_size=2", "--training.local_batch_size=2"]


def rows(*losses: float, norm: float = 1.0, first: int = 1) -> list[dict]:
    return [{"step": step, "loss": loss, "grad_norm": norm} for step, loss in enumerate(losses, first)]


def test_differences_are_relative_and_nan_is_never_near():
    steps = compare(rows(2.0, 4.0, math.nan), rows(2.0, 4.4, 1.0, norm=0.5))
    assert [step.differences()[0] for step in steps] == [0.0, pytest.approx(0.1), math.inf]
    assert {step.differences()[1] for step in steps} == {0.5}
    assert Step(1, (0.0, 0.0), (0.0, 1.0)).differences() == (0.0, math.inf)
    assert len(table(steps).splitlines()) == 4


@pytest.mark.parametrize("other", [rows(1.0), rows(1.0, 2.0, first=2), []])
def test_other_steps_cannot_be_compared(other: list[dict]):
    with pytest.raises(CompareError, match=r"the runs logged the steps 1 to 2 \(2\) and"):
        compare(rows(1.0, 2.0), other)


def test_each_side_has_its_own_ranks_commit_and_overrides():
    arguments = ["main~1:a.toml", "b.toml", "--ngpu", "1", "8", "--a", "--x.y=1", "--b", "--x.y=2", "--", "--z.w=3"]
    _, (a, b) = loss_compare._parse(arguments)
    assert (a.revision, a.config, a.ranks, a.overrides) == ("main~1", "a.toml", 1, ["--z.w=3", "--x.y=1"])
    assert (b.revision, b.config, b.ranks, b.overrides) == (None, "b.toml", 8, ["--z.w=3", "--x.y=2"])


@pytest.mark.parametrize("arguments", [["--ngpu", "0"], ["--ngpu", "1", "2", "3"], ["--steps", "0"]])
def test_numbers_that_cannot_be(arguments: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as exit_:
        main([CONFIG, CONFIG, *arguments])
    assert exit_.value.code == 2
    assert "at least 1, as in --ngpu 1 8" in capsys.readouterr().err


def compared(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    code = main([*arguments, "--ngpu", "1", "--steps", "2", "--", *TINY])
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def in_the_repository_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(loss_compare.ROOT)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("theirs", "tolerance", "code", "verdict"),
    [
        (rows(2.0, 1.0), "1e-5", 0, "the same"),
        (rows(2.0, 1.00002), "1e-5", 1, "DIFFERENT"),
        (rows(2.0, 1.00002), "1e-4", 0, "the same"),
        (rows(2.0, 1.0, norm=1.1), "1e-5", 1, "DIFFERENT"),
        (rows(2.0, math.nan), "1e-5", 1, "DIFFERENT"),
    ],
)
def test_the_verdict_is_by_the_tolerance(
    theirs: list[dict], tolerance: str, code: int, verdict: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_compare, "execute", lambda run, *_: rows(2.0, 1.0) if run.name == "A" else theirs)
    assert main([CONFIG, CONFIG, "--tolerance", tolerance]) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{verdict}: largest relative difference")


@pytest.mark.usefixtures("warm_programs")
def test_a_run_is_the_same_as_itself(capsys: pytest.CaptureFixture):
    code, out, _ = compared(capsys, CONFIG, CONFIG)
    assert code == 0
    assert out.splitlines()[-1].startswith("the same: largest relative difference of the loss 0.0e+00")
    assert len(out.splitlines()) == 4


@pytest.mark.usefixtures("warm_programs")
def test_another_setting_is_seen(capsys: pytest.CaptureFixture):
    code, out, _ = compared(capsys, CONFIG, CONFIG, "--b", "--optimizer.lr=1e-2")
    assert code == 1
    assert out.splitlines()[-1].startswith("DIFFERENT")


def test_a_run_that_fails_says_why_in_its_own_words(capsys: pytest.CaptureFixture):
    code, _, error = compared(capsys, CONFIG, CONFIG, "--a", "--optimizer.lr=-1")
    assert code == 2
    assert error.startswith("error: run A ended with exit code 2: error: optimizer.lr = -1.0 must be above 0")


@pytest.mark.parametrize(
    ("path", "says"),
    [("no.toml", "A = no.toml is no file"), ("no-such:" + CONFIG, "commit 'no-such' cannot be checked out")],
)
def test_what_is_not_there(path: str, says: str, capsys: pytest.CaptureFixture):
    code, _, error = compared(capsys, path, CONFIG)
    assert code == 2
    assert says in error
    assert len(error.splitlines()) == 1
    assert not any(Path(loss_compare.ROOT, ".git", "worktrees").glob("*"))

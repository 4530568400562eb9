"""The console: plain lines with the time of day in a file, colours and one line that changes on a terminal."""

import io
import logging
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from trainer.components.step_metrics import StepMetrics
from trainer.runtime.console import end_live_line, logger, program, say_waiting, set_up_logging, show_progress

STEP = "step 50/100  loss 5.191 (max 5.91)  grad 0.53  lr 2.3e-3  1,461 tok/s  5.6 s  0.7 GiB  eta 4:40"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch):
    """Set up the console of a rank on a terminal or elsewhere, and return its output."""
    kept = logger.handlers, logger.level, logger.propagate

    def start(
        rank: int = 0, *, terminal: bool, color: bool = True, log_rank: str = "0", width: int = 120
    ) -> io.StringIO:
        out = io.StringIO()
        out.isatty = lambda: terminal
        monkeypatch.setitem(os.environ, "LOG_RANK", log_rank)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.delenv("NO_COLOR", raising=False)
        if not color:
            monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr("sys.stdout", out)
        set_up_logging(rank)
        return out

    yield start
    logger.handlers, logger.level, logger.propagate = kept


def test_elsewhere_than_on_a_terminal_every_line_has_the_time(printed) -> None:
    out = printed(terminal=False)
    logger.info("two\nlines")
    say_waiting("importing PyTorch")
    show_progress("step 2/100 runs")
    logger.info(STEP)
    lines = out.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[9:] for line in lines] == ["two", "lines", "importing PyTorch ...", STEP]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_last_line_changes(printed) -> None:
    out = printed(terminal=True, color=False, width=60)
    say_waiting("importing PyTorch")
    show_progress("step 1/100 runs " + "x" * 100)
    logger.info("a line")
    show_progress("step 2/100 runs")
    end_live_line()
    erase = "\r\x1b[2K"
    long = ("step 1/100 runs " + "x" * 100)[:59]  # no line break
    assert out.getvalue() == f"{erase}importing PyTorch ...{erase}{long}{erase}a line\n{erase}step 2/100 runs{erase}"


def test_a_step_is_coloured_on_a_terminal_only_if_wanted(printed) -> None:
    out = printed(terminal=True)
    logger.info(STEP)
    assert "\x1b[1m5.191\x1b[0m" in out.getvalue()
    assert re.sub(r"\x1b\[\d+m", "", out.getvalue()) == STEP + "\n"
    out = printed(terminal=True, color=False)
    logger.warning(STEP)
    assert "\x1b[33m" not in out.getvalue()


def test_a_long_line_is_broken_between_words_at_the_width_of_the_terminal(printed) -> None:
    path = "/a/folder-with/" + "x" * 50
    out = printed(terminal=True, color=False, width=40)
    logger.info(f"a checkpoint of step 10 was found in {path} and is\nread")
    lines = ["a checkpoint of step 10 was found in", f"    {path}", "    and is", "read"]
    assert out.getvalue().splitlines() == lines
    out = printed(terminal=False, width=40)
    logger.info("x " * 60)
    assert len(out.getvalue().splitlines()) == 1, "a file keeps its lines"


@pytest.mark.parametrize(("rank", "log_rank", "spoken"), [(0, "0", True), (1, "0", False), (1, "0,1", True)])
def test_the_ranks_of_log_rank_speak_and_all_warn(printed, rank: int, log_rank: str, spoken: bool) -> None:
    out = printed(rank, terminal=False, log_rank=log_rank)
    logger.info("a line")
    logger.log(logging.WARNING, "a warning")
    lines = [line[9:] for line in out.getvalue().splitlines()]
    prefix = f"[rank {rank}] " if rank else ""
    assert lines == [f"{prefix}a line"] * spoken + [f"{prefix}a warning"]


def test_the_program_is_named_as_it_can_be_called(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert program() == f"{tmp_path}/bin/python -m trainer"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lct").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "lct").chmod(0o755)
    assert program() == "bin/lct"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert program() == "lct"


def test_the_page_of_metrics_has_every_key() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(StepMetrics) if f"`{field.name}`" not in page] == []

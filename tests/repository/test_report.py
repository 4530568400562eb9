"""`lct report`: the page of two real runs, in a real browser on a wide and on a narrow screen."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.browser import evaluated, needs_browser, open_browser
from trainer.commands.main import main

ROOT = Path(__file__).resolve().parents[2]
CURVES = 6
"""Loss, validation loss, gradient norm, learning rate, speed and memory; a CPU has no known peak."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of two runs: one rank, and two ranks with context parallelism."""
    folders = []
    for degree in (1, 2):
        folder = tmp_path_factory.mktemp("runs") / f"cp{degree}"
        settings = [f"--parallelism.context_parallel_degree={degree}", "--training.steps=3", "--training.seq_len=64"]
        settings += ["--validation.enable", "--validation.freq=2", "--validation.sequences=2"]
        command = [sys.executable, "-m", "trainer", "train", "debug_model", f"--ngpu={degree}", *settings]
        command += ["--metrics.log_freq=1", "--job.device=cpu", f"--job.dump_folder={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300, env=os.environ)
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Path:
    file = runs[0].parent / "report.html"
    assert main(["report", *map(str, runs), f"--output={file}"]) == 0
    return file


def test_the_page_has_numbers_curves_layout_and_differences(report: Path, runs: list[Path]) -> None:
    text = report.read_text()
    last = json.loads((runs[1] / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"<td>{last['loss']:.4g}<td>{last['tokens_seen']:,}" in text
    assert text.count('class="plotly-graph-div"') == CURVES + 1
    assert f"{runs[0]}: no context parallelism." in text
    assert "<svg" in text
    assert "<td>parallelism.context_parallel_degree<td>1<td>2" in text
    assert "training.seq_len" not in text, "equal settings are left out"


def test_nothing_is_loaded_from_elsewhere(report: Path) -> None:
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=", report.read_text())


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_every_picture_within_the_screen(report: Path, tmp_path: Path, width: int) -> None:
    script = """(() => {
        const plots = [...document.querySelectorAll('.js-plotly-plot')];
        if (document.readyState != 'complete' || plots.some(plot => !plot.querySelector('.main-svg'))) return null;
        const right = Math.max(...plots.map(plot => plot.querySelector('.main-svg').getBoundingClientRect().right));
        const curves = plots.map(plot => plot.querySelectorAll('.scatterlayer .trace, .barlayer .trace').length);
        return {right, curves, page: document.documentElement.scrollWidth};
    })()"""
    with open_browser(tmp_path) as browser:
        seen = evaluated(browser, f"file://{report}", script, width)
    assert seen["page"] <= width
    assert width / 2 < seen["right"] <= width
    assert seen["curves"] == [2] * (CURVES + 1), "a curve for each run"

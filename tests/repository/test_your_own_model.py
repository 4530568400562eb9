"""Law: the package examples/my_llama trains as its page says, and its losses do not depend on the ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "your_own_model.md").read_text()
SMALL = ["--training.seq_len=64", "--training.global_batch_size=4", "--training.steps=3", "--training.dtype=float64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_programs: None) -> Path:
    """A folder of a user."""
    return tmp_path_factory.mktemp("own")


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trainer", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_the_family_of_the_page_trains_generates_and_does_not_depend_on_the_ranks(folder: Path) -> None:
    (command,) = re.findall(r"^    lct (train --job\.imports examples\.my_llama .*)$", PAGE, re.MULTILINE)
    steps = {}
    for ranks in (2, 1):
        words = command.replace("--ngpu 2", f"--ngpu {ranks}").replace("_degree 2", f"_degree {ranks}").split()
        run(folder, *words, *SMALL, f"--job.dump_folder={ranks}", "--checkpoint.enable", "--metrics.log_freq=1")
        steps[ranks] = [json.loads(line) for line in (folder / str(ranks) / "metrics.jsonl").read_text().splitlines()]
    for two, one in zip(steps[2], steps[1], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert two["largest_weight"] == pytest.approx(one["largest_weight"], rel=1e-10)
    assert steps[1][0]["loss"] != steps[1][2]["loss"]
    assert run(folder, "generate", "2", "--allow-imports", "--prompt", "def ", "--tokens", "3").startswith("def ")

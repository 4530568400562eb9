"""The benchmark of memory on a GPU: its rows are jobs that a GPU can run, and the documentation has its numbers."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from scripts.benchmarks import memory_runs
from scripts.benchmarks.memory_runs import ROOT, ROWS, arguments, main
from trainer.config.loader import parse_command_line
from trainer.job import resolve

MEASURED = ROOT / "docs" / "measurements" / "memory_h100.json"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_a_job_of_one_gpu(name: str, tmp_path: Path) -> None:
    job = resolve(parse_command_line(arguments(name, tmp_path)).config, 1, "cuda")
    layers, tokens, _ = ROWS[name]
    assert (job.model.n_layers, job.positions, job.sequences_per_step) == (layers, tokens, 1)
    assert job.model.vocab_size == 128_256


def test_the_documentation_has_the_numbers_of_the_file() -> None:
    cells = [
        f"| {row['memory_gib']:.1f} | {row['predicted_gib']:.1f} |"
        for row in json.loads(MEASURED.read_text())["rows"].values()
    ]
    lines = [line for line in (ROOT / "docs" / "planner.md").read_text().splitlines() if line.endswith((*cells,))]
    assert len(cells) == len(lines) == len(ROWS)


@pytest.mark.slow
def test_rows_are_run_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Small ones, on a CPU; a run that fails says why."""
    file = tmp_path / "runs.json"
    small = {"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "vocab": 5000}
    rows = {"right": (2, 64, ("--job.device=cpu",)), "wrong": (2, 64, ("--job.device=tpu",))}
    with (
        mock.patch.object(torch.cuda, "get_device_name", return_value="a CPU"),
        mock.patch.dict(memory_runs._SIZES, small),
        mock.patch.object(memory_runs, "ROWS", rows),
        mock.patch.object(sys, "argv", ["memory_runs.py"]),
    ):
        for name in rows:
            main(["run", "--json", str(file), "--only", name, "--steps", "2"])
    written = json.loads(file.read_text())
    assert (written["device"], [*written["rows"]]) == ("a CPU", ["right", "wrong"])
    right, wrong = written["rows"].values()
    assert right["finite"]
    assert right["steps"] == 2
    assert right["memory_gib"] > 0
    assert "job.device = 'tpu'" in wrong["error"]
    assert "| right | 2 | 64 |" in capsys.readouterr().out

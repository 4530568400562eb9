"""Law: the benchmark of launches measures every method, without a GPU and without other ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.attention_launches import KERNELS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "attention_launches.py"


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_method_is_measured(kernel: str) -> None:
    command = [sys.executable, str(SCRIPT), "--degrees", "4", "--kernel", kernel, "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["method"] for line in lines] == ["ring", "all_gather", "all_to_all", "hybrid"]
    assert all(line["forward_ms"] > 0 and line["backward_ms"] > 0 for line in lines)

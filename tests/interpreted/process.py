"""The environment of a process whose Triton kernels run in Triton's interpreter, which Triton decides at its import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(sys.prefix) / "interpreted"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGES}", "TRITON_INTERPRET": "1"}

needs_triton = pytest.mark.skipif(
    not PACKAGES.exists(), reason="no Triton in .venv/interpreted, where `make` installs it on Linux"
)


def assert_cases_pass(which: str) -> None:
    """Run in another process the cases of linear_kernels.py that a mark expression chooses.

    Triton decides at its import whether kernels are interpreted.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which]
    command.append("tests/interpreted/linear_kernels.py")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout

"""The environment of a process whose Triton kernels run in Triton's interpreter, which Triton decides at its import."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(sys.prefix) / "interpreted"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGES}", "TRITON_INTERPRET": "1"}

needs_triton = pytest.mark.skipif(
    not PACKAGES.exists(), reason="no Triton in .venv/interpreted, where `make` installs it on Linux"
)

"""What tests of several files need."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture
def toml(tmp_path: Path) -> Callable[..., str]:
    """Writes a TOML file and gives its path."""

    def write(text: str, name: str = "run.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where ranks that are threads compute: the option --device."""
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device cuda, and no CUDA device here")
    return name

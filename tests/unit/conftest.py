"""What tests of several files need."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def toml(tmp_path: Path) -> Callable[..., str]:
    """Writes a TOML file and gives its path."""

    def write(text: str, name: str = "run.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write

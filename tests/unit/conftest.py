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


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of token files and indices, for this process and for those that a test starts."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of text files, one of them in a folder of its own and one empty, and one file of another kind."""
    for name, content in {"b.txt": "zwei\r\n", "a/x.txt": "eins ä", "c.md": "no", "empty.txt": ""}.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode())
    return tmp_path

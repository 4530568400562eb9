"""What tests of several files need."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.token_file_cases import TEXTS


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
    """A folder with two text files, an empty one and a Markdown file. One text file is in a subfolder."""
    for name, content in {"b.txt": "zwei\r\n", "a/x.txt": "eins ä", "c.md": "no", "empty.txt": ""}.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode())
    return tmp_path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of JSON lines with the texts of token_file_cases.py and the number of each."""
    file = tmp_path / "in" / "a.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(TEXTS)))
    return file


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """Give signals their default actions, also if the tests run under nohup or in the background."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

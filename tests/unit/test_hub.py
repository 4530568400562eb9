"""Laws of data sets of the Hugging Face hub: the tokens of their files, by real requests to a stand-in for the hub."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub_server import Hub, environment, silent
from tests.slow import slow
from trainer.commands.main import main as lct
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files.catalog import open_documents
from trainer.data.tokenizers.tokenizer import open_tokenizer

pytest.importorskip("datasets")
NAME = "allenai/c4"
TEXTS = [[f"text {shard} {i} " * 20 for i in range(5)] for shard in range(3)]
ALL = [text for texts in TEXTS for text in texts]
CARD = """---
configs:
- config_name: en
  data_files: [{split: train, path: "en/*.json.gz"}]
---
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set as c4 is one: a configuration of compressed files."""
    (tmp_path / "hub" / "en").mkdir(parents=True)
    (tmp_path / "hub" / "README.md").write_text(CARD)
    for i, texts in enumerate(TEXTS):
        write(tmp_path / "hub" / "en" / f"train.{i}.json.gz", texts)
    return tmp_path / "hub"


def write(file: Path, texts: list[str]) -> None:
    lines = "".join(json.dumps({"url": "x", "text": text}) + "\n" for text in texts)
    file.write_bytes(gzip.compress(lines.encode()))


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    def started(url: str, *options: str) -> subprocess.Popen:
        program = [sys.executable, "-m", "trainer", "tokenize", "--hub", NAME, "--hub-config", "en", "--processes", "1"]
        program += ["--output", str(tmp_path / "tokens"), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen(program, env=environment(url, tmp_path / "home"), **pipes)

    return started


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def texts_of(tmp_path: Path) -> list[str]:
    source, decode = open_documents(DataSettings("tokens", str(tmp_path / "tokens"))), open_tokenizer().decode
    return [decode(source[i].ids.tolist()[1:-1]) for i in range(len(source))]


def test_a_data_set_becomes_the_tokens_of_its_files(tmp_path: Path, folder: Path, start):
    with Hub(folder, NAME).serving() as hub:
        code, out, err = ended(start(hub.url))
    assert code == 0, err
    assert f"{NAME} en train: 3 shards of revision {'a' * 40}" in out
    assert texts_of(tmp_path) == ALL


@pytest.mark.slow  # the packages of Hugging Face wait between requests
def test_requests_that_fail_for_a_while_are_repeated(tmp_path: Path, folder: Path, start):
    """In two processes."""
    failures = {"train.1.json.gz": ["503", "503"], "train.2.json.gz": ["drop"]}

    def fails(path: str) -> str:
        left = failures.get(Path(path).name)
        return left.pop() if left else ""

    with Hub(folder, NAME, fails).serving() as hub:
        code, _, err = ended(start(hub.url, "--processes", "2"))
    assert code == 0, err
    assert failures == {"train.1.json.gz": [], "train.2.json.gz": []}
    assert texts_of(tmp_path) == ALL


def test_a_job_reads_the_hub_once(tmp_path: Path, folder: Path):
    """The first start makes token files of the newest revision; later ones need no network."""
    settings = [f"--training.dataset_path={NAME}:en", "--training.dataset=hub"]
    program = [sys.executable, "-m", "trainer", "tokenize", *settings]
    with Hub(folder, NAME).serving() as hub:
        first = subprocess.run(program, env=environment(hub.url, tmp_path / "home"), capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert f"making token files of hub {NAME}:en:train@{'a' * 40} in " in first.stdout
    again = subprocess.run(
        program, env=environment("http://hub.invalid", tmp_path / "home"), capture_output=True, text=True
    )
    assert (again.returncode, again.stdout) == (0, ""), again.stderr


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_revision_and_its_shards(tmp_path: Path, folder: Path, start):
    reached = []

    def fails(path: str) -> str:
        reached.extend([path] if path.endswith("train.1.json.gz") else [])
        return "503" if path.endswith("train.1.json.gz") else ""

    with Hub(folder, NAME, fails).serving() as hub:
        process = start(hub.url)
        while not reached and process.poll() is None:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert [file.name for file in (tmp_path / "tokens").glob("*.idx")] == ["shard-00000.idx"]
    write(folder / "en" / "train.0.json.gz", ["is not read again"])
    with Hub(folder, NAME).serving() as hub:
        hub.revision = "b" * 40  # the newest one now
        code, out, err = ended(start(hub.url))
    assert code == 0, err
    assert f"revision {'a' * 40}" in out
    assert "tokens has 1 of 3 shards already" in out
    assert texts_of(tmp_path) == ALL


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hub-config", "fr"], "allenai/c4 fr train cannot be opened (BuilderConfig 'fr' not found."),
        (
            ["--split", "test"],
            "allenai/c4 en test cannot be opened (Bad split: test. Available splits: ['train']",
        ),
        (["--hub", "allenai/c5"], "'allenai/c5' is not found at the Hugging Face hub (404 Client Error"),
        (
            ["--text-field", "body"],
            'en train, shard 0, row 0 has no column "body" (url, text); name one with training.dataset_text_field',
        ),
    ],
)
def test_a_wrong_name_is_one_sentence(folder: Path, start, options: list[str], says: str):
    with Hub(folder, NAME).serving() as hub:
        code, _, err = ended(start(hub.url, *options))
    assert code == 2
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", ["no network", *slow("silence")])
def test_without_the_hub_it_says_so_within_seconds(start, kind: str):
    with silent() as url:
        code, out, err = ended(start("http://hub.invalid" if kind == "no network" else url))
    assert code == 2
    assert "error: 'allenai/c4' is not found at the Hugging Face hub (" in err
    assert "check name, revision and network, log in" in err
    assert len(err.splitlines()) == 1
    assert not out


def test_files_and_a_data_set_of_the_hub_are_not_read_at_once(capsys: pytest.CaptureFixture):
    assert lct(["tokenize", "--hub", NAME, "--path", "x", "--output", "y"]) == 2
    assert "leave out --path and --dataset" in capsys.readouterr().err

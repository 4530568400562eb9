"""Laws of the check of data sets: what works is accepted at once without torch, what does not is one sentence."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.data_sources import check_source, refusal, texts, write_jsonl
from trainer.data.sources.registry import check_streams

pytestmark = pytest.mark.usefixtures("cache")


def test_what_works_is_accepted(folder):
    write_jsonl(folder / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    check_source("python_stdlib", None, 64)
    check_source("text", str(folder), 2)
    check_source("jsonl", str(folder), 2)


@pytest.mark.parametrize("call", [texts, check_source])
@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("python_stdlb", None, "'python_stdlb' is not a known data set; did you mean 'python_stdlib'?"),
        (
            "wiki",
            None,
            "'wiki' is not a known data set; choose one of python_stdlib, text, jsonl, chat, preferences, hub, tokens",
        ),
        ("c4", None, "use training.dataset = 'hub' and training.dataset_path = 'allenai/c4:en'"),
        (
            "some/data",
            None,
            "'some/data' lies on the Hugging Face hub; use training.dataset = 'hub' and training.dataset",
        ),
        ("hub", None, "training.dataset = 'hub' needs training.dataset_path; give the data set's name"),
        ("hub", "a:b:c:d", "'a:b:c:d' must be the name of a data set of the Hugging Face hub, with its configuration"),
        ("text", None, "training.dataset = 'text' needs training.dataset_path; give a .txt file"),
        ("jsonl", "", "training.dataset = 'jsonl' needs training.dataset_path; give a .jsonl or .jsonl.gz or"),
        ("python_stdlib", "x", "training.dataset_path = 'x' would do nothing"),
        ("text", "nothing/here", "training.dataset_path = 'nothing/here' is neither a file nor a folder"),
        ("jsonl", "nothing/*.jsonl", "training.dataset_path = 'nothing/*.jsonl' is a glob that matches no file"),
        (
            "jsonl",
            "train_configs",
            "training.dataset_path = 'train_configs' is a folder without *.jsonl and *.jsonl.gz and",
        ),
    ],
)
def test_a_wrong_name_or_path_is_refused(call, name, path, message, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert message in refusal(call, name, path)


def test_empty_data_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.jsonl").write_text("\n\n")
    for name in ("text", "jsonl"):
        assert f"training.dataset_path = {str(tmp_path)!r} holds no text" in refusal(
            check_source, name, str(tmp_path), 1
        )


def test_fewer_documents_than_streams_are_refused_with_the_number_that_works(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 3)
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("a")
    for name in ("text", "jsonl"):
        message = refusal(check_source, name, str(tmp_path), 4)
        assert message.startswith("training.data_streams = 4 needs as many documents")
        assert message.endswith("has 3; leave it out, or use at most 3")
        check_source(name, str(tmp_path), 3)
        check_source(name, str(tmp_path))
    assert "training.dataset = 'python_stdlib' has" in refusal(check_source, "python_stdlib", None, 100_000)
    for data_streams in (None, 1, 64):
        assert "'x' holds no text; give at least" in refusal(check_streams, "training.dataset = 'x'", 0, data_streams)


def test_a_folder_with_files_of_another_data_set_is_told_with_its_name(tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    assert "is a folder without *.txt files; use training.dataset = 'jsonl' for the files" in refusal(
        check_source, "text", str(tmp_path), 1
    )
    check_source("jsonl", str(tmp_path), 1)


@pytest.mark.parametrize("which", ["", "inner", "inner/deep"])
def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str):
    """The tests may run as root, who may read everywhere."""
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("a")
    closed, access = (tmp_path / which).resolve(), os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != closed and access(path, mode))
    message = refusal(check_source, "text", str(tmp_path), 1)
    assert message.startswith(
        f"training.dataset_path = {str(tmp_path)!r}: the folder {closed} cannot be read (permission"
    )
    if which == "inner":
        for path in (f"{closed}/nothing.txt", f"{closed}/*.txt"):
            assert f"the folder {closed} cannot be read" in refusal(check_source, "text", path, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_folder_that_fails_is_not_left_out(tmp_path, monkeypatch):
    """A network's file system may list a folder's name and then fail to open it."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("x")
    real = os.scandir

    def stale(folder):
        if str(folder).endswith("b"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))
        return real(folder)

    monkeypatch.setattr(os, "scandir", stale)
    assert "/b cannot be read (Stale file handle)" in refusal(check_source, "text", str(tmp_path), 1)


def test_a_folder_of_another_user_is_told(tmp_path: Path):
    """With the real permissions: a child process that is not root."""
    (folder := tmp_path / "closed").mkdir(mode=0o700)
    (folder / "a.txt").write_text("a")

    def message() -> str:
        os.setuid(65534)
        return refusal(check_source, "text", str(folder), 1)

    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writes, message().encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b" cannot be read (permission denied); " in os.read(reads, 10_000)


def test_the_check_of_large_data_reads_only_its_start(tmp_path):
    file = tmp_path / "a.jsonl"
    with open(file, "wb") as stream:
        stream.write(b'{"text": "a"}\n' * 64)
        stream.truncate(1 << 40)  # a sparse terabyte
    start = time.perf_counter()
    check_source("jsonl", str(file), 64)
    assert time.perf_counter() - start < 1


def test_checks_import_neither_torch_nor_arrow_and_answer_at_once(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    code = f"""
import sys, time
start = time.process_time()
import trainer.data.tokenizers.tokenizer
from trainer.data.sources.registry import DataSettings, check_source
from trainer.data.job_data import open_text
check_source(DataSettings("python_stdlib"), 64)
check_source(DataSettings("jsonl", {str(tmp_path)!r}), 1)
trainer.data.tokenizers.tokenizer.vocab_size_of(DataSettings("jsonl").tokenizer)
seconds = time.process_time() - start
print([name for name in ("torch", "datasets", "pyarrow", "tiktoken") if name in sys.modules], seconds < 1)
open_text(DataSettings("jsonl", {str(tmp_path)!r}))
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[] True\nFalse\n", result.stdout + result.stderr

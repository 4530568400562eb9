"""Laws of the cache of token files: made once of the same content, whole or not at all, by one job of several."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.chat_files import CHATML, chat_folder, conversations, write_lines
from tests.loading import batch_loader
from tests.numbered import Numbers, write_pair
from trainer.config.errors import ConfigError
from trainer.data.job_data import open_text
from trainer.data.loader import batch_hash
from trainer.data.sources.records import HubData
from trainer.data.sources.registry import DataSettings, all_documents
from trainer.data.text_data import TextData
from trainer.data.token_files import made
from trainer.data.token_files.catalog import catalog_of, open_documents
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.template_files import find_template
from trainer.data.tokenizers.tokenizer import Encoded, open_tokenizer
from trainer.data.whole_stream import TooLong


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "long-context-trainer" / "tokens"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (file := tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(50)))
    return file


def test_another_content_tokenizer_or_field_makes_other_files_and_another_name_does_not(
    lines: Path, tmp_path: Path, cache: Path
) -> None:
    settings = DataSettings("jsonl", str(lines))
    open_documents(settings)
    (first,) = cache.iterdir()
    moved = lines.rename(tmp_path / "b.jsonl")
    open_documents(replace(settings, path=str(moved)))
    assert list(cache.iterdir()) == [first]
    words = Path(settings.tokenizer).read_text().splitlines()
    words[-1], words[-2] = (
        f"{words[-2].split()[0]} {words[-1].split()[1]}",
        f"{words[-1].split()[0]} {words[-2].split()[1]}",
    )
    (other := tmp_path / "other.tiktoken").write_text("\n".join(words))
    open_documents(replace(settings, path=str(moved), tokenizer=str(other)))
    assert len(list(cache.iterdir())) == 2
    content = moved.read_text()
    moved.write_text(content.replace("text 25", "text 52"))
    open_documents(replace(settings, path=str(moved)))
    assert len(list(cache.iterdir())) == 3
    moved.write_text(content.replace('"text":', '"body":'))
    open_documents(replace(settings, path=str(moved), text_field="body"))
    assert len(list(cache.iterdir())) == 4


class Direct(Numbers):
    """Conversations that are encoded in this process, one by one."""

    def __init__(self, settings: DataSettings) -> None:
        encoder = ConversationEncoder(open_tokenizer(settings.tokenizer), find_template(settings.tokenizer, None))
        self.documents = [encoder.encode(conversation) for conversation in all_documents(settings)]
        super().__init__([len(document.ids) for document in self.documents])

    def __getitem__(self, i: int) -> Encoded:
        return self.documents[i]


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_conversations_become_the_same_sequences_and_labels_bit_for_bit(tmp_path: Path, packing: str) -> None:
    folder = chat_folder(tmp_path / "model", CHATML)
    file = write_lines(tmp_path / "chat.jsonl", conversations(60))
    settings = DataSettings("chat", str(file), str(folder))
    shape = {"seq_len": 64, "local_batch_size": 2, "data_streams": 3, "seed": 5, "dp_rank": 0, "dp_degree": 1}
    data = open_text(settings, packing), TextData(Direct(settings), packing, conversations=TooLong())
    batches, wanted = (list(islice(iter(batch_loader(one, **shape)), 40)) for one in data)
    assert [batch_hash(batch) for batch in batches] == [batch_hash(batch) for batch in wanted]
    assert any((batch["labels"] != -100).any() and (batch["labels"] == -100).any() for batch in batches)


def test_a_flipped_answer_is_a_damaged_document(tmp_path: Path, cache: Path) -> None:
    folder = chat_folder(tmp_path / "model", CHATML)
    file = write_lines(tmp_path / "chat.jsonl", conversations(5))
    settings = DataSettings("chat", str(file), str(folder))
    data = open_documents(settings)
    (answers,) = cache.glob("*/*.answers")
    content = np.fromfile(answers, dtype=bool)
    assert len(content) == sum(len(data[i].ids) for i in range(5))
    content[0] = not content[0]
    content.tofile(answers)
    with pytest.raises(ConfigError, match=r"document 0, is damaged: .*; remove .*, and the next start makes it again"):
        open_documents(settings)[0]


def many(tmp_path: Path) -> DataSettings:
    """Seven shards."""
    (file := tmp_path / "many.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} " * 4000}) + "\n" for i in range(500))
    )
    return DataSettings("jsonl", str(file))


def started(settings: DataSettings) -> subprocess.Popen:
    program = (
        "import sys; from trainer.data import DataSettings, open_text; open_text(DataSettings('jsonl', sys.argv[1]))"
    )
    return subprocess.Popen([sys.executable, "-c", program, settings.path], start_new_session=True)


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_kill_loses_no_shard_and_publishes_nothing_unfinished(tmp_path: Path, cache: Path) -> None:
    settings = many(tmp_path)
    with started(settings) as process:
        wait_for(lambda: len(list(cache.glob("*/*.idx"))) > 1)
        os.killpg(process.pid, signal.SIGKILL)
    before = {file: file.stat().st_mtime_ns for file in cache.glob("*/*.idx")}
    assert not list(cache.glob("*/tokens.json"))
    source = open_documents(settings)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert len(list(cache.glob("*/*.idx"))) > len(before)
    assert [source[i].ids.tolist() for i in (0, 499)] == [
        open_tokenizer().encode(f"{i} " * 4000, bos=True, eos=True) for i in (0, 499)
    ]


def test_a_second_job_waits_and_makes_nothing_twice(tmp_path: Path, cache: Path, caplog, monkeypatch) -> None:
    settings = many(tmp_path)
    monkeypatch.setattr(made, "_LOG_SECONDS", 0.01)
    monkeypatch.setattr(made, "write_shard", pytest.fail)
    with started(settings) as process:
        wait_for(lambda: list(cache.glob("*/*.idx")))
        with caplog.at_level("INFO"):
            assert len(open_documents(settings)) == 500
        process.wait()
    assert "waiting for another process, which makes" in caplog.text


def test_what_is_made_is_said_with_place_and_size(lines: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        open_documents(DataSettings("jsonl", str(lines)))
        open_documents(DataSettings("jsonl", str(lines)))
    (folder,) = cache.iterdir()
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"making token files of 0.0 MiB of jsonl, about 0.0 MiB of ids, in {folder}"
    assert second.startswith(f"{folder}: 263 tokens of 50 documents in 1 shards")


def test_a_launcher_makes_no_token_files_and_takes_those_that_are_there(lines: Path, cache: Path) -> None:
    settings = DataSettings("jsonl", str(lines))
    assert catalog_of(settings, makes_files=False) is None
    assert not cache.exists()
    assert catalog_of(settings) == catalog_of(settings, makes_files=False)


def test_a_launcher_that_cannot_note_a_revision_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(HubData, "pinned", lambda self: replace(self, revision="1"))
    with pytest.raises(ConfigError, match="cannot be written"):
        catalog_of(DataSettings("hub", "a/b"), makes_files=False)


def test_a_cache_that_cannot_be_written_is_one_sentence(lines: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\); make room there, or name another"):
        open_documents(DataSettings("jsonl", str(lines)))


def file_operations(program: str, *arguments: str) -> dict[str, int]:
    """Count the opened files, listed folders and stats of a program below the folder of its first argument."""
    code = f"""
import collections, sys, os
counts = collections.Counter()
def audit(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(sys.argv[1]):
        counts[event] += 1
stat = os.stat
def counted(path, *more, **how):
    counts["stat"] += str(path).startswith(sys.argv[1])
    return stat(path, *more, **how)
from trainer.data.token_files.catalog import catalog_of, open_documents
from trainer.data import DataSettings, TextData
os.stat = counted
sys.addaudithook(audit)
{program}
print(dict(counts))
"""
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return eval(result.stdout)


def test_other_ranks_of_a_node_open_the_catalog_and_what_they_read(tmp_path: Path, cache: Path) -> None:
    """However many files there are: one process lists, looks at and hashes them."""
    counts = {}
    for files in (10, 200):
        (folder := tmp_path / f"data{files}").mkdir()
        for i in range(files):
            write_pair(folder / f"{i:04d}", [5, 6, 7, i])
        leader = "catalog_of(DataSettings('tokens', sys.argv[2]))"
        rank = """
data = TextData(open_documents(DataSettings('tokens', sys.argv[2]), sys.argv[3]))
streams = data.streams(data.items, 4, 8, 0, 3, 1024)
data.describe(data.items, 4)
"""
        catalog = catalog_of(DataSettings("tokens", str(folder)))
        counts[files] = [
            sum(file_operations(program, str(tmp_path), str(folder), catalog).values()) for program in (leader, rank)
        ]
    assert counts[200][0] > counts[10][0] + 190
    assert counts[200][1] == counts[10][1] <= 3

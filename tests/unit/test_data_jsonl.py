"""Laws of JSON lines: their columns, bad lines by file and number, and bad records that are left out."""

import os
import subprocess
import sys

import pytest

from tests.unit.data_sources import check_source, data_settings, refusal, texts, write_jsonl
from trainer.data.sources.registry import all_documents
from trainer.data.token_files.catalog import open_documents

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def no_network(monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError(f"network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# --- jsonl


def test_jsonl_is_a_file_a_folder_or_a_glob_without_network(tmp_path, no_network):
    write_jsonl(tmp_path / "b.jsonl", [{"text": "b0"}, {"text": ""}, {"text": "b1"}])
    write_jsonl(tmp_path / "a" / "a.jsonl", [{"text": "a0\n\U0001f600"}])
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write("\n  \n")  # blank lines are none
    assert texts("jsonl", tmp_path) == ["a0\n\U0001f600", "b0", "", "b1"]
    assert texts("jsonl", tmp_path / "b.jsonl") == ["b0", "", "b1"]
    assert texts("jsonl", tmp_path / "*" / "*.jsonl") == ["a0\n\U0001f600"]


def test_other_columns_may_be_anything(tmp_path):
    others = [1, "x", None, [1, "x"], {"a": {"b": []}}, 2**70, 1.5, []]
    rows = [{"text": str(i), "meta": others[i % 8], f"key{i % 3}": others[(i + 3) % 8]} for i in range(3000)]
    assert texts("jsonl", write_jsonl(tmp_path / "a.jsonl", rows)) == [str(i) for i in range(3000)]


def test_a_lone_surrogate_becomes_the_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert texts("jsonl", tmp_path) == ["a\ufffdb", "\U0001f600"]


def test_changed_data_are_read_again(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "old"}])
    assert texts("jsonl", file) == ["old"]
    write_jsonl(file, [{"text": "new"}])
    os.utime(file, ns=(1, 1))
    assert texts("jsonl", file) == ["new"]


def test_several_processes_may_open_the_same_data_at_once(tmp_path):
    """One of them makes the token files."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(20_000)])
    code = (
        "import sys; from trainer.data import DataSettings, open_text;"
        "s = open_text(DataSettings('jsonl', sys.argv[1]));"
        "print(s.items, s.source[19999].ids.tolist())"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert len({out for out, _ in outputs}) == 1
    assert outputs[0][0].startswith("20000 [")
    assert [err for _, err in outputs] == [""] * 4  # no progress bars, no warnings


@pytest.mark.parametrize(
    "line", ['{"text": 5}', '{"txt": "a"}', '["text"]', '"text"', "{", "not json", '{"text": null}', "[" * 100_000]
)
def test_a_bad_line_is_refused_by_file_and_number(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n\n' + line + "\n")
    message = refusal(texts, "jsonl", file)
    assert message == f'{file}, line 3, must be a JSON object with a string field "text", in UTF-8'
    check_source("jsonl", str(file), 2)  # reads the start only
    file.write_text(line)
    assert f"{file}, line 1, must be" in refusal(check_source, "jsonl", str(file), 1)


def test_a_line_that_is_not_utf8_is_refused_by_file_and_number(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "\xfc"}\n')
    assert f"{file}, line 2, must be" in refusal(texts, "jsonl", file)


def test_the_text_may_have_another_name(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"content": "a", "text": 1}])
    assert texts("jsonl", file, text_field="content") == ["a"]
    check_source("jsonl", str(file), 1, text_field="content")
    assert 'with a string field "body"' in refusal(lambda: check_source("jsonl", str(file), 1, text_field="body"))


# --- bad records


def test_bad_records_are_left_out_in_their_places_and_counted(tmp_path, caplog):
    (file := tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xfc"}\n{"text": "b"}\n' + b"{\n" * 12)
    assert texts("jsonl", file, skips=True) == ["a", "", "b", *[""] * 12]
    said = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert said == ["bad records left out so far: 1", "bad records left out so far: 10"]
    (tmp_path / "a.txt").write_bytes(b"gr\xfc\xdfe")
    assert texts("text", tmp_path / "a.txt", skips=True) == [""]


def test_token_files_without_bad_records_are_for_runs_that_stop_at_them(tmp_path, caplog):
    """A run that stops at bad records refuses token files that a skipping run made, with the reason."""
    (file := tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xfc"}\n')
    assert "a.jsonl, line 2, must be" in refusal(open_documents, data_settings("jsonl", file))
    assert [len(open_documents(data_settings("jsonl", file, skips=True))[i].ids) > 0 for i in range(2)] == [True, False]
    caplog.clear()
    assert len(open_documents(data_settings("jsonl", file, skips=True))) == 2
    assert not caplog.records  # nothing is made again
    assert "a.jsonl, line 2, must be" in refusal(open_documents, data_settings("jsonl", file))


def test_a_file_that_goes_away_is_no_bad_record(tmp_path):
    """A file holds many documents, so the run stops, whatever `on_bad_record` says."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    source = all_documents(data_settings("text", tmp_path, skips=True))
    assert next(source) == "a"
    (tmp_path / "b.txt").unlink()
    assert "b.txt cannot be read (No such file or directory); copy it again" in refusal(next, source)

"""Law: a data set is known by its content, whose bytes are hashed once."""

import json
import os

import pytest

from tests.unit.data_sources import data_settings, write_jsonl
from trainer.data.sources import files
from trainer.data.token_files.catalog import open_documents

pytestmark = pytest.mark.usefixtures("cache")


def hash_of(name, path, documents=None):
    source = open_documents(data_settings(name, path))
    return source.fingerprint(len(source) if documents is None else documents)


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_a_data_set_is_known_by_its_content(tmp_path, name):
    """Names and times do not count; the files count, in their order."""

    def write(folder, *contents):
        (tmp_path / folder).mkdir(exist_ok=True)
        ending = {"text": "txt", "jsonl": "jsonl"}[name]
        for i, content in enumerate(contents):
            rows = [{"text": content}, {"text": "b"}]
            file = tmp_path / folder / f"{folder}{i}.{ending}"
            file.write_text(content) if name == "text" else write_jsonl(file, rows)
        return tmp_path / folder

    n = 3 if name == "text" else 6
    whole = hash_of(name, write("a", "one", "two", "three"))
    assert hash_of(name, write("b", "one", "two", "three")) == whole
    for i, others in enumerate([("one", "two", "thr33"), ("one", "two"), ("two", "one", "three"), ("one", "twothree")]):
        assert hash_of(name, write(f"c{i}", *others)) != whole
    longer = write("d", "one", "two", "three", "four")
    assert hash_of(name, longer) != whole
    assert hash_of(name, longer, n) == whole
    if name == "jsonl":
        assert hash_of(name, longer, n - 1) == 0  # within a file


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_all_bytes_of_a_file_count_and_are_hashed_once(tmp_path, cache, monkeypatch, name):
    """Two lines far from head and tail change their places: size, ends and time of the file stay."""
    lines = [json.dumps({"text": f"{i:06d} " + "x" * 100}) for i in range(4000)]
    (file := tmp_path / f"a.{name.replace('text', 'txt')}").write_text("\n".join(lines))
    before, time_before = hash_of(name, file), file.stat().st_mtime_ns
    read = []
    hash_file = files._hash_of
    monkeypatch.setattr(files, "_hash_of", lambda file: read.append(file) or hash_file(file))
    assert (hash_of(name, file), len(read)) == (before, 0)
    lines[2000], lines[2001] = lines[2001], lines[2000]
    file.write_text("\n".join(lines))
    os.utime(file, ns=(time_before, time_before))
    assert hash_of(name, file) != before
    assert (hash_of(name, file) != before, len(read)) == (True, 1)


def test_a_file_that_is_added_does_not_cost_the_others(tmp_path, monkeypatch):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(str(i))
    whole, read, hash_file = hash_of("text", tmp_path), [], files._hash_of
    monkeypatch.setattr(files, "_hash_of", lambda file: read.append(file) or hash_file(file))
    (tmp_path / "3.txt").write_text("3")
    assert hash_of("text", tmp_path) != whole
    assert hash_of("text", tmp_path, 3) == whole
    assert read == [str(tmp_path / "3.txt")]

"""Laws of the sources: what they hold, that they need no network and no torch, and how they refuse bad data."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.data.sources import files, registry
from trainer.data.sources.registry import DataSettings, all_documents, check_streams
from trainer.data.token_files.catalog import open_documents


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The cache of indices, for this process and for those that a test starts."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def no_network(monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError(f"network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def given(name, path=None, **how):
    return DataSettings(name, None if path is None else str(path), **how)


def texts(name, path=None, **how):
    return list(all_documents(given(name, path, **how)))


def check_source(name, path, data_streams=None, **how):
    registry.check_source(given(name, path, **how), data_streams)


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args)
    message = str(error.value)
    assert "\n" not in message
    return message


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- python_stdlib


def test_the_standard_library_has_its_modules_and_no_tests_or_packages():
    documents = set(texts("python_stdlib"))
    root = Path(sysconfig.get_path("stdlib"))
    for inside in ("argparse.py", "json/decoder.py", "email/mime/text.py"):
        assert (root / inside).read_text(encoding="utf-8") in documents
    for pattern in ("test/*.py", "*/test/*.py", "*/tests/*.py", "site-packages/*.py"):
        outside = [file.read_text(errors="replace") for file in sorted(root.glob(pattern))[:20]]
        assert not {text for text in outside if len(text) > 200} & documents, pattern
    assert len(documents) > 300
    assert all(text.strip() for text in documents)


def test_the_standard_library_is_in_the_same_order_in_every_process():
    code = (
        "import hashlib; from trainer.data.sources.registry import DataSettings, all_documents;"
        "s = list(all_documents(DataSettings('python_stdlib')));"
        "print(hashlib.sha256('\\0'.join(s).encode()).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == hashlib.sha256("\0".join(texts("python_stdlib")).encode()).hexdigest()


# --- text


@pytest.fixture
def folder(tmp_path):
    for name, content in {"b.txt": "zwei\r\n", "a/x.txt": "eins ä", "c.md": "no", "empty.txt": ""}.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode())
    return tmp_path


def test_text_is_a_file_a_folder_or_a_glob(folder):
    assert texts("text", folder / "c.md") == ["no"]
    assert texts("text", folder) == ["eins ä", "zwei\r\n"]  # by path, recursively, without empty files, unchanged
    assert texts("text", folder / "*.md") == ["no"]
    assert texts("text", folder / "**" / "x.*") == ["eins ä"]


def test_a_folder_whose_name_looks_like_a_glob_is_a_folder(tmp_path):
    folder = tmp_path / "data[1]"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    assert texts("text", folder) == ["a"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert texts("text", tmp_path) == ["abc"]


def test_text_that_is_not_utf8_is_refused_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"gr\xfc\xdfe")
    source = all_documents(given("text", tmp_path))
    assert next(source) == "fine"
    assert "b.txt is not UTF-8 text (byte 2)" in refusal(next, source)
    assert "b.txt is not UTF-8 text" in refusal(check_source, "text", str(tmp_path / "b.txt"), 1)


def test_the_check_of_text_may_cut_a_character_in_two(tmp_path):
    (tmp_path / "a.txt").write_text("x" + "ä" * 100_000, encoding="utf-8")
    check_source("text", str(tmp_path), 1)


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
    """Of those that leave some out, a run that stops says why; both share what is made."""
    (file := tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xfc"}\n')
    assert "a.jsonl, line 2, must be" in refusal(open_documents, given("jsonl", file))
    assert [len(open_documents(given("jsonl", file, skips=True))[i].ids) > 0 for i in range(2)] == [True, False]
    caplog.clear()
    assert len(open_documents(given("jsonl", file, skips=True))) == 2
    assert not caplog.records  # nothing is made again
    assert "a.jsonl, line 2, must be" in refusal(open_documents, given("jsonl", file))


def test_a_file_that_goes_away_is_no_bad_record(tmp_path):
    """So many documents are gone with it that the run stops, whatever `on_bad_record` says."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    source = all_documents(given("text", tmp_path, skips=True))
    assert next(source) == "a"
    (tmp_path / "b.txt").unlink()
    assert "b.txt cannot be read (No such file or directory); copy it again" in refusal(next, source)


# --- check_source


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

    def told() -> str:
        os.setuid(65534)
        return refusal(check_source, "text", str(folder), 1)

    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writes, told().encode())
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
from trainer.data.text_data import open_text
check_source(DataSettings("python_stdlib"), 64)
check_source(DataSettings("jsonl", {str(tmp_path)!r}), 1)
trainer.data.tokenizers.tokenizer.vocab_size_of()
seconds = time.process_time() - start
print([name for name in ("torch", "datasets", "pyarrow", "tiktoken") if name in sys.modules], seconds < 1)
open_text(DataSettings("jsonl", {str(tmp_path)!r}))
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[] True\nFalse\n", result.stdout + result.stderr


# --- the content of data


def hash_of(name, path, documents=None):
    source = open_documents(given(name, path))
    return source.fingerprint(len(source) if documents is None else documents)


@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_a_data_set_is_known_by_its_content(tmp_path, name):
    """Neither names nor times count; what counts are the files, in their order."""

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
    more = write("d", "one", "two", "three", "four")
    assert hash_of(name, more) != whole
    assert hash_of(name, more, n) == whole
    if name == "jsonl":
        assert hash_of(name, more, n - 1) == 0  # within a file


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

"""Laws of data sets of text: the modules of the standard library; files, folders and globs of UTF-8."""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.unit.data_sources import check_source, data_settings, refusal, texts
from trainer.data.sources.registry import all_documents

pytestmark = pytest.mark.usefixtures("cache")


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
    source = all_documents(data_settings("text", tmp_path))
    assert next(source) == "fine"
    assert "b.txt is not UTF-8 text (byte 2)" in refusal(next, source)
    assert "b.txt is not UTF-8 text" in refusal(check_source, "text", str(tmp_path / "b.txt"), 1)


def test_the_check_of_text_may_cut_a_character_in_two(tmp_path):
    (tmp_path / "a.txt").write_text("x" + "ä" * 100_000, encoding="utf-8")
    check_source("text", str(tmp_path), 1)

"""Law: scripts/plain_words.py sees each kind of place that it counts, and nothing in plain texts."""

import json
from pathlib import Path

import pytest

from scripts import plain_words

PLAIN = '''"""Layouts of tokens."""


def shift(x: "Tensor", distance: int) -> "Tensor":
    """Return x, (B, S), shifted left.

    Args:
        x: The rows, (B, S).
        distance: Number of positions.
    """
    return x[distance:]  # a view
'''


def kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str = "scripts/a.py"
) -> list[tuple[int, str]]:
    """Return line and kind of each finding in a file of the program."""
    monkeypatch.setattr(plain_words, "ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [(line, kind) for line, kind, _ in plain_words.findings(path)]


def test_plain_text_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(tmp_path, monkeypatch, PLAIN) == []


LONG = "This sentence " + "has one more word " * 8 + "."


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("Layouts of tokens.", "Layouts, those of tokens.", (1, "constructions")),
        ("# a view", "# what is left", (11, "constructions")),
        ("return x[distance:]", 'raise ValueError("a rank beside it has no rows")', (11, "constructions")),
        ("Number of positions.", LONG, (9, "sentences")),
        ("distance: int", "given: int", (4, "names")),
        ("    Args:\n", "", (4, "sections")),
        ("Return x, (B, S), shifted", "Shift x, (B, S),", (4, "sections")),
        ("(B, S)", "whole", (4, "shapes")),
    ],
)
def test_each_kind_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, finding: tuple[int, str]
) -> None:
    assert before in PLAIN
    assert finding in kinds(tmp_path, monkeypatch, PLAIN.replace(before, after))


def test_a_class_documents_its_constructor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = '"""A."""\n\n\nclass A:\n    """A.\n'
    arguments = "\n    Args:\n        x: A number.\n"
    rest_of_class = '    """\n\n    def __init__(self, x: int) -> None: ...\n'
    assert kinds(tmp_path, monkeypatch, head + arguments + rest_of_class) == []
    assert kinds(tmp_path, monkeypatch, head + rest_of_class) == [(8, "sections")]


def test_a_page_without_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# A\n\n```\nthose of\n```\n\n| a | those of |\n|---|---|\n\n`those of` it: `what is`\n"
    assert kinds(tmp_path, monkeypatch, text, "docs/a.md") == [(7, "constructions")]


def test_tests_have_free_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '"""A."""\n\n\ndef test_a(x):\n    """Those of a rank."""\n    raise ValueError("those of")\n'
    assert kinds(tmp_path, monkeypatch, text, "tests/a.py") == [(5, "constructions")]


def test_counts_may_only_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    kinds(tmp_path, monkeypatch, "It is told.\n", "docs/a.md")
    record = tmp_path / "record.json"
    monkeypatch.setattr(plain_words, "RECORD", record)
    monkeypatch.setattr(plain_words, "EVERYTHING", ["docs"])

    def outcome(count: int, *arguments: str) -> int:
        record.write_text(json.dumps({"counts": {"docs constructions": count}, "exceptions": []}))
        monkeypatch.setattr("sys.argv", ["plain_words.py", *arguments])
        return plain_words.main()

    assert outcome(1) == 0
    assert outcome(0) == 1
    assert "docs constructions: 1 more than the 0" in capsys.readouterr().out
    assert outcome(0, "--lower") == 1
    assert outcome(2) == 1
    assert "--lower" in capsys.readouterr().out
    assert outcome(2, "--lower") == 0
    assert json.loads(record.read_text())["counts"] == {"docs constructions": 1}
    exception = {"file": "docs/a.md", "text": "is told", "why": "a quotation"}
    record.write_text(json.dumps({"counts": {}, "exceptions": [exception]}))
    monkeypatch.setattr("sys.argv", ["plain_words.py"])
    assert plain_words.main() == 0


def test_each_exception_has_a_reason_and_is_in_its_file() -> None:
    for entry in json.loads(plain_words.RECORD.read_text())["exceptions"]:
        assert entry["why"]
        text = (plain_words.ROOT / entry["file"]).read_text()
        assert entry["text"].lower() in " ".join(text.split()).lower()


def test_the_check_is_short() -> None:
    assert len(Path(plain_words.__file__).read_text().splitlines()) <= 150

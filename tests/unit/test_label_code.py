"""Law of cached labels: a change of the code that makes labels raises its number, so that old files are not taken."""

import ast
import hashlib
import json
from pathlib import Path

import pytest

from tests.chat_files import CHATML, chat_folder, conversations, write_lines
from trainer.config.errors import ConfigError
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files import inputs
from trainer.data.token_files.catalog import catalog_of
from trainer.data.token_files.inputs import LABELS, Inputs
from trainer.data.token_files.made import tokenize

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "trainer/data/sources/conversations.py",
    "trainer/data/tokenizers/chat_answers.py",
    "trainer/data/tokenizers/chat_messages.py",
    "trainer/data/tokenizers/chat_template.py",
    "trainer/data/tokenizers/conversation_encoder.py",
    "trainer/data/tokenizers/template_files.py",
    "trainer/data/tokenizers/template_sandbox.py",
)
HASHES = {2: "b9a59cb283372583"}


def code_of(source: str) -> str:
    """Return the lines of a module without docstrings, comments and empty lines."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno - 1, node.end_lineno):
                lines[number] = ""
    return "\n".join(line for line in lines if line.strip() and not line.strip().startswith("#"))


def hash_of(sources: list[str]) -> str:
    return hashlib.sha256("\0".join(map(code_of, sources)).encode()).hexdigest()[:16]


def test_the_number_of_the_code_of_labels_is_raised_with_it():
    digest = hash_of([(ROOT / name).read_text() for name in CODE])
    assert HASHES.get(LABELS) == digest, (
        f"the code that makes labels has changed: if a label of any conversation may be another one, raise LABELS in "
        f"trainer/data/token_files/inputs.py; then write {digest!r} for that number into HASHES"
    )
    assert len(HASHES) == 1, "old numbers are not kept"


@pytest.mark.parametrize(
    ("changed", "counts"),
    [("x = 2", True), ("x = 1  # why", True), ("# why\nx = 1", False), ('"""What."""\n\nx = 1', False)],
)
def test_code_is_told_from_words(changed, counts):
    assert (hash_of([changed]) != hash_of(["x = 1"])) == counts


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSettings:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = chat_folder(tmp_path / "model", CHATML, file=True)
    return DataSettings("chat", str(write_lines(tmp_path / "chat.jsonl", conversations(5))), str(folder))


def test_labels_of_another_number_are_made_again(settings, tmp_path, monkeypatch):
    catalog_of(settings)
    catalog_of(settings)
    monkeypatch.setattr(inputs, "LABELS", LABELS + 1)
    catalog_of(settings)
    assert len(list((tmp_path / "cache" / "long-context-trainer" / "tokens").iterdir())) == 2


def test_token_files_of_other_ends_or_of_another_template_are_refused(settings, tmp_path):
    tokenize(Inputs.of(settings), tmp_path / "tokens", processes=1, log=lambda _: None)
    tokens = DataSettings("tokens", str(tmp_path / "tokens"), settings.tokenizer)
    assert catalog_of(tokens)
    config, template = (Path(settings.tokenizer, name) for name in ("tokenizer_config.json", "chat_template.jinja"))
    before = config.read_text()
    for name, token, words in (
        ("eos_token", "<|end|>", "other tokens at the beginning or end of documents than the files next to"),
        (
            "pad_token",
            "<|pad|>",
            "another template, or other special tokens in it, than model.chat_template or the files next to",
        ),
    ):
        config.write_text(json.dumps(json.loads(before) | {name: token}))
        with pytest.raises(ConfigError, match=words):
            catalog_of(tokens)
    config.write_text(before)
    assert catalog_of(tokens)
    template.write_text(CHATML + "{# another one #}")
    with pytest.raises(ConfigError, match="another template"):
        catalog_of(tokens)
    template.unlink()
    assert catalog_of(tokens), "a run without a template asks for none"

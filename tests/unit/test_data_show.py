"""Laws of `lct data show`: it prints the samples that the run trains on, and counts the documents."""

import re

import numpy as np
import pytest

from lct_tools.data import main, shortened
from tests.chat_files import CHATML, chat_folder, conversations, write_lines
from tests.loading import batch_loader
from trainer.commands.main import main as lct
from trainer.data import DataSettings, open_text, open_tokenizer
from trainer.data.contents import LENGTHS, Contents, summary
from trainer.data.packing import IGNORE_INDEX
from trainer.data.text_data import TextData
from trainer.data.whole_stream import TooLong

LINES = conversations(40)
SEQ_LEN = 96


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("show")
    folder = chat_folder(root / "model", CHATML)
    write_lines(root / "chat.jsonl", LINES)
    (root / "job.toml").write_text(
        f'[model]\ntokenizer_path = "{folder}"\n[training]\ndataset = "chat"\ndataset_path = "{root}/chat.jsonl"\n'
        f"seq_len = {SEQ_LEN}\n"
    )
    return [str(root / "job.toml")]


def settings_of(job: list[str]) -> DataSettings:
    root = job[0].removesuffix("/job.toml")
    return DataSettings("chat", f"{root}/chat.jsonl", f"{root}/model")


@pytest.fixture(autouse=True)
def log_as_before(monkeypatch):
    """The command sets up the log of its process."""
    monkeypatch.setattr("lct_tools.data.set_up_logging", lambda rank, **how: None)


@pytest.mark.parametrize("sample", [0, 5])
def test_the_sequence_that_is_shown_is_the_one_that_is_trained_on(sample, job, capsys, tmp_path):
    page = tmp_path / "page.html"
    assert main(["show", *job, "--sample", str(sample), "--characters", "0", "--html", str(page)]) == 0
    out, tokenizer = capsys.readouterr().out, open_tokenizer(settings_of(job).tokenizer)
    how = {"local_batch_size": 1, "data_streams": None, "seed": 0, "dp_rank": 0, "dp_degree": 1}
    batches = iter(batch_loader(open_text(settings_of(job)), seq_len=SEQ_LEN, **how))
    batch = [next(batches) for _ in range(sample + 1)][sample]
    tokens, labels, ids = (batch[name][0].numpy() for name in ("tokens", "labels", "document_ids"))
    bodies = re.split(r"^-- .*\n", out.partition(" tokens\n\n-- ")[2], flags=re.MULTILINE)
    shown = [body.removesuffix("\n") for body in bodies]
    shown[0] = shown[0].partition("\n")[2]
    marked = re.findall(r"⟦(.*?)⟧", "".join(shown), flags=re.DOTALL)
    learned = labels[labels != IGNORE_INDEX]
    assert "".join(marked) == tokenizer.decode(learned.tolist())
    for number in range(ids[-1]):
        text = shown[number].replace("⟦", "").replace("⟧", "")
        assert text.startswith(tokenizer.decode(tokens[ids == number].tolist()))
    assert ("padding: " in out) == bool(batch["padding"])
    assert page.read_text().count("<b>") == len(marked)


def test_counts_are_those_of_the_documents(job, capsys):
    data = open_text(settings_of(job))
    documents = [data.source[i] for i in range(len(data.source))]
    (content,) = data.contents().values()
    assert content.lengths.tolist() == [len(one.ids) for one in documents]
    assert content.learned == sum(int(one.answers.sum()) for one in documents)
    whole = np.mean([len(one.ids) <= SEQ_LEN for one in documents])
    assert 0 < whole < 1
    assert content.whole(SEQ_LEN) == whole
    line = summary({"": content}, SEQ_LEN)
    assert line.startswith(f"{len(documents)} documents, {content.tokens:,} tokens, ")
    assert f"{whole:.1%} of the documents have at most 96 tokens" in line
    assert "\n" not in line
    assert summary({"one": content, "two": content}, SEQ_LEN).splitlines()[-1].split()[:2] == [
        "two",
        f"{len(content.lengths)}",
    ]
    assert main(["show", *job]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[-len(LENGTHS) - 1 :] == ["96", "16k", "32k", "64k", "128k", "256k"]
    assert rows[2].split()[-len(LENGTHS) - 1 :] == [f"{whole:.1%}", *["100.0%"] * 5]


def test_texts_are_learned_but_for_their_first_token(tmp_path):
    for name, content in (("a.txt", "the quick fox"), ("b.txt", "adds two")):
        (tmp_path / name).write_text(content)
    data = open_text(DataSettings("text", str(tmp_path)))
    (counts,) = data.contents().values()
    assert counts.learned == counts.tokens - 2
    assert TextData(data.source, "pad", TooLong()).contents() != {}
    assert Contents(np.array([], dtype=np.int64), 0).whole(1) == 1.0


def test_a_long_text_is_shown_from_both_ends():
    parts = [("abcdef", False), ("ghij", True), ("klmnop", False)]
    assert shortened(parts, 0) == shortened(parts, 16) == parts
    short = shortened(parts, 6)
    assert "".join(text for text, _ in short) == "abc\n... 10 characters ...\nnop"
    assert shortened([("abcdefgh", True)], 2) == [("a", True), ("\n... 6 characters ...\n", False), ("h", True)]
    border = "".join(text for text, _ in shortened(parts, 12))
    assert border == "abcdef\n... 4 characters ...\nklmnop"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["list"], "`lct data` has one command"),
        (["show", "no.toml"], "no.toml"),
        (["show", "--sample", "-1"], "must be at least 0"),
        (["show", "--html", "/no/such/folder/a.html", "--training.seq_len=64"], "cannot be read or written"),
    ],
)
def test_bad_arguments_are_one_sentence(argv, message, capsys):
    assert lct(["data", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

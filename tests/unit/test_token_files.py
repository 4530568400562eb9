"""Laws of token files: the same sequences as from text, bit for bit, from any kind of file."""

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from tests.loading import batch_loader
from tests.numbered import Ids
from tests.unit.token_file_cases import TEXTS, lct_tokenize, made, opened, small_shards
from trainer.data import DataSettings, TextData
from trainer.data.loader import batch_hash
from trainer.data.sources.registry import all_documents
from trainer.data.token_files.catalog import check_data
from trainer.data.tokenizers.tokenizer import open_tokenizer

pytestmark = pytest.mark.usefixtures("cache")


def batches_of(data: TextData, number: int = 40) -> list[int]:
    shape = {"seq_len": 16, "local_batch_size": 2, "data_streams": 3, "seed": 5, "dp_rank": 0, "dp_degree": 1}
    return [batch_hash(batch) for batch in islice(iter(batch_loader(data, **shape)), number)]


def hashes(path: object, dataset: str = "tokens") -> list[int]:
    return batches_of(TextData(opened(path, dataset)))


def encoded_here(texts: list[str] = TEXTS, packing: str = "concatenate") -> TextData:
    """The texts, encoded in this process one by one."""
    return TextData(Ids([open_tokenizer().encode(text, bos=bool(text), eos=bool(text)) for text in texts]), packing)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "pad"])
def test_sequences_equal_those_of_the_text_bit_for_bit(lines: Path, tmp_path: Path, packing: str):
    """By `lct tokenize`, and by the first start of a run on the text."""
    expected = batches_of(encoded_here(packing=packing))
    tokens = made(lines, tmp_path / "tokens")
    assert (
        batches_of(TextData(opened(tokens), packing))
        == batches_of(TextData(opened(lines, "jsonl"), packing))
        == expected
    )
    assert len(opened(tokens)) == len(TEXTS)
    check_data(DataSettings("tokens", tokens), 3)


def test_shards_change_nothing(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file of lines is cut at bytes; each line belongs to the shard in which it begins."""
    small_shards(monkeypatch, 50)
    tokens = Path(made(lines, tmp_path / "tokens"))
    assert len(list(tokens.glob("*.idx"))) > 10
    assert hashes(tokens) == batches_of(encoded_here())


def test_text_files_and_the_standard_library_give_their_documents(tmp_path: Path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    expected = batches_of(encoded_here([text for text in TEXTS if text]))
    assert hashes(made(tmp_path, tmp_path / "tokens", "--dataset", "text")) == hashes(tmp_path, "text") == expected
    assert lct_tokenize("--dataset", "python_stdlib", "--output", tmp_path / "library") == 0
    texts, library = list(all_documents(DataSettings("python_stdlib"))), opened(tmp_path / "library")
    assert len(texts) == len(library)
    assert library[7].ids.tolist() == open_tokenizer().encode(texts[7], bos=True, eos=True)


def packed(lines: Path, file: Path) -> Path:
    """Write lines as a file of another format, which its ending names."""
    pyarrow = pytest.importorskip("pyarrow")
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".parquet":
        from pyarrow import parquet

        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        table = pyarrow.table({name: [row[name] for row in rows] for name in ("n", "text")})
        parquet.write_table(table, file, row_group_size=2)
    elif file.suffix == ".gz":
        file.write_bytes(gzip.compress(lines.read_bytes()))
    else:
        with pyarrow.output_stream(str(file), compression="zstd") as stream:
            stream.write(lines.read_bytes())
    return file


@pytest.mark.parametrize("ending", ["jsonl.gz", "json.gz", "jsonl.zst", "parquet"])
def test_files_without_random_access_are_streamed(lines: Path, tmp_path: Path, ending: str):
    file = packed(lines, tmp_path / "packed" / f"a.{ending}")
    check_data(DataSettings("jsonl", str(file)), 1)
    expected = batches_of(encoded_here())
    assert hashes(made(file.parent, tmp_path / "tokens")) == hashes(file.parent, "jsonl") == expected


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_a_damaged_archive_is_told(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture, ending: str):
    """Its index is not written, so that the same command reads it again."""
    file = packed(lines, tmp_path / f"a.{ending}")
    file.write_bytes(file.read_bytes()[:-20])
    assert lct_tokenize("--path", file, "--output", tmp_path / "tokens") == 2
    assert f"a.{ending} cannot be read (" in capsys.readouterr().err
    assert not list((tmp_path / "tokens").glob("*.idx"))


def test_archives_in_several_parts_are_read_to_their_end(lines: Path, tmp_path: Path):
    """As parallel compressors write them."""
    parts = [packed(lines, tmp_path / "in" / f"part.jsonl.{end}").read_bytes() for end in ("gz", "zst")]
    for end, content in zip(("gz", "zst"), parts, strict=True):
        (tmp_path / f"two.jsonl.{end}").write_bytes(2 * content)
        tokens = made(tmp_path / f"two.jsonl.{end}", tmp_path / end)
        assert len(opened(tokens)) == 2 * len(TEXTS)


def test_bad_rows_and_columns_are_told(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    file = packed(lines, tmp_path / "a.parquet")
    assert lct_tokenize("--path", file, "--output", tmp_path / "tokens", "--text-field", "body") == 2
    assert (
        'a.parquet, row 0 has no column "body" (n, text); name one with training.dataset_text_field'
        in capsys.readouterr().err
    )
    assert lct_tokenize("--path", file, "--output", tmp_path / "numbers", "--text-field", "n") == 2
    assert 'a.parquet, row 0, must have a text in UTF-8 in the column "n", not int' in capsys.readouterr().err
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"gr\xfc\xdfe")
    (tmp_path / "text" / "b.txt").write_text("fine")
    text = ["--dataset", "text", "--path", tmp_path / "text", "--output"]
    assert lct_tokenize(*text, tmp_path / "stopped") == 2
    assert "a.txt is not UTF-8 text" in capsys.readouterr().err
    assert lct_tokenize(*text, tmp_path / "skipped", "--on-bad-record", "skip") == 0
    assert [len(opened(tmp_path / "skipped")[i].ids) > 0 for i in range(2)] == [0, 1]
    note = tmp_path / "skipped" / "shard-00000.skipped"
    before = note.read_bytes()
    note.write_bytes(before[:-2])
    assert lct_tokenize(*text, tmp_path / "skipped", "--on-bad-record", "skip") == 0
    assert "shard-00000 is damaged, and is made again\n" in capsys.readouterr().out
    assert note.read_bytes() == before


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_row_that_is_no_utf8_is_a_bad_record(tmp_path: Path, capsys: pytest.CaptureFixture, dictionary: bool):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"one", b"gr\xfc\xdfe", None, "drei ä".encode()]).view(pyarrow.string())
    table = pyarrow.table({"text": texts.dictionary_encode() if dictionary else texts})
    parquet.write_table(table, tmp_path / "a.parquet")
    arguments = ["--path", tmp_path / "a.parquet", "--output"]
    assert lct_tokenize(*arguments, tmp_path / "stopped") == 2
    assert 'a.parquet, row 1, must have a text in UTF-8 in the column "text"' in capsys.readouterr().err
    source = opened(made(arguments[1], tmp_path / "skipped", "--on-bad-record", "skip"))
    decoded = [open_tokenizer().decode(source[i].ids[1:-1].tolist()) for i in range(4)]
    assert decoded == ["one", "", "", "drei ä"]


def test_a_flipped_bit_in_a_page_of_parquet_is_told(tmp_path: Path, capsys: pytest.CaptureFixture):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(pyarrow.table({"text": ["needle in a row"]}), tmp_path / "a.parquet", **plain)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"needle in", b"noodle in"))
    assert lct_tokenize("--path", tmp_path / "a.parquet", "--output", tmp_path / "tokens") == 2
    assert "a.parquet cannot be read (" in capsys.readouterr().err

"""Laws of token files: the same sequences as from text, bit for bit; damage and another tokenizer are one sentence."""

import fcntl
import gzip
import json
import struct
import subprocess
import sys
import threading
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest

from tests.numbered import Ids
from trainer.commands import tokenize_text
from trainer.commands.main import main as lct
from trainer.config.errors import ConfigError
from trainer.data import DataSettings, TextData
from trainer.data.loader import BatchLoader, batch_hash
from trainer.data.sources.registry import all_documents, files_of, source_of
from trainer.data.token_files import made as module
from trainer.data.token_files.catalog import check_data, open_documents
from trainer.data.token_files.format import TokenFiles
from trainer.data.token_files.made import write_shard
from trainer.data.tokenizers.tokenizer import open_tokenizer

TEXTS = ["eins zwei", "", "drei\nä \U0001f600", "x" * 3000, "vier", "fünf sechs sieben", "y " * 500]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The cache of indices, for this process and for those that a test starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "in" / "a.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(TEXTS)))
    return file


def lct_tokenize(*argv: object) -> int:
    return lct(["tokenize", *map(str, argv), "--processes", "1"])


def made(path: Path, output: Path, *more: object) -> str:
    assert lct_tokenize("--path", path, "--output", output, *more) == 0
    return str(output)


def opened(path: object, dataset: str = "tokens", **how: object) -> TokenFiles:
    return open_documents(DataSettings(dataset, str(path), **how))


def batches_of(data: TextData, number: int = 40) -> list[int]:
    shape = {"seq_len": 16, "local_batch_size": 2, "data_streams": 3, "seed": 5, "dp_rank": 0, "dp_degree": 1}
    return [batch_hash(batch) for batch in islice(iter(BatchLoader(data, **shape)), number)]


def hashes(path: object, dataset: str = "tokens") -> list[int]:
    return batches_of(TextData(opened(path, dataset)))


def encoded_here(texts: list[str] = TEXTS, packing: str = "concatenate") -> TextData:
    """The texts, encoded in this process one by one."""
    return TextData(Ids([open_tokenizer().encode(text, bos=bool(text), eos=bool(text)) for text in texts]), packing)


def refusal(path: object, **how: object) -> str:
    def read() -> None:
        source = opened(path, **how)
        for i in range(len(source)):
            source[i]

    with pytest.raises(ConfigError) as error:
        read()
    assert "\n" not in str(error.value)
    return str(error.value)


def small_shards(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Cut the inputs at so many bytes."""
    monkeypatch.setattr(
        module.Inputs, "parts", lambda self, _: source_of(self.settings).parts(self.settings, self.files, size)
    )


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
        'a.parquet has no column "body" (n, text); name one with training.dataset_text_field' in capsys.readouterr().err
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


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_row_that_is_no_utf8_is_a_bad_record(tmp_path: Path, capsys: pytest.CaptureFixture, dictionary: bool):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"one", b"gr\xfc\xdfe", None, "drei ä".encode()]).view(pyarrow.string())
    table = pyarrow.table({"text": texts.dictionary_encode() if dictionary else texts})
    parquet.write_table(table, tmp_path / "a.parquet")
    given = ["--path", tmp_path / "a.parquet", "--output"]
    assert lct_tokenize(*given, tmp_path / "stopped") == 2
    assert 'a.parquet, row 1, must have a text in UTF-8 in the column "text"' in capsys.readouterr().err
    source = opened(made(given[1], tmp_path / "skipped", "--on-bad-record", "skip"))
    found = [open_tokenizer().decode(source[i].ids[1:-1].tolist()) for i in range(4)]
    assert found == ["one", "", "", "drei ä"]


def test_a_flipped_bit_in_a_page_of_parquet_is_told(tmp_path: Path, capsys: pytest.CaptureFixture):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(pyarrow.table({"text": ["needle in a row"]}), tmp_path / "a.parquet", **plain)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"needle in", b"noodle in"))
    assert lct_tokenize("--path", tmp_path / "a.parquet", "--output", tmp_path / "tokens") == 2
    assert "a.parquet cannot be read (" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_resumes_and_gives_the_same(lines: Path, tmp_path: Path):
    lines.write_text("".join(json.dumps({"text": f"{i} " * 4000}) + "\n" for i in range(160)))
    expected = Path(made(lines, tmp_path / "whole", "--shard-mb", 1))
    program = [sys.executable, "-m", "trainer", "tokenize", "--path", str(lines), "--output", str(tmp_path / "tokens")]
    program += ["--shard-mb", "1", "--processes", "2"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        first = tmp_path / "tokens" / f"{process.stdout.readline().partition(':')[0]}.bin"
        process.kill()  # its own processes notice by themselves, and may still write
    assert "run the same `lct tokenize` again" in refusal(tmp_path / "tokens")
    written = first.stat().st_mtime_ns
    result = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "shards already" in result.stdout
    assert first.stat().st_mtime_ns == written
    files = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == files
    assert all((tmp_path / "tokens" / name).read_bytes() == (expected / name).read_bytes() for name in files)
    shipped = Path(tokenize_text.default_tokenizer_path()).read_text().splitlines(keepends=True)
    (other := tmp_path / "other.tiktoken").write_text("".join(shipped[:-1]))
    result = subprocess.run([*program, "--tokenizer-path", str(other)], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "holds token ids of other settings or data (tokenizer, made_by)" in result.stderr
    lines.write_text('{"text": "other"}\n')
    result = subprocess.run(program, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "holds token ids of other settings or data (inputs)" in result.stderr


def test_one_process_at_a_time_writes_a_shard(lines: Path, tmp_path: Path):
    """The second one finds it whole."""
    stem = tmp_path / "shard-00000"
    settings = DataSettings("jsonl", str(lines))
    (part,) = source_of(settings).parts(settings, files_of(settings), 1 << 20)
    with stem.with_suffix(".bin").open("wb") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threading.Thread(target=write_shard, args=(settings, part, stem))
        second.start()
        first.write(b"the first one's")
        stem.with_suffix(".idx").write_text("whole")
    second.join(timeout=60)
    assert stem.with_suffix(".bin").read_bytes() == b"the first one's"
    assert not stem.with_suffix(".crc").exists()


def test_another_tokenizer_is_refused(lines: Path, tmp_path: Path):
    tokens = made(lines, tmp_path / "tokens")
    other = tmp_path / "other.tiktoken"
    shipped = Path(tokenize_text.default_tokenizer_path()).read_text().splitlines(keepends=True)
    other.write_text("".join(shipped[:-1]))
    message = refusal(tokens, tokenizer=str(other))
    assert (
        "has the token ids of another tokenizer (python_4k.tiktoken, 4,352 tokens); name that one in model" in message
    )


@pytest.mark.parametrize(
    ("ending", "damage", "says"),
    [
        ("bin", lambda content: content[:-2], "bytes and its index shard-00000.idx says"),
        ("bin", lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:], "its check sum is wrong"),
        ("idx", lambda content: b"X" + content[1:], "is no whole index of token ids"),
        ("idx", lambda content: content[:-8], "is no whole index of token ids"),
        ("idx", lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:], "is damaged: its check sum"),
        ("crc", lambda content: content[:-4], "is damaged: its check sum is not that of tokens.json"),
        ("bin", None, "shard-00000.bin cannot be read (No such file or directory)"),
        ("idx", None, "lacks shard-00000.idx"),
        ("json", None, "and no tokens.json beside it names it; copy the whole folder again"),
        ("json", lambda content: content.replace(b'"crc"', b'"cRc"', 1), "tokens.json is damaged; copy it again"),
        ("json", lambda content: content.replace(b'"hash"', b'"hush"', 1), "tokens.json is damaged; copy it again"),
        ("json", lambda content: content.replace(b"shard-00000", b"shard-00009"), "lacks shard-00009.idx"),
    ],
)
def test_a_damaged_shard_is_one_sentence(lines: Path, tmp_path: Path, monkeypatch, ending: str, damage, says: str):
    small_shards(monkeypatch, 1500)
    tokens = Path(made(lines, tmp_path / "tokens"))
    file = tokens / ("tokens.json" if ending == "json" else f"shard-00000.{ending}")
    content = file.read_bytes()
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(content))
    assert says in refusal(tokens)


@pytest.mark.parametrize(
    ("finished", "ending"),
    [*((True, end) for end in ("short bin", "idx", "crc", "no bin")), (False, "short bin"), (False, "no bin")],
)
def test_the_same_command_makes_a_damaged_shard_again(
    lines: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture, ending: str, finished: bool
):
    """And no other one; the manifest has the sums of indices. Documents are compared when they are read."""
    small_shards(monkeypatch, 1500)
    tokens = Path(made(lines, tmp_path / "tokens"))
    before = {file.name: file.read_bytes() for file in tokens.iterdir()}
    if not finished:
        plan = json.loads((tokens / "tokens.json").read_text())
        del plan["shards"], plan["content"]
        (tokens / "tokens.json").unlink()
        (tokens / "unfinished.json").write_text(json.dumps(plan))
    file = tokens / f"shard-00000.{ending.split()[-1]}"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content[:-2] if ending == "short bin" else content)
    if ending == "no bin":
        file.unlink()
    capsys.readouterr()
    made(lines, tokens)
    told = capsys.readouterr().out
    assert "shard-00000 is damaged, and is made again\n" in told
    assert f"{tokens} has {len(before) // 3 - 1} of {len(before) // 3} shards already" in told
    assert {file.name: file.read_bytes() for file in tokens.iterdir()} == before


def test_a_file_that_shrinks_while_it_is_read_is_told_and_does_not_kill(lines: Path, tmp_path: Path):
    tokens = Path(made(lines, tmp_path / "tokens"))
    source = opened(tokens)
    with open(tokens / "shard-00000.bin", "r+b") as file:
        file.truncate(4)
    with pytest.raises(ConfigError, match=r"is shorter than when the run began to read it \(byte"):
        source[len(TEXTS) - 1]


# --- files of other programs


def megatron(stem: Path, documents: list[list[list[int]]], dtype: str, code: int) -> None:
    """Write a pair as Megatron-LM does; a document has one sequence or more."""
    sequences = [sequence for document in documents for sequence in document]
    content = [np.array(sequence, dtype=dtype).tobytes() for sequence in sequences]
    stem.with_suffix(".bin").write_bytes(b"".join(content))
    ends = np.cumsum([0, *map(len, documents)])
    places = np.cumsum([0, *map(len, content)])[:-1]
    stem.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
        + np.array([len(sequence) for sequence in sequences], dtype="<i4").tobytes()
        + places.astype("<i8").tobytes()
        + ends.astype("<i8").tobytes()
    )


@pytest.mark.parametrize(
    ("dtype", "code"), [("<u1", 1), ("<i1", 2), ("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)], ids=str
)
def test_a_pair_of_megatron_is_read_as_it_is(tmp_path: Path, dtype: str, code: int):
    """Several sequences of a document follow each other; a document may have none."""
    last = min(4351, int(np.iinfo(dtype).max))
    documents = [[[5, 6, 7]], [[8], [9, 10], [], [11]], [], [[last]]]
    megatron(tmp_path / "a", documents, dtype, code)
    source = opened(tmp_path)
    assert [source[i].ids.tolist() for i in range(4)] == [list(chain(*document)) for document in documents]
    check_data(DataSettings("tokens", str(tmp_path / "a.idx")), 4)


@pytest.mark.parametrize("kind", ["of lct tokenize", "pair"])
def test_all_ids_count_in_the_hash_of_the_content(lines: Path, tmp_path: Path, kind: str):
    """Also those in the middle of a file, whose size and ends stay."""

    def content(changed: bool) -> int:
        folder = tmp_path / f"{kind}{changed}"
        ids = np.arange(200_000) % 4000
        ids[100_000] += changed
        if kind == "of lct tokenize":
            text = lines.read_text().replace("vier", "vie?" if changed else "vier")
            lines.write_text(text)
            made(lines, folder)
        else:
            folder.mkdir(exist_ok=True)
            megatron(folder / "a", [[ids[:9].tolist()], [ids[9:].tolist()]], "<u2", 8)
        source = opened(folder)
        return source.fingerprint(len(source))

    assert content(False) == content(False) != content(True)


@pytest.mark.parametrize(("dtype", "code"), [("<f8", 6), ("<f4", 7), ("<u2", 9)])
def test_a_pair_of_other_numbers_is_refused(tmp_path: Path, dtype: str, code: int):
    megatron(tmp_path / "a", [[[5, 6]]], dtype, code)
    assert "a.idx is no whole index of token ids (Megatron's format, version 1)" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("place", "number", "dtype"),
    [
        (0, -3, "<i4"),  # the length of the first sequence
        (4, 1, "<i4"),
        (20, 2, "<i8"),  # the place of the second one
        (36, 1, "<i8"),  # the first sequence of the first document
        (44, 4, "<i8"),  # documents that go back
        (52, 9, "<i8"),  # behind the last sequence
        (52, 2, "<i8"),
    ],
)
def test_a_damaged_index_of_megatron_is_refused(tmp_path: Path, place: int, number: int, dtype: str):
    megatron(tmp_path / "a", [[[5, 6, 7]], [[8, 9], [10, 11]]], "<u2", 8)
    file = tmp_path / "a.idx"
    content = bytearray(file.read_bytes())
    value = np.array([number], dtype=dtype).tobytes()
    content[34 + place : 34 + place + len(value)] = value
    file.write_bytes(content)
    assert "a.idx is damaged: its sequences do not follow each other in a.bin" in refusal(tmp_path)


def test_a_token_beyond_the_vocabulary_is_told(tmp_path: Path):
    megatron(tmp_path / "a", [[[5]], [[4352]], [[6]]], "<i4", 4)
    message = refusal(tmp_path)
    assert "a.bin, document 1, has the token id 4352, and the tokenizer has 4,352 (0 and up)" in message
    megatron(tmp_path / "a", [[[5]], [[-1]], [[6]]], "<i4", 4)
    assert "document 1, has the token id -1" in refusal(tmp_path)
    source = opened(tmp_path, skips=True)
    assert [source[i].ids.tolist() for i in range(3)] == [[5], [], [6]]


def test_ids_of_another_program_need_an_index(tmp_path: Path):
    np.arange(9).astype("<u2").tofile(tmp_path / "part-0.npy")
    assert "part-0.npy is no index of token ids; name an .idx file beside its .bin" in refusal(tmp_path / "part-0.npy")
    assert "is a folder without *.idx files" in refusal(tmp_path)

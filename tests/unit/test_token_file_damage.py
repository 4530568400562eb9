"""Law: damaged token files, and files of another tokenizer, are one sentence; the same command makes them again."""

import fcntl
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.unit.token_file_cases import TEXTS, made, megatron, opened, refusal, small_shards
from trainer.commands import tokenize_text
from trainer.config.errors import ConfigError
from trainer.data import DataSettings
from trainer.data.sources.registry import files_of, source_of
from trainer.data.token_files.shards import write_shard

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.about("trainer/data/token_files/byte_ranges.py")]


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
        ("crc", lambda content: content[:-4], "is damaged: its check sum differs from tokens.json"),
        ("bin", None, "shard-00000.bin cannot be read (No such file or directory)"),
        ("idx", None, "lacks shard-00000.idx"),
        ("json", None, "and no tokens.json in its folder names it; copy the whole folder again"),
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
    """Other shards stay. The manifest has the sums of indices; documents are compared when they are read."""
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
    output = capsys.readouterr().out
    assert "shard-00000 is damaged, and is made again\n" in output
    assert f"{tokens} has {len(before) // 3 - 1} of {len(before) // 3} shards already" in output
    assert {file.name: file.read_bytes() for file in tokens.iterdir()} == before


def test_a_file_that_shrinks_while_it_is_read_is_told_and_does_not_kill(lines: Path, tmp_path: Path):
    tokens = Path(made(lines, tmp_path / "tokens"))
    source = opened(tokens)
    with open(tokens / "shard-00000.bin", "r+b") as file:
        file.truncate(4)
    with pytest.raises(ConfigError, match=r"is shorter than when the run began to read it \(byte"):
        source[len(TEXTS) - 1]


@pytest.mark.parametrize("kind", ["of lct tokenize", "pair"])
def test_all_ids_count_in_the_hash_of_the_content(lines: Path, tmp_path: Path, kind: str):
    """An id in the middle of a file counts, although the file's size and ends stay."""

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

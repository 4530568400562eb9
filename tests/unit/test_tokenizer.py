"""Laws of the tokenizer: nothing is lost, specials stay apart, endless runs are harmless, bad files are refused."""

import base64
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lct_tools.tokenizer import byte_of_char, train
from trainer.commands.main import main
from trainer.config.errors import ConfigError
from trainer.data.sources.registry import DataSettings, all_documents
from trainer.data.tokenizers import tiktoken_format as module
from trainer.data.tokenizers.tiktoken_format import (
    MAX_RUN,
    NUM_SPECIAL_TOKENS,
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    split_long_runs,
)
from trainer.data.tokenizers.tokenizer import Tokenizer, default_tokenizer_path, open_tokenizer, vocab_size_of

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer()


@given(UNICODE)
def test_decoding_gives_back_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(UNICODE, st.booleans(), st.booleans())
def test_bos_and_eos_stand_around_the_same_tokens(tokenizer, text, bos, eos):
    ids = tokenizer.encode_to_numpy(text, bos=bos, eos=eos)
    assert ids.dtype == np.int64
    expected = [tokenizer.bos_id] * bos + tokenizer.encode(text) + [tokenizer.eos_id] * eos
    assert ids.tolist() == expected == tokenizer.encode(text, bos=bos, eos=eos)


def test_the_shipped_file_has_4096_ranks_and_llamas_specials(tokenizer):
    assert vocab_size_of(default_tokenizer_path()) == tokenizer.vocab_size == 4096 + NUM_SPECIAL_TOKENS == 4352
    assert (tokenizer.bos_id, tokenizer.eos_id) == (4096, 4097)
    assert len(set(SPECIAL_TOKENS)) == NUM_SPECIAL_TOKENS == 256


def test_128000_ranks_give_the_ids_of_llama_3(tmp_path):
    path = tmp_path / "tokenizer.model"
    tokens = [bytes([i]) for i in range(256)] + [b"%06d" % i for i in range(128_000 - 256)]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    tokenizer = open_tokenizer(str(path))
    assert vocab_size_of(str(path)) == tokenizer.vocab_size == 128_256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (128_000, 128_001)
    names = {128_006: "<|start_header_id|>", 128_009: "<|eot_id|>", 128_255: "<|reserved_special_token_247|>"}
    assert {i: tokenizer.decode([i]) for i in names} == names


@given(st.lists(st.sampled_from([*SPECIAL_TOKENS[:12], "a", " ", "<|"])))
def test_special_tokens_in_text_are_ordinary_text(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert all(i < 4096 for i in ids)
    assert tokenizer.decode(ids) == text


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("a\ud800b" + "c" * MAX_RUN)) == "a\ufffdb" + "c" * MAX_RUN


@pytest.mark.parametrize("unit", ["a", " ", "=", "\n", "ab", "7", "\u4e2d", "\U0001f600", "\u3000", " \t"])
def test_a_million_characters_without_a_break_take_no_time_and_lose_nothing(tokenizer, unit):
    text = unit * (1_000_000 // len(unit))
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - start < 10
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([" ", "a", "\u3000", "\u3001", "\U0001f600", "\x1f"]), st.integers(1, 25))))
def test_pieces_join_to_the_text_and_only_long_runs_are_cut(runs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_RUN", 10)
        text = "".join(char * n for char, n in runs)
        pieces = list(split_long_runs(text))
    assert "".join(pieces) == text
    blank = [char in " \u3000" for char in text]
    lengths = []  # run that each character belongs to
    for i, b in enumerate(blank):
        lengths.append(lengths[-1] + 1 if i and blank[i - 1] == b else 1)
    cuts = np.cumsum([len(piece) for piece in pieces])[:-1]
    # A cut stands exactly after each 10 characters of a run that continues.
    expected = [i for i in range(1, len(text)) if blank[i - 1] == blank[i] and lengths[i - 1] % 10 == 0]
    assert cuts.tolist() == expected


def test_tiktoken_gives_what_the_trainer_of_the_ranks_gives():
    """Merging by rank (tiktoken) equals merging by the learned list (`tokenizers`) on real text."""
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Reference

    sample = list(all_documents(DataSettings("python_stdlib")))[::12]
    reference = Reference(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    reference.train_from_iterator(
        sample, trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    )
    import tiktoken

    tokens = train(sample, 4096)
    as_byte = byte_of_char()
    expected_tokens = sorted(reference.get_vocab(), key=reference.get_vocab().__getitem__)
    assert tokens == [bytes(as_byte[char] for char in token) for token in expected_tokens]
    ours = tiktoken.Encoding(
        "sample", pat_str=SPLIT_PATTERN, mergeable_ranks={token: i for i, token in enumerate(tokens)}, special_tokens={}
    )
    for text in [*sample, "naïve Ünïcode 中文 \U0001f600 1234567", "  \t\n x"]:
        assert ours.encode_ordinary(text) == reference.encode(text, add_special_tokens=False).ids


def test_training_is_deterministic_and_its_file_is_used(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat; the rat ate the cat's hat\n" * 20 + "x" * (MAX_RUN + 5))
    outputs = [tmp_path / "a" / "one.tiktoken", tmp_path / "two.tiktoken"]
    for output in outputs:
        options = ["--dataset", "text", "--path", str(text), "--vocab-size", "280", "--output", str(output)]
        assert main(["tokenizer", "train", *options]) == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert "280 tokens from 1 documents" in capsys.readouterr().out
    tokenizer = open_tokenizer(str(outputs[0]))
    assert tokenizer.vocab_size == 280 + 256
    assert len(tokenizer.encode("the cat")) < len("the cat")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "255"], "--vocab-size 255 must be at least 256"),
        (["--vocab-size", "5000"], "--vocab-size 5000 needs more text: this gives"),
        (["--dataset", "txet"], "did you mean 'text'?"),
    ],
)
def test_training_refuses_in_one_sentence(tmp_path, capsys, options, message):
    text = tmp_path / "text.txt"
    text.write_text("abc abd")
    output = tmp_path / "out"
    command = ["tokenizer", "train", "--dataset", "text", "--path", str(text), "--output", str(output)]
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def _lines(n: int) -> list[bytes]:
    return [base64.b64encode(bytes([i])) + b" %d" % i for i in range(n)]


BAD_FILES = {
    "bytes of no format": (bytes(range(256)) * 3, "is no tokenizer of tiktoken's format"),
    "rank": (b"\n".join([*_lines(256), b"YWE= x"]), "(line 257 must be"),
    "gap": (b"\n".join([*_lines(256), b"YWE= 300"]), "must number its tokens 0, 1, 2, ... without a gap"),
    "twice": (b"\n".join([*_lines(256), b"YWE= 7"]), "must number its tokens 0, 1, 2, ... without a gap"),
    "bytes": (b"\n".join(_lines(250)), "lacks 6 of the 256 single-byte tokens"),
    "empty": (b"", "lacks 256 of the 256 single-byte tokens"),
}


@pytest.mark.parametrize("use", [vocab_size_of, open_tokenizer])
@pytest.mark.parametrize("case", BAD_FILES)
def test_a_malformed_file_is_refused_in_one_sentence(tmp_path, case, use):
    content, message = BAD_FILES[case]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        use(str(path))
    _one_sentence(error.value, message)


@pytest.mark.parametrize("use", [vocab_size_of, open_tokenizer])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "does not exist"),
        (".", "is a folder without tokenizer.json, original/tokenizer.model and tokenizer.model; get"),
    ],
)
def test_a_missing_file_is_refused_in_one_sentence(tmp_path, name, message, use):
    with pytest.raises(ConfigError) as error:
        use(str(tmp_path / name))
    _one_sentence(error.value, message)


def _one_sentence(error: ConfigError, message: str) -> None:
    text = str(error)
    assert text.startswith("model.tokenizer_path = ")
    assert message in text
    for way_out in (
        "`lct get ORG/NAME --tokenizer-only`",
        "`lct tokenizer train`",
        "leave model.tokenizer_path out",
    ):
        assert way_out in text
    assert "\n" not in text
    assert error.__cause__ is None


DOWNLOAD = """
import sys
import huggingface_hub
from huggingface_hub import errors
from trainer.commands.main import main
error = {error}
def refuse(**kwargs):
    raise error
huggingface_hub.hf_hub_download = refuse
sys.exit(main(["get", "some/model", "--tokenizer-only", "--folder", "nowhere"]))
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("errors.LocalEntryNotFoundError('no connection')", "the Hugging Face hub cannot be reached (no connection)"),
        ("ConnectionError('name unknown')", "the Hugging Face hub cannot be reached (name unknown)"),
        ("errors.GatedRepoError.__new__(errors.GatedRepoError)", "is gated for this account; accept its licence"),
        ("errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)", "does not exist or is private"),
        ("errors.HFValidationError('bad')", "is no name of a repository"),
    ],
)
def test_the_download_says_what_is_wrong_in_one_sentence(error, message):
    result = subprocess.run(
        [sys.executable, "-c", DOWNLOAD.format(error=error)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


HUB = """
import sys
import huggingface_hub
from huggingface_hub import errors
from trainer.commands.main import main
there = {there}
def fetch(*, repo_id, filename, local_dir, token):
    print("asked for", filename)
    if filename in there:
        return local_dir + "/" + filename
    raise errors.RemoteEntryNotFoundError.__new__(errors.RemoteEntryNotFoundError)
huggingface_hub.hf_hub_download = fetch
sys.exit(main(["get", "some/model", "--tokenizer-only", "--folder", "it"]))
"""


@pytest.mark.parametrize(
    ("there", "asked", "path"),
    [
        (["original/tokenizer.model"], ["original/tokenizer.model"], "it/original/tokenizer.model"),
        (
            ["tokenizer.json", "tokenizer_config.json"],
            ["original/tokenizer.model", "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
            "it/tokenizer.json",
        ),
        ([], ["original/tokenizer.model", "tokenizer.json"], None),
    ],
)
def test_the_download_takes_the_format_that_there_is(there, asked, path):
    result = subprocess.run([sys.executable, "-c", HUB.format(there=there)], capture_output=True, text=True, timeout=60)
    assert re.findall(r"asked for (\S+)", result.stdout) == asked
    if path is None:
        assert result.returncode == 2
        assert "some/model has neither original/tokenizer.model nor tokenizer.json" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert f"next: lct train --model.tokenizer_path {path}" in result.stdout

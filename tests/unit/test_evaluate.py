"""Laws of `lct evaluate` that need no model: its prompts, its documents, its options and its files."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from lct_inference.evaluate import tables, write
from lct_inference.evaluation_defaults import edges_of
from lct_inference.long_prompts import NeedlePrompt, long_documents, needle_prompts
from trainer.commands.main import main as lct
from trainer.config.errors import ConfigError
from trainer.data.packing import IGNORE_INDEX
from trainer.data.tokenizers.tokenizer import Encoded, Tokenizer, open_tokenizer

DEPTHS = (0.0, 50.0, 100.0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer()


def answer_of(prompt: NeedlePrompt) -> list[int]:
    labels = prompt.sequence.labels
    return labels[labels != IGNORE_INDEX].tolist()


def places(prompt: NeedlePrompt) -> list[int]:
    """Where the answer stands in the tokens."""
    tokens, answer = prompt.sequence.tokens.tolist(), answer_of(prompt)
    return [i for i in range(len(tokens)) if tokens[i : i + len(answer)] == answer]


@pytest.mark.parametrize("length", [100, 257, 1000])
def test_a_needle_stands_once_at_its_depth_and_is_asked_for_at_the_end(tokenizer: Tokenizer, length: int) -> None:
    prompts = needle_prompts(tokenizer, length, DEPTHS, 3, seed=0)
    assert [prompt.depth for prompt in prompts] == 3 * list(DEPTHS)
    for prompt in prompts:
        sequence, answer = prompt.sequence, answer_of(prompt)
        assert len(sequence.tokens) == len(sequence.labels) == length
        assert prompt.answer_tokens == len(answer) > 1
        assert (sequence.labels[: -len(answer)] == IGNORE_INDEX).all()
        (place,) = places(prompt)
        assert place / length == pytest.approx(prompt.depth / 100, abs=50 / length)
        number, text = tokenizer.decode(answer), tokenizer.decode(sequence.tokens.tolist())
        said, asked = text.split(" is" + number + ".")
        assert number[1:].isdecimal()
        assert len(number) == 8
        city = said.rsplit(" ", 1)[1]
        question = f" What is the magic number of {city}? The magic number of {city} is"
        prefix = tokenizer.decode(answer[:-1])  # the answer without its last token, as true prefix
        assert asked.endswith(question + prefix)
        assert not any(c.isdecimal() for c in said + asked.removesuffix(prefix))


def test_prompts_of_a_sample_differ_in_the_place_alone(tokenizer: Tokenizer) -> None:
    prompts = needle_prompts(tokenizer, 400, DEPTHS, 2, seed=3)
    assert len({tuple(prompt.sequence.tokens) for prompt in prompts}) == 6
    for sample in (prompts[:3], prompts[3:]):
        assert len({tuple(sorted(prompt.sequence.tokens)) for prompt in sample}) == 1
        assert len({tuple(answer_of(prompt)) for prompt in sample}) == 1
    again = needle_prompts(tokenizer, 400, DEPTHS, 2, seed=3)
    assert all(np.array_equal(a.sequence.tokens, b.sequence.tokens) for a, b in zip(prompts, again, strict=True))
    other = needle_prompts(tokenizer, 400, DEPTHS, 1, seed=4)
    assert answer_of(other[0]) not in (answer_of(prompts[0]), answer_of(prompts[3]))


def test_a_length_without_room_is_one_sentence(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"--lengths 30 has no room .* use at least [0-9]+$") as refused:
        needle_prompts(tokenizer, 30, DEPTHS, 1, seed=0)
    least = int(str(refused.value).rsplit(" ", 1)[1])
    assert len(needle_prompts(tokenizer, least, DEPTHS, 20, seed=0)[0].sequence.tokens) == least


def test_documents_begin_sequences_and_short_ones_are_left_out(tokenizer: Tokenizer) -> None:
    documents = ["short", "one two three four " * 9, "", "five six seven " * 20, "eight nine " * 30]
    encoded = [Encoded(np.array(tokenizer.encode(text, bos=bool(text), eos=bool(text)))) for text in documents]
    sequences = list(long_documents(encoded, 30, 2))
    assert [sequence.tokens.tolist() for sequence in sequences] == [
        tokenizer.encode(documents[i], bos=True)[:30] for i in (1, 3)
    ]
    for sequence in sequences:
        assert np.array_equal(sequence.labels[:-1], sequence.tokens[1:])
        assert sequence.labels[-1] != IGNORE_INDEX
    exact = len(tokenizer.encode(documents[1], bos=True, eos=True))
    assert len(list(long_documents(encoded[1:2], exact - 1, 9))) == 1
    with pytest.raises(ConfigError, match=rf"--seq-len {exact} tokens \(the longest has {exact}\)"):
        list(long_documents(encoded[1:2], exact, 9))


def test_buckets_double() -> None:
    assert edges_of(131072, None) == (0, *(1024 * 2**i for i in range(7)), 131072)
    assert edges_of(10000, None) == (0, 1024, 2048, 4096, 8192, 10000)
    assert edges_of(64, None) == (0, 8, 16, 32, 64)
    assert edges_of(1, None) == (0, 1)
    assert edges_of(10, [3, 7]) == (0, 3, 7, 10)
    assert edges_of(10, [3, 10]) == (0, 3, 10)
    for wrong in ([0, 3], [3, 3], [7, 3], [11]):
        with pytest.raises(ConfigError, match="must rise from 1 or more to 10 or less"):
            edges_of(10, wrong)


FINDINGS = {
    "settings": {"seq_len": 8},
    "positions": [
        {"first": 0, "last": 4, "tokens": 40, "loss": 2.0, "perplexity": math.exp(2.0)},
        {"first": 4, "last": 8, "tokens": 40, "loss": 1000.0, "perplexity": None},
    ],
    "needle": [
        {"length": n, "depth": depth, "prompts": 4, "accuracy": depth / 100, "log_probability": -n / 100}
        for n in (64, 128)
        for depth in (0.0, 50.0, 100.0)
    ],
}


def test_the_tables_and_the_file_have_the_same_numbers(tmp_path: Path) -> None:
    text = tables(FINDINGS)
    assert "0 to 3" in text
    assert "7.39" in text
    assert text.splitlines()[-1].split() == ["128", "0%", "-1.28", "50%", "-1.28", "100%", "-1.28"]
    file = tmp_path / "new" / "folder" / "evaluation.json"
    assert write(FINDINGS, file.parent) == str(file)
    assert json.loads(file.read_text()) == FINDINGS


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output = '.*file' cannot be written"):
        write(FINDINGS, tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "holds no run: .*config.toml is missing; .* or a Hugging Face folder"),
        (["--seq-len", "0"], "--seq-len: 0 must be at least 1"),
        (["--depths", "0", "101"], "--depths: 101 must be at least 0 and at most 100"),
        (["--samples", "0"], "--samples: 0 must be at least 1"),
        (["--sample", "2"], "--sample is no setting"),
        (["--training.steps", "3"], "--training.steps is no setting of lct evaluate; it takes the settings of "),
        (["--no-training.enable_cpu_offload"], "--no-training.enable_cpu_offload is no setting"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert lct(["evaluate", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("error: ")
    assert re.search(said, error)

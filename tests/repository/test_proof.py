"""The proof of long context as one command, on a tiny model: losses on four ranks and on one, answers, its files."""

import json
from pathlib import Path
from random import Random

import pytest

from scripts import proof, proof_data
from scripts.proof import TINY, main
from trainer.data.evaluation import needle_prompts
from trainer.data.tokenizers.tokenizer import Tokenizer, open_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    proof_data.write_tokenizer(folder)
    return open_tokenizer(str(folder))


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory, warm_programs: None) -> Path:
    folder = tmp_path_factory.mktemp("proof")
    arguments = ["--tiny", "--output", str(folder / "runs"), "--json", str(folder / "numbers.json")]
    assert main([*arguments, "--picture", str(folder / "picture.svg")]) == 0
    return folder


def test_four_ranks_have_the_losses_of_one(proved: Path) -> None:
    numbers = json.loads((proved / "numbers.json").read_text())
    assert len(numbers["long_losses"]) == TINY.long_steps
    assert len(numbers["one_rank_losses"]) == TINY.one_rank_steps
    assert numbers["one_rank_losses"] == pytest.approx(numbers["long_losses"][: TINY.one_rank_steps], rel=1e-5)
    assert numbers["largest_relative_difference"] <= 1e-5


def test_transformers_gives_the_same_answers(proved: Path) -> None:
    answers = json.loads((proved / "numbers.json").read_text())["answers"]
    assert [row["length"] for row in answers] == TINY.lengths
    for row in answers:
        assert row["lct"] == row["transformers"] != ""


def test_needles_are_sought_at_all_lengths_and_depths(proved: Path) -> None:
    numbers = json.loads((proved / "numbers.json").read_text())
    cells = {(length, depth) for length in TINY.lengths for depth in proof.DEPTHS}
    for name in ("before", "yarn_untrained", "after"):
        assert {(cell["length"], cell["depth"]) for cell in numbers[name]} == cells
    untrained, before = ([cell["log_probability"] for cell in numbers[name]] for name in ("yarn_untrained", "before"))
    assert untrained != before  # the scaling reaches the model
    assert (proved / "picture.svg").stat().st_size > 10_000


def test_the_page_has_the_numbers_of_the_file() -> None:
    root = Path(__file__).resolve().parents[2]
    numbers = json.loads((root / "docs" / "measurements" / "proof.json").read_text())
    page = " ".join((root / "docs" / "proof.md").read_text().split())
    samples = numbers["size"]["samples"]
    assert f"of {samples * len(proof.DEPTHS)} |" in page
    for name in ("before", "yarn_untrained", "after"):
        lengths = sorted({cell["length"] for cell in numbers[name]})
        right = [sum(cell["accuracy"] for cell in numbers[name] if cell["length"] == n) * samples for n in lengths]
        assert f"| {' | '.join(f'{number:.0f}' for number in right)} |" in page
    assert f"| {' | '.join('{right} of {asked}'.format(**row) for row in numbers['facts'])} |" in page
    assert f"is {numbers['largest_relative_difference']:.1e}".replace("e-0", "e-") in page
    assert all(row["lct"] == row["transformers"] == row["right"] for row in numbers["answers"])


def test_a_part_that_is_done_is_not_done_again(proved: Path) -> None:
    again = proof.Proof(TINY, proved / "runs", lambda text: None)
    assert again.part("export", lambda: pytest.fail("done again"))["answers"]


def test_losses_that_differ_are_a_failure(proved: Path) -> None:
    file = proved / "runs" / "losses of one rank.json"
    text = file.read_text()
    done = json.loads(text)
    try:
        file.write_text(json.dumps(done | {"found": [loss * (1 + 2e-5) for loss in done["found"]]}))
        assert main(["--tiny", "--output", str(proved / "runs")]) == 1
    finally:
        file.write_text(text)


def test_an_answer_has_the_tokens_that_its_fact_has(tokenizer: Tokenizer) -> None:
    (prompt,) = needle_prompts(tokenizer, 256, [50], 1, 0)
    labels = prompt.sequence.labels[-prompt.answer_tokens :].tolist()
    tokens = prompt.sequence.tokens.tolist()
    places = [i for i in range(len(tokens) - len(labels)) if tokens[i : i + len(labels)] == labels]
    assert len(labels) == proof.ANSWER_TOKENS
    assert places


def test_each_question_of_a_document_has_its_answer_before_it() -> None:
    messages = proof_data.document(Random(0), 9000, 30)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(answers) == 30 * (1 + 9000 // 8192)
    for i in answers:
        before = "".join(message["content"] for message in messages[:i])
        name = before.rsplit(" of ", 1)[1].removesuffix(" is")
        assert f" of {name} is{messages[i]['content']}." in before

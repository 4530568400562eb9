"""The proof of long context as one command, on a tiny model: equal losses, equal texts, and the numbers of its page."""

import json
from pathlib import Path

import pytest

from scripts import proof, proof_text
from scripts.proof import TINY, main

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("before", "yarn", "after")


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory, warm_programs: None) -> Path:
    folder = tmp_path_factory.mktemp("proof")
    arguments = ["--tiny", "--output", str(folder / "runs"), "--json", str(folder / "numbers.json")]
    assert main([*arguments, "--picture", str(folder / "picture.svg")]) == 0
    return folder


def test_any_number_of_ranks_has_the_losses_of_one(proved: Path) -> None:
    numbers = json.loads((proved / "numbers.json").read_text())
    losses = numbers["equal_losses"]
    assert [len(losses[ranks]) for ranks in ("4", "2", "1")] == [TINY.equal_steps] * 3
    assert losses["4"] == pytest.approx(losses["1"], rel=1e-5)
    assert losses["2"] == pytest.approx(losses["1"], rel=1e-5)
    assert len(numbers["long_losses"]) == TINY.long_steps
    assert numbers["long_losses"][0] == pytest.approx(numbers["one_rank_losses"][0], rel=1e-3)


def test_transformers_writes_the_same_text(proved: Path) -> None:
    texts = json.loads((proved / "numbers.json").read_text())["texts"]
    assert texts["lct"] == texts["transformers"] != ""


def test_each_model_is_measured_at_all_positions_and_lengths(proved: Path) -> None:
    numbers = json.loads((proved / "numbers.json").read_text())
    cells = {(length, depth) for length in TINY.needle_lengths for depth in proof.DEPTHS}
    for name in MODELS:
        assert {(cell["length"], cell["depth"]) for cell in numbers[name]["needle"]} == cells
        assert [row["last"] for row in numbers[name]["positions"]] == TINY.buckets
        assert all(row["tokens"] > 0 for row in numbers[name]["positions"])
    before, yarn, after = ([row["loss"] for row in numbers[name]["positions"]] for name in MODELS)
    assert yarn != before  # the scaling reaches the model
    assert after != yarn  # and so does the training
    assert (proved / "picture.svg").stat().st_size > 10_000


def test_the_page_has_the_numbers_of_the_file() -> None:
    numbers = json.loads((ROOT / "docs" / "measurements" / "proof.json").read_text())
    page = " ".join((ROOT / "docs" / "proof.md").read_text().split())
    for rows in zip(*(numbers[name]["positions"] for name in MODELS), strict=True):
        perplexities = " | ".join(f"{row['perplexity']:.2f}" for row in rows)
        assert f"| {rows[0]['first']:,} to {rows[0]['last'] - 1:,} | {perplexities} |" in page
    for length in numbers["size"]["needle_lengths"]:
        cells = [[cell for cell in numbers[name]["needle"] if cell["length"] == length] for name in MODELS]
        right = " | ".join(f"{sum(cell['accuracy'] for cell in row):.0f}" for row in cells)
        assert f"| {length:,} | {right} |" in page
    for key in ("equal_difference", "long_difference"):
        assert f"{numbers[key]:.1e}".replace("e-0", "e-") in page
    assert numbers["texts"]["lct"] == numbers["texts"]["transformers"]
    minutes = sum(part["seconds"] for part in numbers["took"].values()) / 60
    assert f"{minutes:.0f} minutes" in page


def test_a_part_that_is_done_is_not_done_again(proved: Path) -> None:
    runs = proved / "runs"
    again = proof.Proof(TINY, runs, runs / "model", lambda text: None)
    assert again.part("export", lambda: pytest.fail("done again"))["lct"]


@pytest.mark.parametrize(("part", "factor"), [("equal, ranks 2", 1 + 2e-5), ("long, ranks 1", 1 + 2e-3)])
def test_losses_that_differ_are_a_failure(proved: Path, part: str, factor: float) -> None:
    file = proved / "runs" / f"{part}.json"
    text = file.read_text()
    done = json.loads(text)
    try:
        file.write_text(json.dumps(done | {"result": [loss * factor for loss in done["result"]]}))
        assert main(["--tiny", "--output", str(proved / "runs")]) == 1
    finally:
        file.write_text(text)


def test_a_text_that_differs_is_a_failure(proved: Path) -> None:
    file = proved / "runs" / "export.json"
    text = file.read_text()
    done = json.loads(text)
    try:
        file.write_text(json.dumps(done | {"result": done["result"] | {"lct": "another text"}}))
        assert main(["--tiny", "--output", str(proved / "runs")]) == 1
    finally:
        file.write_text(text)


def test_nothing_that_is_measured_is_learned(tmp_path: Path) -> None:
    characters = proof_text.write_text(tmp_path, 2, 32768, 16384)
    measured = [file.read_text() for file in sorted((tmp_path / "measured").iterdir())]
    learned = [file.read_text() for file in sorted((tmp_path / "learned").iterdir())]
    assert len(measured) == 2
    assert len(learned) >= 3
    assert characters == {"measured": sum(map(len, measured)), "learned": sum(map(len, learned))}
    for text in measured:
        middle = text[len(text) // 2 :][:200]
        assert not any(middle in source for source in learned)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--tiny", "--model", str(tmp_path / "nothere"), "--output", str(tmp_path / "runs")])
    assert stopped.value.code == 2
    assert "nothere holds no config.json; name a folder of Hugging Face, or leave it out" in capsys.readouterr().err
    assert not (tmp_path / "nothere").exists()


def test_more_documents_than_the_documentation_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="more than the documentation has"):
        proof_text.write_text(tmp_path, 4, 32768, 16384)

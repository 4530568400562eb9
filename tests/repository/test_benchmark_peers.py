"""The benchmark against transformers, TRL and peft: all cases agree, differences are seen, the page is right."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from scripts.benchmarks.peers import differences, main, memory_sentence, row, sentence, table
from scripts.benchmarks.peers_data import conversations, labelled, order, preference_pairs
from scripts.benchmarks.peers_runs import CASES, DATA, LAYOUTS, ROOT, Setting, ours, peer
from scripts.differences import largest_difference
from scripts.tiny_model import END, write_tiny_model

STEPS = 2
LAYOUTS_OF = {"sft": "CP 2", "lora": "FSDP 2", "dpo": "1 rank"}
TOLERANCE = {"sft": 1e-6, "lora": 1e-6, "dpo": 1e-5}
"""A loss of preferences is a difference of two sums over an answer."""


def small_model(folder: Path) -> None:
    texts = [message["content"] for chat in conversations(DATA) for message in chat]
    write_tiny_model(folder, texts, positions=512)


@pytest.mark.parametrize("name", list(CASES))
def test_losses_and_gradient_norms_equal_the_peers(name: str, tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    options = [f"--steps={STEPS}", "--repeats=1", "--threads=2", f"--layouts={LAYOUTS_OF[name]}", f"--json={file}"]
    assert main(["--tiny", f"--cases={name}", *options]) == 0
    case = json.loads(file.read_text())["cases"][name]
    layouts = LAYOUTS_OF[name].split(",")
    assert (list(case["lct train"]), list(case["peers"])) == (layouts, list(CASES[name].peers))
    for each in (*case["lct train"].values(), *case["peers"].values()):
        assert len(each["losses"]) == len(each["norms"]) == STEPS
        assert 0 < each["tokens_per_second"] <= each["tokens_per_second_fastest"]
        assert 0.1 < each["peak_gib"] < 3
    assert 0 < case["predicted_gib"]["allocated"] < 0.1 < case["predicted_gib"]["process"] < 3
    assert len(case["differences"]) == len(layouts) * len(CASES[name].peers)
    assert all(each[key] < TOLERANCE[name] for each in case["differences"] for key in ("loss", "norm"))
    if name == "sft":
        transformers, as_it_is = (case["float64"][key] for key in ("transformers", "transformers as it is"))
        assert case["float64"]["lct train"] == pytest.approx(transformers, rel=1e-7)
        assert as_it_is["loss"] == pytest.approx(transformers["loss"], rel=1e-12)
        assert as_it_is["norm"] < 0.99 * transformers["norm"], "the pad token ends every message"


def test_other_conversations_would_be_seen(tmp_path: Path) -> None:
    model = tmp_path / "model"
    small_model(model)
    setting = Setting("sft", model, DATA, tmp_path, STEPS, 160, 2)
    trained = ours(setting, "1 rank")
    others = peer(setting, "transformers", [[0, 1, 2, 3]] * STEPS)
    (seen,) = differences({"1 rank": trained}, {"transformers": others})
    assert min(seen["loss"], seen["norm"]) > 100 * TOLERANCE["sft"]


def test_hand_made_labels_are_the_answer_and_its_end(tmp_path: Path) -> None:
    small_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = conversations(DATA)[0]
    learned = [label for label in labelled(tokenizer, chat)["labels"] if label != -100]
    assert tokenizer.decode(learned) == chat[-1]["content"] + END


def test_another_template_is_seen(tmp_path: Path) -> None:
    small_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    arguments = [f"--job.config_file={ROOT / 'train_configs' / 'sft.toml'}"]
    arguments += Setting("sft", tmp_path, DATA, tmp_path, 1, 160, 1).arguments("1 rank")
    (first,) = order(arguments, DATA, tokenizer, 1)
    assert len(set(first)) == len(first) > 1
    tokenizer.chat_template = tokenizer.chat_template.replace("|>\n", "|> ")
    with pytest.raises(ValueError, match="compare the templates"):
        order(arguments, DATA, tokenizer, 1)


def test_a_rejected_answer_is_another_answer() -> None:
    chats = conversations(DATA)
    pairs = preference_pairs(chats)
    assert len(pairs) == len(chats)
    assert all(pair["chosen"] != pair["rejected"] and pair["prompt"] for pair in pairs)


def test_speed_is_the_median_without_first_steps() -> None:
    run: dict[str, Any] = {"losses": [1.0] * 3, "norms": [1.0] * 3, "peak_gib": 1.0}
    slow = run | {"seconds": [90.0, 2.0, 2.0], "cpu": [9.0, 11.0, 14.0]}
    quick = slow | {"seconds": [90.0, 1.0, 0.5], "peak_gib": 2.0}
    values = row([slow, quick], [10, 10, 10])
    assert (values["tokens_per_second"], values["tokens_per_second_fastest"], values["peak_gib"]) == (7.5, 20.0, 2.0)
    assert values["tokens_per_cpu_second"] == 4.0
    assert largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)


@pytest.mark.parametrize("argv", ["", "model --tiny", "--tiny --cases=grpo", "--tiny --steps=1", "--tiny --layouts=TP"])
def test_bad_arguments_are_one_sentence(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("name MODEL or --tiny")
    assert error.count("\n") == 1


def test_the_documentation_has_the_numbers() -> None:
    content = json.loads((ROOT / "docs" / "measurements" / "peers.json").read_text())
    page = (ROOT / "docs" / "fine_tuning.md").read_text()
    assert list(content["cases"]) == list(CASES)
    assert all(list(case["lct train"]) == list(LAYOUTS) for case in content["cases"].values())
    assert table(content["cases"]) in page
    text = page.replace("\n", " ")
    assert sentence(content["cases"]["sft"]) in text
    assert memory_sentence(content["cases"]) in text
    for case in content["cases"].values():
        assert sum(case["predicted_gib"].values()) == pytest.approx(case["lct train"]["1 rank"]["peak_gib"], rel=0.2)

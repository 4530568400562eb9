"""Laws of pairs of answers: both sides are whole in one sequence, and what cannot be used is one sentence."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.chat_files import CHATML, chat_folder, write_lines
from tests.loading import batch_loader
from trainer.config.data import DPO
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data.job_data import open_text
from trainer.data.packing import IGNORE_INDEX, sample_of
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files.catalog import catalog_of, open_documents
from trainer.data.token_files.format import Catalog, TokenFiles
from trainer.data.tokenizers.tokenizer import Encoded, open_tokenizer
from trainer.job import ResolvedJob, resolve
from trainer.job.record import RankMemory
from trainer.job.summary import summary
from trainer.tasks.preferences import pair_losses, pairs_of, sums_of_documents

pytestmark = pytest.mark.about("trainer/job/preferences.py")


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PROMPT = [message("user", "the fox"), message("assistant", "three"), message("user", "adds")]
BOTH = [
    {"prompt": PROMPT, "chosen": [message("assistant", "two")], "rejected": [message("assistant", "five and")]},
    {"chosen": [*PROMPT, message("assistant", "two")], "rejected": [*PROMPT, message("assistant", "five and")]},
]
BOTH.append({"prompt": PROMPT, **BOTH[1]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("model"), CHATML)


def settings_of(path: Path, folder: Path, **options: bool) -> DataSettings:
    return DataSettings("preferences", str(path), str(folder), **options)


def sides(path: Path, folder: Path) -> list[tuple[str, list[str]]]:
    """Text and learned tokens of each side."""
    tokenizer = open_tokenizer(str(folder))
    documents = TokenFiles(Catalog.read(catalog_of(settings_of(path, folder))))
    return [
        (tokenizer.decode(x.ids.tolist()), [tokenizer.decode([i]) for i in x.ids[x.answers].tolist()])
        for x in (documents[i] for i in range(len(documents)))
    ]


@pytest.mark.parametrize("line", BOTH)
def test_answers_of_the_prompt_are_not_learned(tmp_path: Path, folder: Path, line: dict) -> None:
    """The prompt is explicit, or it is the common beginning of both sides, or both repeat it."""
    (chosen, first), (rejected, second) = sides(write_lines(tmp_path / "a.jsonl", [line]), folder)
    before = "<|head|>user\nthe fox<|end|>\n<|head|>assistant\nthree<|end|>\n<|head|>user\nadds<|end|>\n"
    assert (chosen, rejected) == tuple(f"{before}<|head|>assistant\n{x}<|end|>\n" for x in ("two", "five and"))
    assert ("".join(first), "".join(second)) == ("two<|end|>", "five and<|end|>")


def test_texts_are_messages_too(tmp_path: Path, folder: Path) -> None:
    lines = [{"prompt": "the fox", "chosen": "two", "rejected": "five"}]
    assert [x for x, _ in sides(write_lines(tmp_path / "a.jsonl", lines), folder)] == [
        f"<|head|>user\nthe fox<|end|>\n<|head|>assistant\n{x}<|end|>\n" for x in ("two", "five")
    ]


def test_a_text_that_both_sides_repeat_is_asked_once(tmp_path: Path, folder: Path) -> None:
    """Data sets such as ultrafeedback_binarized have the question as text, and again in both sides."""
    asked = [message("user", "the fox")]
    answers = [[*asked, message("assistant", text)] for text in ("two", "five")]
    lines = [{"prompt": "the fox", "chosen": answers[0], "rejected": answers[1]}]
    assert [x for x, _ in sides(write_lines(tmp_path / "a.jsonl", lines), folder)] == [
        f"<|head|>user\nthe fox<|end|>\n<|head|>assistant\n{x}<|end|>\n" for x in ("two", "five")
    ]


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_a_pair_is_two_documents_of_one_sequence(tmp_path: Path, folder: Path, packing: str) -> None:
    """Never cut: one that is too long is left out and counted, an equal number of times on any layout."""
    lines = [{"prompt": "x" * (i % 7), "chosen": "two " * (i % 5 + 1), "rejected": "five"} for i in range(1, 30)]
    lines += [{"prompt": "the fox " * 30, "chosen": "two", "rejected": "five"}]
    data = open_text(settings_of(write_lines(tmp_path / "a.jsonl", lines), folder), packing)
    assert data.items == 30
    how = {"seq_len": 96, "local_batch_size": 1, "data_streams": 2, "seed": 0, "dp_rank": 0, "dp_degree": 1}
    tokenizer, answers = open_tokenizer(str(folder)), []
    loader = batch_loader(data, **how)
    for batch in loader:
        if loader.epoch >= 2:
            break
        (number,), ids = pairs_of(batch).tolist(), batch["document_ids"][0]
        assert packing == "best_fit" or number == 1
        for document in range(2 * number):
            inside = ids == document
            assert batch["positions"][0, inside].tolist() == list(range(inside.sum()))
            labels = batch["labels"][0, inside]
            answer = tokenizer.decode(labels[labels != IGNORE_INDEX].tolist())
            assert ("five" in answer) == bool(document % 2)
            answers.append(answer)
        behind = ids >= 2 * number
        assert (batch["labels"][0, behind] == IGNORE_INDEX).all()
        assert behind.sum() == batch["padding"]
    assert 2 * 29 <= len(answers) <= 4 * 29
    assert data.conversations.left_out.number >= 1
    assert "pairs longer than a sequence" in data.conversations.left_out._kind


def test_the_last_token_of_a_side_has_no_label() -> None:
    """The other side may begin with an answer, if its prompt is empty."""
    pair = Encoded(np.arange(5), np.ones(5, dtype=bool), lengths=(2, 3))
    assert sample_of(pair).labels.tolist() == [1, IGNORE_INDEX, 3, 4, IGNORE_INDEX]


def test_a_bad_side_leaves_out_the_pair(tmp_path: Path, folder: Path) -> None:
    lines = [BOTH[0], {"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": "b", "rejected": " "}]
    path = write_lines(tmp_path / "a.jsonl", lines)
    pairs = open_documents(settings_of(path, folder, skips=True))
    assert [len(pairs[i].lengths) for i in range(3)] == [2, 0, 0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"chosen": "a", "rejected": "b"}, '"prompt" must be a string'),
        ({"prompt": "a", "chosen": "b"}, 'has no "chosen" and "rejected" of one kind'),
        ({"prompt": "a", "chosen": "b", "rejected": [message("assistant", "c")]}, 'no "chosen" and "rejected"'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same; leave the line out"),
        ({"chosen": PROMPT, "rejected": [*PROMPT, message("assistant", "c")]}, "the prompt alone is a side"),
        ([1], 'has no "chosen" and "rejected" of one kind'),
        ({"prompt": PROMPT, "chosen": [{"role": "model", "content": ""}], "rejected": [1]}, "must be one of 'system'"),
    ],
)
def test_what_is_no_pair_is_one_sentence(tmp_path: Path, folder: Path, line: object, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(ConfigError) as error:
        job(folder, path)
    assert said in str(error.value)
    assert str(error.value).startswith(f"{path}, line 1")
    assert "\n" not in str(error.value)


# ---- jobs


def job(folder: Path, path: Path, *arguments: str, ranks: int = 1) -> ResolvedJob:
    settings = [
        f"--training.dataset_path={path}",
        f"--model.tokenizer_path={folder}",
        f"--job.dump_folder={folder}/out",
    ]
    initial = ["--checkpoint.initial_load_path=somewhere"]
    config = parse_command_line(["--training.dataset=preferences", *settings, *initial, *arguments]).config
    return resolve(config, ranks, "cpu", missing=[])


@pytest.mark.parametrize(
    ("arguments", "ranks", "said"),
    [
        (["--training.sequence_chunks=2"], 1, "training.sequence_chunks is not handled with training.dataset = 'pref"),
        (["--training.balance=step"], 2, "training.balance = 'step' is not handled with training.dataset = 'pref"),
        (
            ["--validation.enable", "--validation.dataset=python_stdlib"],
            1,
            "validation.enable is not handled with training.dataset = 'preferences'",
        ),
        (
            ["--dpo.reference=adapters"],
            1,
            "the model without its adapters, and lora.rank = 0 has none; use 'copy'",
        ),
        (["--training.packing=concatenate"], 1, "would cut conversations of training.dataset = 'preferences'"),
        (["--dpo.label_smoothing=0.5"], 1, "dpo.label_smoothing = 0.5 must be in [0, 0.5)"),
        (["--dpo.beta=0"], 1, "dpo.beta = 0.0 must be above 0"),
    ],
)
def test_what_pairs_do_not_have_is_one_sentence(
    tmp_path: Path, folder: Path, arguments: list[str], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        job(folder, write_lines(tmp_path / "a.jsonl", BOTH), *arguments, ranks=ranks)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_summary_says_the_loss_and_a_copy_is_counted(tmp_path: Path, folder: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", BOTH)
    copied, adapted = (job(folder, path, *options) for options in ([], ["--lora.rank=2"]))
    assert "sigmoid of pairs (DPO), beta 0.1, from a frozen copy of the first weights" in summary(copied)
    assert "from the model without its adapters" in summary(adapted)
    weights = 4 * copied.model.n_params()
    assert copied.task.memory(copied).weights > 1.9 * weights
    assert adapted.task.memory(adapted).weights < 1.1 * weights
    assert copied.config.masks_documents


def test_the_largest_pipeline_rank_is_the_largest_one_with_the_copy(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = RankMemory(10, 0, 10, 0), RankMemory(15, 0, 0, 0)
    monkeypatch.setattr("trainer.job.language.memory_of_stage", lambda _, rank: stages[rank])
    path = write_lines(tmp_path / "a.jsonl", BOTH)
    copied, adapted = (job(folder, path, *options) for options in ([], ["--lora.rank=2"]))
    in_two = [replace(each, degrees=replace(each.degrees, pp=2)) for each in (copied, adapted)]
    assert [each.task.memory(each) for each in in_two] == [RankMemory(20, 0, 10, 0), stages[0]]
    stages = RankMemory(10, 0, 10, 0), RankMemory(18, 0, 0, 0)
    assert [each.task.memory(each) for each in in_two] == [RankMemory(36, 0, 0, 0), stages[0]]


# ---- losses


def test_sums_are_of_documents_and_padding_adds_nothing() -> None:
    per_token = torch.arange(16.0, dtype=torch.float64).view(2, 8, 1)
    documents = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 1, 2, 2, 2, 2]])
    per_token[1, 4:] = 0
    sums = sums_of_documents(per_token, documents, 4)[..., 0]
    assert sums.tolist() == [[1, 5, 9, 13], [8, 9 + 10 + 11, 0, 0]]


def test_label_smoothing_is_a_mean_over_both_orders() -> None:
    sums = torch.tensor([[[[2.0, 3], [-1.0, 4]]]], dtype=torch.float64)
    (right, _, _), (wrong, _, _) = (pair_losses(x, DPO(beta=0.5)) for x in (sums, sums.flip(2)))
    mixed, rewards, exists = pair_losses(sums, DPO(beta=0.5, label_smoothing=0.2))
    torch.testing.assert_close(mixed, 0.8 * right + 0.2 * wrong, rtol=1e-12, atol=0)
    assert rewards.tolist() == [[[1.0, -0.5]]]
    assert exists.tolist() == [[1.0]]
    assert right.item() == pytest.approx(torch.log1p(torch.tensor(-1.5).exp()).item())


def test_a_side_without_a_token_is_no_pair() -> None:
    sums = torch.tensor([[[[2.0, 3], [0.0, 0]]]], dtype=torch.float64)
    assert pair_losses(sums, DPO())[2].item() == 0


def test_batches_of_pairs_come_without_an_end(tmp_path: Path, folder: Path) -> None:
    data = open_text(settings_of(write_lines(tmp_path / "a.jsonl", BOTH), folder))
    how = {"seq_len": 128, "local_batch_size": 2, "data_streams": 1, "seed": 0, "dp_rank": 0, "dp_degree": 1}
    assert all(pairs_of(batch).min() >= 1 for batch in islice(iter(batch_loader(data, **how)), 5))

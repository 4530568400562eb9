"""Law: training on conversations equals one process on every layout, and packed conversations do not see each other."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.chat_files import CHATML, chat_folder, conversations, write_lines
from tests.distributed import harness
from tests.distributed.harness import BASE, Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.components.loss import token_losses
from trainer.components.step_metrics import ValidationResult
from trainer.config.loader import parse_command_line
from trainer.data.packing import IGNORE_INDEX, sample_of
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.trainer import Trainer

SEQ_LEN = 128


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder; many short conversations; and long questions with answers of one token."""
    folder = chat_folder(tmp_path_factory.mktemp("chat"), CHATML)
    write_lines(folder / "many.jsonl", conversations(60, longest=4))
    questions = [{"prompt": "the quick fox adds five " * 14 + f"{i}", "answer": "five"} for i in range(16)]
    write_lines(folder / "questions.jsonl", questions)
    write_lines(folder / "short.jsonl", [{"prompt": f"{i}", "answer": "five"} for i in range(600)])
    return folder


def chat(files: Path, data: str = "many") -> list[str]:
    """Arguments of a job on conversations."""
    return [
        "--training.dtype=float64",
        "--training.dataset=chat",
        f"--training.dataset_path={files}/{data}.jsonl",
        f"--model.tokenizer_path={files}",
        f"--training.seq_len={SEQ_LEN}",
        "--training.data_streams=4",
    ]


CONTIGUOUS = "--parallelism.context_parallel_load_balancer=contiguous"
AUTO = "--parallelism.context_parallel_method=auto"
references: dict[str, Record] = {}


@pytest.mark.parametrize(
    ("layout", "data", "settings"),
    [
        ("fsdp2+cp2", "questions", [CONTIGUOUS]),
        *slow(("fsdp2+cp2", "many", [AUTO]), ("fsdp2+tp2", "many", []), ("cp2+pp2", "questions", [CONTIGUOUS])),
    ],
)
def test_a_layout_trains_as_one_process(
    pool: WorkerPool, files: Path, layout: str, data: str, settings: list[str]
) -> None:
    """With `questions`, every sequence has its labels at the end: half of the context-parallel ranks have none."""
    world_size, arguments = LAYOUTS[layout]
    if data not in references:
        references[data] = pool.run(1, run_layout, chat(files, data))[0]
    got = pool.run(world_size, run_layout, [*chat(files, data), *arguments, *settings])
    assert_parity(got[0], references[data], 1e-10)


def labels_case(arguments: list[str]) -> list[list[int]]:
    with harness.trainer_of(arguments) as trainer:
        return trainer.data.take()[0]["labels"].tolist()


def test_the_first_half_of_a_question_has_no_label(pool: WorkerPool, files: Path) -> None:
    (rows,) = pool.run(1, labels_case, chat(files, "questions"))
    assert all(set(row[: SEQ_LEN // 2]) == {IGNORE_INDEX} for row in rows)
    assert all(set(row) != {IGNORE_INDEX} for row in rows)


@contextmanager
def trainer_of(arguments: list[str], folder: str) -> Iterator[Trainer]:
    process = Process.from_environment()
    config = parse_command_line([*BASE, *arguments, f"--job.dump_folder={folder}"]).config
    with process_group(process, config.comm):
        trainer = Trainer(resolve(config, process.world_size, process.device.type), process.device)
        yield trainer
        trainer.metrics.close()


def losses_case(arguments: list[str], alone: list[str], folder: str) -> tuple[float, int]:
    """Largest difference of a token's loss, packed and in a sequence by itself, and how many conversations."""
    with trainer_of(arguments, folder) as trainer, torch.no_grad():
        batch = trainer.data.take()[0]
        whole = {name: batch[name].clone() for name in ("tokens", "labels", "document_ids")}
        with trainer.task.batch_context(batch, trainer.model_parts) as share:
            part = trainer.model_parts[0]
            packed = trainer.task.losses(part, part(share.inputs, **share.arguments), share.targets)
    worst, number = 0.0, 0
    with trainer_of(alone, folder) as trainer, torch.no_grad():
        (model,) = trainer.model_parts
        for row in range(len(packed)):
            for document in range(int(whole["document_ids"][row, -1]) + 1):
                inside = whole["document_ids"][row] == document
                tokens, labels = whole["tokens"][row, inside][None], whole["labels"][row, inside][None]
                losses = token_losses(model.output(model(tokens)), labels)[0]
                worst = max(worst, (losses - packed[row].view(-1)[inside]).abs().max().item())
                number += bool((labels != IGNORE_INDEX).any())
    return worst, number


def test_packed_conversations_have_the_losses_of_each_alone(pool: WorkerPool, files: Path, tmp_path: Path) -> None:
    """Alone in plain causal attention, of another job with the same seed."""
    text = ["--training.dataset=text", f"--training.dataset_path={files}/many.jsonl", "--training.data_streams=1"]
    alone = [*chat(files), *text]
    ((worst, number),) = pool.run(1, losses_case, [*chat(files), "--training.local_batch_size=4"], alone, str(tmp_path))
    assert worst < 1e-10
    assert number > 4


# --- resumption and validation, through the whole program


def run_case(arguments: list[str], folder: str) -> list[dict]:
    """The lines of metrics of a run."""
    with trainer_of(arguments, folder) as trainer:
        trainer.train()
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [["many"], ["short", "--training.seq_len=256"]],
    ids=["less than 64 conversations wait", "more than 63 conversations wait"],
)
def test_a_run_resumes_with_other_ranks_on_the_same_data(
    pool: WorkerPool, files: Path, tmp_path: Path, data: list[str]
) -> None:
    arguments = [*chat(files, data[0]), *data[1:], "--checkpoint.enable"]
    arguments += ["--training.global_batch_size=4", "--lr_scheduler.total_steps=6"]
    (wanted,) = pool.run(1, run_case, [*arguments, "--training.steps=6"], str(tmp_path / "whole"))
    first, ranks = [*arguments, "--training.steps=3"], LAYOUTS["fsdp2"][1]
    pool.run(1, run_case, first, str(tmp_path / "run"))
    got, *_ = pool.run(2, run_case, [*arguments, *ranks, "--training.steps=6"], str(tmp_path / "run"))
    assert [line["step"] for line in got] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(got, wanted, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)


def validated_case(arguments: list[str], folder: str) -> tuple[ValidationResult, int]:
    """The result of one pass, and the number of labels of all conversations."""
    with trainer_of(arguments, folder) as trainer:
        source = trainer.validation._data.source
        labels = (sample_of(source[i]).labels[:SEQ_LEN] for i in range(len(source)))
        number = sum(int((some != IGNORE_INDEX).sum()) for some in labels)
        return trainer.validation.run(trainer.model_parts, trainer.pipeline), number


def test_validation_on_conversations_is_one_pass_on_every_layout(pool: WorkerPool, files: Path, tmp_path: Path) -> None:
    data = ["--validation.enable", f"--validation.dataset_path={files}/many.jsonl", "--validation.sequences=0"]
    arguments = [*chat(files, "questions"), *data]
    ((wanted, labels),) = pool.run(1, validated_case, arguments, str(tmp_path / "one"))
    assert wanted.tokens == labels > 100
    for got, _ in pool.run(4, validated_case, [*arguments, *LAYOUTS["fsdp2+cp2"][1]], str(tmp_path / "many")):
        assert got.tokens == wanted.tokens
        assert got.loss == pytest.approx(wanted.loss, rel=1e-12)

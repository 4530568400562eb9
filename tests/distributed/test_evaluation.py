"""Law: an evaluation finds the same on every layout, and its needle task measures what a model can see."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lct_inference.evaluate import checked, evaluate
from lct_inference.evaluation import Evaluation, Retrieved
from lct_inference.long_prompts import NeedlePrompt, long_documents, needle_prompts
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.hf_decoders import hf_model
from tests.hf_families import MODELS, hf_decoder, in_double
from tests.slow import slow
from trainer.commands.finished_run import loaded_model
from trainer.config.schema import JobConfig, Training
from trainer.data.loader import TextBatch
from trainer.data.packing import IGNORE_INDEX
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files.catalog import documents_in_order
from trainer.data.tokenizers.tokenizer import default_tokenizer_path, open_tokenizer
from trainer.families.decoder_args import TransformerArgs
from trainer.job import resolve
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.process_group import Process, process_group
from trainer.tasks.language import LanguageTask
from trainer.tasks.rank_batch import RankBatch

ROOT = Path(__file__).resolve().parents[2]
LLAMA = TransformerArgs(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_hidden_dim=96, vocab_size=4354, max_seq_len=64, norm_eps=1e-6
)
HYBRIDS = ("qwen3_next", "kimi_linear")
LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folders in float64, and documents in the same folder; seven documents are long enough."""
    path = tmp_path_factory.mktemp("evaluated")
    for name, args in (("hf", LLAMA), ("tied", replace(LLAMA, tie_embeddings=True))):
        model = hf_model("llama3", args)
        with torch.no_grad():
            for tensor, parameter in model.named_parameters():
                if "norm" not in tensor:
                    parameter.normal_(std=0.1)
        model.save_pretrained(path / name)
    for name in HYBRIDS:
        with in_double():
            hf_decoder(*MODELS[name]).save_pretrained(path / name)
    for name in ("hf", "tied", *HYBRIDS):
        shutil.copy(default_tokenizer_path(), path / name / "tokenizer.model")
    texts = [f"def f{i}(x):\n" + f"    y = x + {i}\n    print(y)\n" * (2 if i % 3 == 2 else 20 + i) for i in range(10)]
    (path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def options(folder: Path, *arguments: str, model: str = "hf") -> list[str]:
    data = ["--dataset", "jsonl", "--dataset-path", str(folder / "data.jsonl")]
    lengths = ["--seq-len", str(LENGTH), "--lengths", "100", "128", "--depths", "0", "60", "--samples", "1"]
    return [str(folder / model), *data, *lengths, *arguments]


def losses_case(argv: list[str], folder: str, fault: str = "") -> dict:
    process = Process.from_environment()
    wanted, job = checked([*argv, "--ngpu", str(process.world_size), "--output", folder])
    with process_group(process, job.config.comm):
        before = LanguageTask.whole

        def moved(task: LanguageTask, batch: TextBatch) -> RankBatch:
            batch_of_task = before(task, batch)
            batch_of_task.columns["positions"].sub_(task.dims.rank("cp") * LENGTH // 4)
            return batch_of_task

        if fault == "positions of its own":
            LanguageTask.whole = moved
        try:
            return evaluate(wanted, job, process.device)
        finally:
            LanguageTask.whole = before


CASES = [
    ("cp2+tp2", "hf", ["--batch-size", "3"]),
    ("cp2", "kimi_linear", []),
    *slow(
        ("fsdp2+cp2", "tied", ["--model.rope_theta", "5e4"]),
        ("cp2", "hf", []),
        ("fsdp2+cp2", "qwen3_next", []),
        ("fsdp2", "hf", ["--batch-size", "2"]),
        ("tp2", "tied", ["--training.loss_chunk_tokens", "16"]),
    ),
]


@pytest.mark.parametrize(("layout", "model", "settings"), CASES)
def test_every_layout_finds_the_same(
    pool: WorkerPool, folder: Path, tmp_path: Path, layout: str, model: str, settings: list[str]
) -> None:
    world_size, degrees = LAYOUTS[layout]
    own = settings if settings[:1] == ["--model.rope_theta"] else []  # the model's, on one process too
    (wanted,) = pool.run(1, losses_case, options(folder, *own, model=model), str(tmp_path))
    assert [bucket["tokens"] for bucket in wanted["positions"]] == [7 * n for n in (6, 6, 12, 24)]
    assert len({round(bucket["loss"], 2) for bucket in wanted["positions"]}) > 2
    assert [(cell["length"], cell["depth"]) for cell in wanted["needle"]] == [(100, 0), (100, 60), (128, 0), (128, 60)]
    for got in pool.run(world_size, losses_case, options(folder, *settings, *degrees, model=model), str(tmp_path)):
        for ours, theirs in zip(got["positions"], wanted["positions"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12, abs=0)
        for ours, theirs in zip(got["needle"], wanted["needle"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12, abs=0)


def test_the_comparison_sees_positions_that_are_not_those_of_the_sequence(
    pool: WorkerPool, folder: Path, tmp_path: Path
) -> None:
    (wanted,) = pool.run(1, losses_case, options(folder, "--tasks", "positions"), str(tmp_path))
    settings = options(folder, "--tasks", "positions", *LAYOUTS["cp2"][1])
    got, _ = pool.run(2, losses_case, settings, str(tmp_path), "positions of its own")
    assert got["positions"] != wanted["positions"]
    assert [bucket["tokens"] for bucket in got["positions"]] != [bucket["tokens"] for bucket in wanted["positions"]]


def by_hand_case(argv: list[str], folder: str) -> list[float]:
    """The mean loss of each bucket, a sequence at a time, by PyTorch's loss."""
    process = Process.from_environment()
    wanted, job = checked([*argv, "--ngpu", "1", "--output", folder])
    with process_group(process, job.config.comm), torch.no_grad():
        model, _ = loaded_model(job, process.device)
        documents = documents_in_order(DataSettings(wanted.dataset, wanted.dataset_path))
        losses = []
        for sequence in long_documents(documents, wanted.seq_len, 99):
            tokens, labels = (torch.from_numpy(x)[None] for x in (sequence.tokens, sequence.labels))
            losses.append(F.cross_entropy(model.output(model(tokens))[0], labels[0], reduction="none"))
        by_position = torch.stack(losses).mean(0)
        return [by_position[a:b].mean().item() for a, b in pairwise(wanted.edges)]


def test_losses_by_position_are_plain_means(pool: WorkerPool, folder: Path, tmp_path: Path) -> None:
    argv = options(folder, "--tasks", "positions", "--buckets", "1", "5", "40")
    (result,) = pool.run(1, losses_case, argv, str(tmp_path))
    (losses,) = pool.run(1, by_hand_case, argv, str(tmp_path))
    assert [bucket["loss"] for bucket in result["positions"]] == pytest.approx(losses, rel=1e-12)


# ---- answers


def answers_case(
    argv: list[str], folder: str, prompts: list[NeedlePrompt]
) -> tuple[list[Retrieved], list[tuple[int, ...]]]:
    """The answers, and the shapes of all logits that were made."""
    process = Process.from_environment()
    wanted, job = checked([*argv, "--ngpu", str(process.world_size), "--output", folder])
    with process_group(process, job.config.comm):
        model, dims = loaded_model(job, process.device)
        shapes: list[tuple[int, ...]] = []
        model.output.register_forward_hook(lambda _m, _x, made: shapes.append(tuple(made.shape)))
        evaluation = Evaluation(LanguageTask(job, dims), dims, model, rows=wanted.batch_size)
        return evaluation.needles(prompts), shapes


def likeliest_case(argv: list[str], folder: str, prompts: list[NeedlePrompt]) -> list[list[int]]:
    """Return the model's likeliest tokens at the labelled positions, from the logits of whole prompts."""
    process = Process.from_environment()
    _, job = checked([*argv, "--ngpu", "1", "--output", folder])
    with process_group(process, job.config.comm), torch.no_grad():
        model, _ = loaded_model(job, process.device)
        said = []
        for prompt in prompts:
            best = model.output(model(torch.from_numpy(prompt.sequence.tokens)[None]))[0].argmax(-1)
            said.append(best[torch.from_numpy(prompt.sequence.labels) != IGNORE_INDEX].tolist())
        return said


@pytest.mark.parametrize("layout", ["cp2+tp2", *slow("cp2", "fsdp2")])
def test_an_answer_is_right_if_all_its_tokens_are_the_likeliest(
    pool: WorkerPool, folder: Path, tmp_path: Path, layout: str
) -> None:
    """Of six prompts, two have the likeliest tokens as labels, two all except the first, and two none."""
    argv = options(folder, "--batch-size", "4")
    prompts = needle_prompts(open_tokenizer(), 128, (0.0, 50.0), 3, seed=1)
    (said,) = pool.run(1, likeliest_case, argv, str(tmp_path), prompts)
    changed = []
    for number, (prompt, tokens) in enumerate(zip(prompts, said, strict=True)):
        labels = prompt.sequence.labels.copy()
        kept = (0, 1, len(tokens))[number % 3]  # of the true labels
        labels[len(labels) - len(tokens) + kept :] = tokens[kept:]
        changed.append(replace(prompt, sequence=replace(prompt.sequence, labels=labels)))
    ((wanted, _),) = pool.run(1, answers_case, argv, str(tmp_path), changed)
    assert [answer.correct for answer in wanted] == [True, False, False] * 2
    world_size, degrees = LAYOUTS[layout]
    most = max(prompt.answer_tokens for prompt in prompts)
    for got, shapes in pool.run(world_size, answers_case, [*argv, *degrees], str(tmp_path), changed):
        assert [answer.correct for answer in got] == [answer.correct for answer in wanted]
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours.log_probability == pytest.approx(theirs.log_probability, rel=1e-12)
        assert shapes
        assert all(rows == 4 and most <= places <= most + 1 for rows, places, _ in shapes), "no logits of other tokens"


# ---- what the needle task measures


class StandIn(nn.Module):
    """A model that repeats earlier text.

    If the current four tokens are among the last `window` tokens before, it predicts the token that followed them
    there.
    """

    def __init__(self, vocab: int, window: int) -> None:
        super().__init__()
        self.vocab, self.window = vocab, window

    def forward(self, tokens: torch.Tensor, positions: object = None, attention_plan: object = None) -> torch.Tensor:
        hidden = torch.zeros(*tokens.shape, self.vocab)
        for row, text in enumerate(tokens.tolist()):
            seen: dict[tuple[int, ...], int] = {}
            for place in range(3, len(text)):
                key = tuple(text[place - 3 : place + 1])
                before = seen.get(key)
                if before is not None and before - 3 > place - self.window:
                    hidden[row, place, text[before + 1]] = 1
                seen[key] = place
        return hidden

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        return 20 * hidden


class Random(StandIn):
    """Says anything."""

    def forward(self, tokens: torch.Tensor, positions: object = None, attention_plan: object = None) -> torch.Tensor:
        return torch.rand(*tokens.shape, self.vocab, generator=torch.Generator().manual_seed(0))


def stand_in_case(kind: type[StandIn], window: int, prompts: list[NeedlePrompt]) -> list[Retrieved]:
    process = Process.from_environment()
    config = JobConfig(training=Training(seq_len=600, local_batch_size=1))
    job = resolve(config, 1, "cpu")
    with process_group(process, config.comm):
        dims = ParallelDims(job.degrees, "cpu")
        model = kind(job.model.vocab_size, window)
        return Evaluation(LanguageTask(job, dims), dims, model, rows=2).needles(prompts)


def distance(prompt: NeedlePrompt) -> int:
    """Tokens from the fourth one before the needle's number to the end of the question, both included."""
    tokens, labels = prompt.sequence.tokens.tolist(), prompt.sequence.labels
    answer = labels[labels != IGNORE_INDEX].tolist()
    place = next(i for i in range(len(tokens)) if tokens[i : i + len(answer)] == answer)
    return len(tokens) + 1 - len(answer) - place + 4


def test_the_needle_task_measures_how_far_a_model_sees(pool: WorkerPool) -> None:
    prompts = needle_prompts(open_tokenizer(), 600, (0.0, 25.0, 50.0, 75.0, 100.0), 2, seed=0)
    (answers,) = pool.run(1, stand_in_case, StandIn, 600, prompts)
    assert all(answer.correct for answer in answers), "it sees everything"
    assert all(answer.log_probability > -1e-3 for answer in answers)
    (answers,) = pool.run(1, stand_in_case, StandIn, 250, prompts)
    assert [answer.correct for answer in answers] == [distance(prompt) <= 250 for prompt in prompts]
    assert [answer.correct for answer in answers] == 2 * [False, False, False, True, True]
    (answers,) = pool.run(1, stand_in_case, Random, 0, prompts)
    assert not any(answer.correct for answer in answers)
    edge = distance(prompts[2])
    for window, right in ((edge - 1, False), (edge, True)):
        (answers,) = pool.run(1, stand_in_case, StandIn, window, prompts[2:3])
        assert [answer.correct for answer in answers] == [right]


# ---- the program


def lct(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "trainer", "evaluate", *arguments]
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_the_program_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    done = lct(*options(folder, "--output", "out", "--ngpu", "2", *LAYOUTS["cp2"][1]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("positions ") == 1, "one rank prints"
    note = "note: the model was made for 64 tokens, and 128 are asked for\n"
    assert done.stderr == f"weights: {folder}/hf\n{note}"
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert len(written["positions"]) == 4
    assert len(written["needle"]) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *slow(
            (["--seq-len", "5000", "--ngpu", "2"], "no document has more than --seq-len 5000 tokens"),
            (["--lengths", "30", "--ngpu", "1"], "--lengths 30 has no room"),
        ),
        (["--dataset-path", "nowhere", "--ngpu", "2"], "; dataset_path is --dataset-path here"),
        (["--parallelism.pipeline_parallel_degree", "2", "--ngpu", "2"], "runs no pipeline; add "),
        (
            ["--seq-len", "47", "--parallelism.tensor_parallel_degree", "2", "--ngpu", "2"],
            "; seq_len is --seq-len or --lengths here",
        ),
    ],
)
def test_the_program_refuses_in_one_sentence(folder: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = lct(*options(folder, *arguments), cwd=tmp_path)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("note: ", "weights: "))]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert said in lines[0]

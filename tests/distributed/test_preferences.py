"""Law: preferences train as the formulas of DPO and IPO say, on transformers' model, and alike on every layout."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from longshard.sharding.placement import summed
from tests.chat_files import CHATML, WORDS, chat_folder, write_lines
from tests.distributed import harness
from tests.distributed.harness import Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_experts import ep
from tests.distributed.test_hugging_face import LLAMA, initial
from tests.distributed.test_parity import LAYOUTS, degrees
from tests.hf_decoders import in_float64
from tests.hf_experts import hf_experts
from tests.slow import slow
from tests.unit.test_expert_hugging_face import QWEN
from trainer.data.packing import IGNORE_INDEX
from trainer.models.model_spec import hf_model, model_spec
from trainer.tasks import preferences

SEQ_LEN, BETA = 128, 0.3
LORA = ["--lora.rank=4", "--lora.alpha=64"]
IPO, SMOOTH, COPY = ["--dpo.loss=ipo"], ["--dpo.label_smoothing=0.1"], ["--dpo.reference=copy"]
Pair = list[tuple[list[int], list[int]]]
"""Tokens and labels of the chosen and of the rejected side."""


def pairs(number: int) -> list[dict]:
    """Pairs of 30 to 80 tokens together: some with an answer in the prompt, some without messages."""
    numbers = random.Random(0)

    def words(most: int) -> str:
        return " ".join(["fox", *numbers.choices(WORDS, k=numbers.randint(1, most))])

    lines = []
    for i in range(number):
        prompt = [{"role": "user", "content": words(4)}]
        if i % 3 == 0:
            prompt += [{"role": "assistant", "content": words(2)}, {"role": "user", "content": words(2)}]
        chosen, rejected = ({"role": "assistant", "content": f"{name} {words(6)}"} for name in ("two", "five"))
        if i % 3 == 1:
            lines.append({"prompt": words(4), "chosen": chosen["content"], "rejected": rejected["content"]})
        elif i % 2:
            lines.append({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
        else:
            lines.append({"chosen": [*prompt, chosen], "rejected": [*prompt, rejected]})
    return lines


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder with pairs, and weights of transformers in `hf`."""
    folder = chat_folder(tmp_path_factory.mktemp("preferences"), CHATML)
    write_lines(folder / "pairs.jsonl", pairs(60))
    initial("plain").save_pretrained(folder / "hf")
    return folder


def job(files: Path, *settings: str) -> list[str]:
    return [
        "--training.dtype=float64",
        "--training.dataset=preferences",
        f"--training.dataset_path={files}/pairs.jsonl",
        f"--model.tokenizer_path={files}",
        f"--model.flavor={files}/hf",
        f"--checkpoint.initial_load_path={files}/hf",
        f"--training.seq_len={SEQ_LEN}",
        "--training.data_streams=4",
        f"--dpo.beta={BETA}",
        *settings,
    ]


# ---- transformers


def watched(arguments: list[str]) -> tuple[Record, list[list[Pair]]]:
    """A run, and the pairs of each step."""
    steps: list[list[Pair]] = []
    real = harness.RecordingTrainer.take_batches

    def take(self: harness.RecordingTrainer, step: int) -> list:
        batches = real(self, step)
        steps.append([pair for batch in batches for pair in pairs_in(batch)])
        return batches

    with mock.patch.object(harness.RecordingTrainer, "take_batches", take):
        return run_layout(arguments), steps


def pairs_in(batch: dict) -> list[Pair]:
    sequences = []
    for tokens, labels, ids in zip(batch["tokens"], batch["labels"], batch["document_ids"], strict=True):
        sides = [(tokens[ids == i].tolist(), labels[ids == i].tolist()) for i in range(int(ids.max()) + 1)]
        sequences += [sides[i : i + 2] for i in range(0, len(sides) - 1, 2)]
    return sequences


def log_probability(model: LlamaForCausalLM, side: tuple[list[int], list[int]]) -> torch.Tensor:
    """Return the log-probability of the answer of a side, computed alone."""
    tokens, labels = (torch.tensor(x) for x in side)
    padded = F.pad(tokens, (0, SEQ_LEN - len(tokens)))  # the rotary table has this length
    logits = model(padded[None], use_cache=False).logits[0, : len(tokens)]
    return -F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)


def their_loss(model: LlamaForCausalLM, reference: LlamaForCausalLM, pair: Pair, settings: list[str]) -> torch.Tensor:
    """As TRL 1.16 computes it: `sigmoid` with label smoothing, and `ipo` with means over tokens."""
    with torch.no_grad():
        before = [log_probability(reference, side) for side in pair]
    chosen, rejected = (log_probability(model, side) - x for side, x in zip(pair, before, strict=True))
    if settings == IPO:
        chosen, rejected = (
            x / sum(label != IGNORE_INDEX for label in side[1])
            for x, side in zip((chosen, rejected), pair, strict=True)
        )
        return (chosen - rejected - 1 / (2 * BETA)) ** 2
    wrong, margin = 0.1 if settings == SMOOTH else 0.0, BETA * (chosen - rejected)
    return -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)


@pytest.mark.parametrize("settings", [[], *slow(IPO, SMOOTH)])
def test_losses_and_gradients_are_those_of_the_formula(pool: WorkerPool, files: Path, settings: list[str]) -> None:
    """Over steps, so that the model has moved from its reference; packed here, and each side by itself there."""
    plain = ["--training.max_norm=inf", "--optimizer.weight_decay=0", "--optimizer.lr=1e-2"]
    got, steps = pool.run(1, watched, job(files, *plain, *settings))[0]
    with in_float64("llama3", LLAMA, SEQ_LEN):
        model, reference = (LlamaForCausalLM.from_pretrained(files / "hf", dtype=torch.float64) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
        there = hf_model(model_spec("llama3"), LLAMA).pairs
        for line, gradients, step_pairs in zip(got.metrics, got.gradients, steps, strict=True):
            loss = torch.stack([their_loss(model, reference, pair, settings) for pair in step_pairs]).mean()
            assert abs(line["loss"] - loss) < 1e-10 * abs(loss)
            optimizer.zero_grad()
            loss.backward()
            wanted = {name: p.grad for name, p in model.named_parameters()}
            for name, gradient in gradients.items():
                ((theirs, ours),) = there[name][1].tensors(gradient).items()
                assert (ours - wanted[theirs]).norm() < 1e-10 * wanted[theirs].norm(), name
            optimizer.param_groups[0]["lr"] = line["lr"]
            optimizer.step()
    assert len(steps[0]) > 8
    first, second = got.metrics
    assert first["rewards_margin"] == 0
    assert second["rewards_margin"] > 0.01
    assert 0 < second["rewards_accuracy"] <= 1
    assert second["rewards_margin"] == pytest.approx(second["rewards_chosen"] - second["rewards_rejected"])
    if not settings:
        assert first["loss"] == pytest.approx(math.log(2), rel=1e-12)


# ---- layouts

references: dict[tuple[str, ...], Record] = {}


def compare(pool: WorkerPool, files: Path, settings: list[str], ranks: int, arguments: list[str]) -> None:
    key = tuple(settings)
    if key not in references:
        references[key] = pool.run(1, run_layout, job(files, *settings))[0]
    got, wanted = pool.run(ranks, run_layout, job(files, *settings, *arguments))[0], references[key]
    assert_parity(got, wanted, 1e-10)
    for ours, theirs in zip(got.metrics, wanted.metrics, strict=True):
        for name in ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12)


ALL_TO_ALL = "--parallelism.context_parallel_method=all_to_all"
CHUNKS, FULL = "--training.loss_chunk_tokens=16", "--activation_checkpoint.mode=full"


@pytest.mark.parametrize(
    ("layout", "settings", "arguments"),
    [
        ("cp2+tp2", LORA, [CHUNKS]),
        ("fsdp2+cp2", [], [ALL_TO_ALL]),
        *slow(
            ("fsdp2", LORA, []),
            ("fsdp2", [], ["--compile.enable", "--compile.backend=aot_eager"]),
            ("tp2", [], [CHUNKS]),
            ("tp2", LORA, []),
            ("cp4", LORA, [FULL]),
            ("cp2", IPO, [CHUNKS]),
            ("hsdp2x2", LORA, []),
            ("pp2", LORA, []),
            ("pp2", COPY, [CHUNKS]),
            ("cp2+pp2", LORA, [CHUNKS]),
            ("fsdp2+pp2", [], ["--training.local_batch_size=4"]),
            ("tp2+pp2", [], [CHUNKS]),
        ),
    ],
)
def test_layouts_train_on_the_same_pairs(
    pool: WorkerPool, files: Path, layout: str, settings: list[str], arguments: list[str]
) -> None:
    ranks, degrees = LAYOUTS[layout]
    compare(pool, files, settings, ranks, [*degrees, *arguments])


@pytest.mark.slow
def test_dropout_is_that_of_the_policy_alone(pool: WorkerPool, files: Path) -> None:
    """So the first step has its masks on every layout, and a reference without."""
    compare(pool, files, [*LORA, "--lora.dropout=0.2"], *LAYOUTS["cp2+tp2"])


@pytest.mark.slow
def test_copy_and_adapters_are_one_reference(pool: WorkerPool, files: Path) -> None:
    compare(pool, files, LORA, 1, COPY)


def faulty(arguments: list[str], mistake: str) -> Record:
    """A run with one of the mistakes that a comparison of layouts must see."""

    def no_sum(x: torch.Tensor, group: object) -> torch.Tensor:
        return x

    def no_adjoint(x: torch.Tensor, group: object) -> torch.Tensor:
        return x + (summed(x, group) - x).detach()

    with mock.patch.object(preferences, "added_up", {"sum": no_sum, "adjoint": no_adjoint}[mistake]):
        return run_layout(arguments)


@pytest.mark.parametrize("mistake", ["adjoint", *slow("sum")])
def test_the_comparison_sees_answers_of_one_rank(pool: WorkerPool, files: Path, mistake: str) -> None:
    ranks, arguments = LAYOUTS["cp2"]
    wanted = pool.run(1, run_layout, job(files, *LORA))[0]
    got = pool.run(ranks, faulty, job(files, *LORA, *arguments), mistake)[0]
    with pytest.raises(AssertionError, match=r"gradient of|grad_norm"):
        assert_parity(got, wanted, 1e-10)


@pytest.mark.slow
def test_experts_learn_preferences_alike(pool: WorkerPool, files: Path, tmp_path: Path) -> None:
    """With adapters of their own, which the reference does without."""
    args = replace(QWEN, vocab_size=LLAMA.vocab_size, n_heads=8, n_kv_heads=4)
    hf_experts("qwen3_moe", args).save_pretrained(tmp_path)
    arguments = job(files, "--model.name=qwen3_moe", f"--model.flavor={tmp_path}", "--model.router_aux_loss_coef=0.1")
    arguments += [f"--checkpoint.initial_load_path={tmp_path}", *LORA, "--lora.modules", "wq", "w13", "w2"]
    wanted = pool.run(1, run_layout, arguments)[0]
    for ranks, layout in ((2, [*degrees(tp=2), ep(2)]), (4, [*degrees(cp=2, dp_shard=2), ep(2), CHUNKS])):
        assert_parity(pool.run(ranks, run_layout, [*arguments, *layout])[0], wanted, 1e-10)


# ---- resuming


def losses_case(arguments: list[str], steps: int) -> list[float]:
    """Losses of the steps from the saved one on; the last one is saved."""
    with harness.trainer_of(arguments) as trainer:
        for step in range(trainer.start_step + 1, steps + 1):
            trainer.train_step(step)
        trainer.checkpoint.save(steps, tokens_seen=0, last=True)
        folder = Path(trainer.config.job.dump_folder)
        trainer.metrics.close()
        return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("settings", [COPY, *slow(LORA)])
def test_a_resumed_run_has_the_reference_of_its_start(
    pool: WorkerPool, files: Path, tmp_path: Path, settings: list[str]
) -> None:
    arguments = job(files, *settings, "--checkpoint.enable", "--optimizer.lr=1e-2", "--training.steps=4")
    run, whole = (f"--job.dump_folder={tmp_path / name}" for name in ("run", "whole"))
    wanted = pool.run(1, losses_case, [*arguments, whole], 3)[0]
    pool.run(2, losses_case, [*arguments, run, *degrees(dp_shard=2)], 2)
    (got,) = pool.run(2, losses_case, [*arguments, run, *degrees(cp=2)], 3)[0][-1:]
    assert got == pytest.approx(wanted[-1], rel=1e-10)
    assert len(wanted) == 3
    assert wanted[-1] < 0.99 * wanted[0]

"""Law: documents of a step may be assigned over data-parallel ranks and micro-batches; the step stays the same."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed.checkpoint_cases import trainer_in
from tests.distributed.harness import Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, degrees, reference
from tests.slow import slow
from trainer.commands import tokenize_text
from trainer.config.errors import ConfigError
from trainer.config.parallelism import Parallelism
from trainer.config.schema import Comm
from trainer.data.packing import IGNORE_INDEX, NO_POSITION
from trainer.data.token_files.format import open_pair
from trainer.job.degrees import resolve_degrees
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.process_group import Process, process_group
from trainer.tasks import balanced_batches
from trainer.tasks.balanced_batches import BalancedBatches, Step, documents_of_batch

DOCUMENTS = ["--training.dtype=float64", "--training.attention_mask=document"]
BALANCED = "--training.balance=step"
CASES = {
    "fsdp2": LAYOUTS["fsdp2"],
    "fsdp4": LAYOUTS["fsdp4"],
    "hsdp2x2": LAYOUTS["hsdp2x2"],
    "fsdp2+tp2": LAYOUTS["fsdp2+tp2"],
    "fsdp2+cp2": LAYOUTS["fsdp2+cp2"],
    "fsdp2+cp2, assigned by cost": (
        4,
        [*degrees(dp_shard=2, cp=2), "--parallelism.context_parallel_load_balancer=balanced"],
    ),
    "fsdp2+cp2, chosen for each batch": (
        4,
        [*degrees(dp_shard=2, cp=2), "--parallelism.context_parallel_method=auto"],
    ),
    "fsdp2, recomputed": (2, [*degrees(dp_shard=2), "--activation_checkpoint.mode=full"]),
    "fsdp2, sequences in chunks": (2, [*degrees(dp_shard=2), "--training.sequence_chunks=3"]),
    "fsdp2, loss in chunks": (2, [*degrees(dp_shard=2), "--training.loss_chunk_tokens=5"]),
    "ddp2, one micro-batch": (2, [*degrees(dp_replicate=2), "--training.local_batch_size=4"]),
    "fsdp2, compiled": (2, [*degrees(dp_shard=2), "--compile.enable", "--compile.backend=aot_eager"]),
    "fsdp2+tp2, compiled loss": (
        4,
        [*degrees(dp_shard=2, tp=2), "--compile.enable", "--compile.backend=aot_eager", "--compile.components=loss"],
    ),
    "fsdp2+tp2, compiled": (
        4,
        [*degrees(dp_shard=2, tp=2), "--compile.enable", "--compile.backend=aot_eager"],
    ),
    "fsdp2+cp2, compiled": (4, [*degrees(dp_shard=2, cp=2), "--compile.enable", "--compile.backend=aot_eager"]),
    "fsdp2+cp2+tp2": LAYOUTS["fsdp2+cp2+tp2"],
}
QUICK = {"fsdp2+cp2, assigned by cost", "ddp2, one micro-batch", "fsdp2+tp2, compiled loss"}


def same_rows(got: Record, wanted: Record) -> Record:
    """`got` with the other's largest loss of a row: rows are assigned again."""
    metrics = [row | {"loss_max": other["loss_max"]} for row, other in zip(got.metrics, wanted.metrics, strict=True)]
    return replace(got, metrics=metrics)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else [pytest.mark.slow]) for c in CASES])
def test_a_balanced_step_equals_one_process(pool: WorkerPool, case: str) -> None:
    ranks, arguments = CASES[case]
    wanted = reference(pool, *DOCUMENTS)
    got, *_ = pool.run(ranks, run_layout, [*DOCUMENTS, *arguments, BALANCED])
    assert_parity(same_rows(got, wanted), wanted, 1e-12)


def test_documents_keep_apart_also_in_windows_sinks_and_convolutions(pool: WorkerPool) -> None:
    model = ["--model.sliding_window=5", "--model.attention_sinks", "--model.short_conv_kernel=4"]
    wanted = reference(pool, *DOCUMENTS, *model)
    got, *_ = pool.run(4, run_layout, [*DOCUMENTS, *model, *degrees(dp_shard=2, cp=2), BALANCED])
    assert_parity(same_rows(got, wanted), wanted, 1e-12)


# What a step counts over its tokens: padding is no token, and a document without a label is one. Sequences of 7 tokens
# have many documents of one token, which have no label.
COUNTED = {
    "QK-clip": ("--optimizer.qk_clip=0.01",),
    "QK-clip, sequences in chunks": ("--optimizer.qk_clip=0.01", "--training.sequence_chunks=2"),
    "balance loss": ("--model.name=qwen3_moe", "--model.router_aux_loss_coef=0.1"),
    "biases of routers": ("--model.name=qwen3_moe", "--model.router_bias_update_rate=0.1"),
    "further tokens": ("--model.mtp_layers=1", "--training.z_loss=0.1", "--optimizer.qk_clip=0.01"),
}


DEALT = {"fsdp2": degrees(dp_shard=2), "ddp2": degrees(dp_replicate=2), "fsdp3": degrees(dp_shard=3)}


@pytest.mark.parametrize("layout", ["fsdp2", *slow("ddp2", "fsdp3")])
@pytest.mark.parametrize("name", COUNTED)
def test_what_a_step_counts_is_that_of_one_process(pool: WorkerPool, name: str, layout: str) -> None:
    settings = [*DOCUMENTS, *COUNTED[name], "--training.seq_len=7", "--training.global_batch_size=24"]
    settings += ["--training.local_batch_size=4", "--training.steps=3"]
    wanted = reference(pool, *settings)
    got, *_ = pool.run(3 if layout == "fsdp3" else 2, run_layout, [*settings, *DEALT[layout], BALANCED])
    assert_parity(same_rows(got, wanted), wanted, 1e-10)


def faulty(arguments: list[str], fault: str) -> Record:
    def documents(batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
        pieces = documents_of_batch(batch)
        if fault == "a document is lost":
            return pieces[1:]
        if fault == "two documents run together":
            pieces.sort(key=len)
            return [np.concatenate(pieces[:2]), *pieces[2:]] if pieces else pieces
        return [np.stack([x[:, 0], np.roll(x[:, 1], 1)], 1) for x in pieces]  # labels of another token

    with mock.patch.object(balanced_batches, "documents_of_batch", documents):
        return run_layout(arguments)


@pytest.mark.parametrize(
    "fault", ["two documents run together", *slow("a document is lost", "labels of another token")]
)
def test_the_comparison_sees_a_wrong_assignment(pool: WorkerPool, fault: str) -> None:
    wanted = reference(pool, *DOCUMENTS)
    arguments = ["--training.local_batch_size=4", *degrees(dp_shard=2), BALANCED]
    got, *_ = pool.run(2, faulty, [*DOCUMENTS, *arguments], fault)
    with pytest.raises(AssertionError, match="gradient of"):
        assert_parity(same_rows(got, wanted), wanted, 1e-3)


# ---- the exchange


class Sequences:
    """Batches of 64 tokens: rank r has documents of 4 + 4 r tokens; each token names its document."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        number = 0
        while True:
            ids = torch.arange(64) // (4 + 4 * self.rank)
            tokens = 10_000 * self.rank + 100 * number + ids
            labels = torch.where(ids % 5 == 4, IGNORE_INDEX, tokens + 1)
            batch = {
                "tokens": tokens,
                "labels": labels,
                "document_ids": ids,
                "positions": torch.arange(64) % (4 + 4 * self.rank),
            }
            yield {name: x[None] for name, x in batch.items()}
            number += 1


def exchanged() -> list[dict[str, torch.Tensor]]:
    with process_group(Process.from_environment(), Comm()):
        return list(islice(balanced_batches_of(dist.group.WORLD), 6))


def balanced_batches_of(group: dist.ProcessGroup) -> Iterator[dict[str, torch.Tensor]]:
    step = Step(micro_batches=3, multiple_of=8, least=8, most=80, costs=lambda n: n + n**2 / 8)
    balanced = BalancedBatches(step, group, plan=lambda arrays: arrays["tokens"].shape)
    return balanced(iter(Sequences(group.rank())))


def cost_of(batch: dict[str, torch.Tensor]) -> float:
    """Work of a micro-batch, as `balanced_batches_of` counts it."""
    return sum(len(x) + len(x) ** 2 / 8 for x in documents_of_batch(batch))


@pytest.mark.parametrize("ranks", [4, *slow(1, 2)])
def test_every_document_is_somewhere_once(pool: WorkerPool, ranks: int) -> None:
    results = pool.run(ranks, exchanged)
    for step in range(2):
        batches = [batch for result in results for batch in result[3 * step : 3 * step + 3]]
        pieces = [x for batch in batches for x in documents_of_batch(batch)]
        numbers = range(3 * step, 3 * step + 3)
        read = (
            {name: x[0] for name, x in batch.items()}
            for rank in range(ranks)
            for number, batch in zip(range(numbers.stop), Sequences(rank), strict=False)
            if number in numbers
        )
        wanted = [x for one in read for x in documents_of_batch({name: x[None] for name, x in one.items()})]
        assert sorted(map(np.ndarray.tolist, pieces)) == sorted(map(np.ndarray.tolist, wanted))
        work = [[cost_of(batch) for batch in result[3 * step : 3 * step + 3]] for result in results]
        slowest = sum(max(rank_work) for rank_work in zip(*work, strict=True))
        assert slowest < 1.3 * np.sum(work) / ranks, "what balancing is for"
    moved = 0
    for rank, result in enumerate(results):
        for batch in result:
            rows, length = batch["tokens"].shape
            assert (rows, length % 8) == (1, 0)
            assert length <= 80
            assert batch["plan"] == (1, length)
            real = batch["positions"][0] != NO_POSITION
            changes = (batch["document_ids"][0].diff() != 0) | ~real[1:]
            assert (batch["positions"][0].diff()[~changes] == 1).all()
            assert (batch["positions"][0][1:][changes & real[1:]] == 0).all()
            moved += (batch["tokens"][batch["labels"] != IGNORE_INDEX] // 10_000 != rank).sum().item()
    assert (moved > 0) == (ranks > 1)


# ---- real data


JSONL = ["--training.dataset=jsonl", "--training.steps=6", *DOCUMENTS]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Documents of some 10 to 300 tokens."""
    lines = [json.dumps({"text": f"{i} is a number, its square is {i * i}. " * (1 + i * i % 13)}) for i in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return tmp_path / "a.jsonl"


def losses(folder: str, arguments: list[str]) -> tuple[list[float], str]:
    """Return the loss of each step, and the error that stopped the run."""
    with trainer_in(folder, [*JSONL, *arguments]) as trainer:
        read, done = trainer.reduce_step, []
        trainer.reduce_step = lambda step, totals: (result := read(step, totals), done.append(result[0]))[0]
        try:
            trainer.train()
        except ConfigError as error:
            return done, str(error)
        return done, ""


@pytest.mark.slow
def test_a_balanced_run_resumes_where_it_stopped_also_unbalanced(pool: WorkerPool, tmp_path: Path, data: Path) -> None:
    settings = [f"--training.dataset_path={data}", "--lr_scheduler.total_steps=6"]
    (whole, _), *_ = pool.run(2, losses, str(tmp_path / "whole"), settings)
    (first, _), *_ = pool.run(2, losses, str(tmp_path / "run"), [*settings, BALANCED, "--training.steps=3"])
    (second, _), *_ = pool.run(2, losses, str(tmp_path / "run"), [*settings, BALANCED, "--training.steps=5"])
    (third, _), *_ = pool.run(2, losses, str(tmp_path / "run"), settings)
    assert [len(first), len(second), len(third)] == [3, 2, 1]
    np.testing.assert_allclose([*first, *second, *third], whole, rtol=1e-12)


@pytest.mark.slow
def test_bad_data_of_one_rank_stop_all(pool: WorkerPool, tmp_path: Path, data: Path) -> None:
    tokens = tmp_path / "tokens"
    assert tokenize_text.main(["--path", str(data), "--output", str(tokens), "--processes", "1"]) == 0
    with open(tokens / "shard-00000.bin", "r+b") as file:
        file.seek(int(open_pair(str(tokens / "shard-00000.idx")).arrays[1][41]) + 6)
        file.write(b"\1\1")
    arguments = ["--training.dataset=tokens", f"--training.dataset_path={tokens}", BALANCED, "--training.steps=60"]
    results = pool.run(2, losses, str(tmp_path / "run"), arguments)
    (message,) = {text for _, text in results}
    assert message.startswith(f"{tokens}/shard-00000.bin, document 41, is damaged")
    assert len(results[0][0]) == len(results[1][0]) > 0


def host_group() -> tuple[list[int], str]:
    """The group that a mesh on GPUs would get, which has no other one for tensors in host memory."""
    with process_group(Process.from_environment(), Comm()):
        parallelism = Parallelism(data_parallel_shard_degree=2, tensor_parallel_degree=2)
        dims = ParallelDims(resolve_degrees(parallelism, 4), "cpu")
        group = dims._gloo_group(dims["dp"], timedelta(seconds=60))
        dist.barrier()  # else a rank that ends closes the connections that another one is still making
        return dist.get_process_group_ranks(group), dist.get_backend(group)


def test_ranks_of_a_mesh_get_a_group_for_host_memory(pool: WorkerPool) -> None:
    assert pool.run(4, host_group) == [([0, 2], "gloo"), ([1, 3], "gloo")] * 2

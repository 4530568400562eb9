"""Gradients in bfloat16 on several ranks have at most twice the error of one bfloat16 process, against float32."""

from unittest import mock

import pytest
import torch

from longshard.sharding import exchange
from scripts.gpu_blocks.block import largest
from tests.distributed import harness
from tests.distributed.harness import STEPS, Record, make_row, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, reference
from tests.slow import slow

BFLOAT16 = "--training.mixed_precision_param=bfloat16"
MODELS = {
    "plain": [],
    "documents": ["--training.attention_mask=document"],
    "window": ["--model.sliding_window=5"],
}
QUICK = {("tp2", "plain"), ("fsdp2+cp2", "documents")}
CASES = [
    (layout, model)
    for layout in ("fsdp2", "ddp2", "tp2", "cp2", "pp2", "fsdp2+tp2", "fsdp2+cp2", "cp4", "cp2+tp2", "cp2+pp2")
    for model in MODELS
]


def error(record: Record, exact: Record) -> float:
    """Relative error of the first step's gradients, all parameters as one vector: later steps start elsewhere."""
    gradients, exact_gradients = record.gradients[0], exact.gradients[0]
    assert gradients.keys() == exact_gradients.keys()
    squares = [
        ((gradients[name].double() - grad.double()).square().sum(), grad.double().square().sum())
        for name, grad in exact_gradients.items()
    ]
    difference, size = (torch.stack(column).sum().sqrt().item() for column in zip(*squares, strict=True))
    return difference / size


@pytest.mark.parametrize(
    ("layout", "model"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_bfloat16_gradients_are_as_exact_as_on_one_rank(pool: WorkerPool, layout: str, model: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    exact, alone = reference(pool, *MODELS[model]), reference(pool, BFLOAT16, *MODELS[model])
    got = pool.run(world_size, run_layout, [BFLOAT16, *MODELS[model], *arguments])[0]
    assert 1e-4 < error(alone, exact) < 0.05  # it is bfloat16, and it is near
    assert error(got, exact) <= 2 * error(alone, exact), (error(got, exact), error(alone, exact))
    worst = {name: relative(got, exact, name) / relative(alone, exact, name) for name in exact.gradients[0]}
    assert largest(*worst.values()) < 2, worst
    assert len(got.metrics) == STEPS
    assert got.metrics[0]["loss"] == pytest.approx(exact.metrics[0]["loss"], rel=1e-3)


def relative(record: Record, exact: Record, name: str) -> float:
    gradient, exact_gradient = record.gradients[0][name].double(), exact.gradients[0][name].double()
    return ((gradient - exact_gradient).norm() / exact_gradient.norm()).item()


_CP4 = ["--parallelism.context_parallel_degree=4", BFLOAT16]
_REDUCED_HALF = "--training.mixed_precision_reduce=bfloat16"
_ROWS = ["--training.local_batch_size=2", "--training.global_batch_size=16"]
_SENT_HALF = "--parallelism.context_parallel_gradient_dtype=bfloat16"


def test_gradients_of_keys_in_bfloat16(pool: WorkerPool) -> None:
    """Sums of dK and dV sent in bfloat16 take half the bytes, and gradients are as exact as on one process."""
    exact, alone = reference(pool), reference(pool, BFLOAT16)
    whole, half = (pool.run(4, counted_layout, [*_CP4, *options])[0] for options in ([], [_SENT_HALF]))
    assert whole[1]["dkv"] == 2 * half[1]["dkv"] > 0
    assert whole[1]["kv"] == half[1]["kv"]
    assert error(half[0], exact) <= 2 * error(alone, exact)
    assert 0 < error(half[0], whole[0]) < error(alone, exact)


def labelled_layout(arguments: list[str]) -> Record:
    """Run a layout whose ranks all have labels, also in the first step."""
    with mock.patch.object(
        harness, "make_row", lambda i, length, *, padding, **_: make_row(i, length, padding=padding)
    ):
        return run_layout([*_ROWS, *arguments])


@pytest.mark.parametrize("ranks", [2, *slow(4, 8)])
def test_gradients_that_are_reduced_in_bfloat16(pool: WorkerPool, ranks: int) -> None:
    """The sum over ranks is rounded after each of them, which costs less than to compute in bfloat16."""
    shards = [BFLOAT16, f"--parallelism.data_parallel_shard_degree={ranks}"]
    exact = pool.run(1, labelled_layout, [])[0]
    whole, half = (pool.run(ranks, labelled_layout, [*shards, *options])[0] for options in ([], [_REDUCED_HALF]))
    errors = error(whole, exact), error(half, exact), error(half, whole)
    print(f"{ranks} ranks: {errors[0]:.2%} in float32, {errors[1]:.2%} in bfloat16, {errors[2]:.2%} apart")
    assert 5e-4 < errors[2] < errors[0]
    assert errors[1] < 1.3 * errors[0]


def counted_layout(arguments: list[str]) -> tuple[Record, dict[str, int]]:
    """Run a layout, and count the bytes that this rank sent by kind."""
    exchange.bytes_sent.clear()
    return run_layout(arguments), dict(exchange.bytes_sent)

"""Laws of float8 on ranks: a layout gives the losses, gradients and weights of one process that computes in float8.

Scales decide how numbers are rounded. The scales of weights use all shards, so they equal the single process's scales;
with FSDP, TP and PP the scales of activations do too. Float8 then rounds the same numbers, and the layouts agree as in
float32. A sum in another order may move a number across the border between two float8 values. The number then differs
by a whole step of 6 to 12 %. This is rare: at first one number among thousands, then some of the numbers that depend on
it. Hence a tolerance of 1e-2 in norm (mostly it is 1e-7), where float8 itself changes gradients by 3e-2 to 1.4e-1. With
context parallelism, tensorwise scales of activations use the tokens of a rank, not the whole row. The law is then that
a rank is as near to high precision as one process is.
"""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import harness
from tests.distributed.checkpoint_cases import load_step_save, merged, same
from tests.distributed.harness import STEPS, Record, RecordingTrainer, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS as OTHER_LAYOUTS
from trainer.trainer import Trainer

TOLERANCE = 1e-2
# Row by row, so that what a scale is found over is the same in every layout.
ROWS = ["--training.local_batch_size=1"]
FLOAT8 = ["--float8.enable", "--float8.emulate"]
ROWWISE = "--float8.recipe_name=rowwise"
GATHER = "--float8.enable_fsdp_float8_all_gather"
COMPILE = ["--compile.enable", "--compile.backend=aot_eager"]
OP = "--activation_checkpoint.mode=selective"
PP2 = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]  # four micro-batches of a row
FOUR_STAGES = [
    "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
    "--parallelism.pipeline_parallel_module_fqns",
    *("tok_embeddings", "layers.0", "layers.1", "norm,output"),
]
LAYOUTS = OTHER_LAYOUTS | {"one": (1, []), "pp2": (2, PP2), "fsdp2+pp2": (4, PP2)}


@lru_cache
def reference(pool: WorkerPool, *arguments: str) -> Record:
    return pool.run(1, run_layout, [*ROWS, *arguments])[0]


CASES = [
    ("cp2", [ROWWISE]),
    ("fsdp2", []),
    ("fsdp2", [GATHER, OP, *COMPILE]),
    ("tp2", []),
    ("fsdp2", [ROWWISE]),
    ("fsdp2", [GATHER]),
    ("fsdp2", [GATHER, "--activation_checkpoint.mode=full"]),
    ("fsdp2", [GATHER, "--training.enable_cpu_offload"]),
    ("fsdp2", [GATHER, "--parallelism.fsdp_reshard_after_forward=never"]),
    ("fsdp2", [GATHER, "--parallelism.fsdp_reshard_after_forward=always"]),
    ("hsdp2x2", [GATHER]),
    ("tp2", [ROWWISE]),
    ("tp2", COMPILE),
    ("fsdp2+tp2", [GATHER]),
    ("fsdp2+tp2", [OP, *COMPILE]),
    ("fsdp2+tp2", [ROWWISE, OP, *COMPILE]),
    ("cp2+tp2", [ROWWISE]),
    ("fsdp2+cp2", [ROWWISE, OP, *COMPILE]),
    ("fsdp2", [GATHER, *COMPILE, "--activation_checkpoint.mode=memory_budget"]),
    ("pp2", []),
    ("pp2", [OP, *COMPILE]),
    ("pp2", FOUR_STAGES),
    ("fsdp2+pp2", [GATHER]),
    ("one", ["--compile.enable"]),
    ("one", [ROWWISE, OP, "--compile.enable"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [pytest.param(*case, id="-".join([case[0], *case[1]])) for case in CASES],
)
def test_a_layout_equals_one_process_in_float8(pool: WorkerPool, layout: str, settings: list[str]) -> None:
    world_size, arguments = LAYOUTS[layout]
    got = pool.run(world_size, run_layout, [*ROWS, *FLOAT8, *settings, *arguments])[0]
    wanted = reference(pool, *FLOAT8, *(s for s in settings if s == ROWWISE))
    assert_parity(got, wanted, TOLERANCE)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_is_in_force(pool: WorkerPool, recipe: str) -> None:
    """The negative control: without float8, every gradient is off by three times the tolerance and more."""
    exact, rounded = reference(pool), reference(pool, *FLOAT8, f"--float8.recipe_name={recipe}")
    for error in errors(rounded, exact).values():
        assert error > 3 * TOLERANCE


def errors(got: Record, exact: Record) -> dict[str, float]:
    """Relative distance of the gradient of each parameter, over all steps."""
    distances = {}
    for name in exact.gradients[0]:
        gradients, exact_gradients = (torch.stack([step[name] for step in record.gradients]) for record in (got, exact))
        distances[name] = ((gradients - exact_gradients).norm() / exact_gradients.norm()).item()
    return distances


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("cp2", []),
        ("fsdp2+cp2", [GATHER]),
        ("cp4", [OP, *COMPILE]),
        # Shards of weights on tensor-parallel ranks have scales of their own unless those are computed before.
        ("fsdp2+tp2", [GATHER]),
        ("fsdp2", [GATHER, "--training.mixed_precision_param=bfloat16"]),
    ],
)
def test_other_scales_are_as_near_to_high_precision(pool: WorkerPool, layout: str, settings: list[str]) -> None:
    world_size, arguments = LAYOUTS[layout]
    got = pool.run(world_size, run_layout, [*ROWS, *FLOAT8, *settings, *arguments])[0]
    exact = reference(pool)
    usual = errors(reference(pool, *FLOAT8), exact)
    assert all(error < 1.5 * usual[name] for name, error in errors(got, exact).items())
    for line, exact_line in zip(got.metrics, exact.metrics, strict=True):
        assert abs(line["loss"] - exact_line["loss"]) < 1e-3 * exact_line["loss"]


@pytest.mark.slow
def test_a_mistake_is_not_as_near(pool: WorkerPool) -> None:
    """The negative control of the test above."""
    world_size, arguments = LAYOUTS["cp2"]
    broken = pool.run(world_size, run_layout, [*ROWS, *FLOAT8, *arguments], "attention not under CP")[0]
    exact = reference(pool)
    usual = errors(reference(pool, *FLOAT8), exact)
    assert any(error > 1.5 * usual[name] for name, error in errors(broken, exact).items())


class Collectives(TorchDispatchMode):
    """Bytes that FSDP's all-gathers bring, and the number of reductions other than the trainer's own and FSDP's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does inside comes here, too
        name = func.name().split(".")[0]
        if "allgather" in name and isinstance(args[0], torch.Tensor):  # a list: of objects
            self.counts["gathered"] += args[0].nbytes
        if name == "_c10d_functional::all_reduce":
            self.counts["reductions"] += 1
        return func(*args, **(kwargs or {}))


def counted_case(arguments: list[str]) -> Counter[str]:
    """All steps of a run."""
    collectives = Collectives()
    step = RecordingTrainer.train_step

    def counted(self: RecordingTrainer, number: int) -> None:
        with collectives:
            step(self, number)

    # The record's own gathering is no part of it.
    with (
        mock.patch.object(RecordingTrainer, "train_step", counted),
        mock.patch.object(RecordingTrainer, "optimizer_step", Trainer.optimizer_step),
    ):
        run_layout(arguments)
    return collectives.counts


def test_shards_are_gathered_in_float8_and_scales_in_one_reduction(pool: WorkerPool) -> None:
    world_size, arguments = LAYOUTS["fsdp2"]
    settings = [*ROWS, *arguments]
    float8, gathered = (
        pool.run(world_size, counted_case, [*settings, *options])[0] for options in (FLOAT8, [*FLOAT8, GATHER])
    )
    passes = STEPS * 4  # 8 rows on two ranks, one a micro-batch
    layer = 64 * (64 + 32 + 32 + 64 + 3 * 96)  # numbers of the matrices of a layer of the tiny model
    products = 2 * passes * harness.TINY.n_layers * layer  # gathered for the forward and for the backward
    assert float8["gathered"] - gathered["gathered"] == 3 * products  # of four bytes each one is left
    assert float8["reductions"] == 0
    assert gathered["reductions"] == STEPS


@pytest.mark.slow
def test_checkpoints_are_plain_and_a_resumed_run_is_the_uninterrupted_one(pool: WorkerPool, tmp_path: Path) -> None:
    """A checkpoint of a run that gathers weights in float8 loads exactly, without float8 and on another layout."""
    world_size, arguments = LAYOUTS["fsdp2"]
    settings = [*FLOAT8, GATHER, *arguments]
    whole = merged(pool.run(world_size, load_step_save, str(tmp_path / "one"), settings, 2), "after")
    for _ in range(2):
        parts = merged(pool.run(world_size, load_step_save, str(tmp_path / "two"), settings, 1), "after")
    assert [name for name in whole if not same(whole[name], parts[name])] == []
    got = merged(pool.run(1, load_step_save, str(tmp_path / "two"), [], 0), "before")
    weights = [name for name in whole if name.startswith(("model.", "optimizer."))]
    assert weights
    assert [name for name in weights if not same(whole[name], got[name])] == []
    assert not any(b"torchao" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

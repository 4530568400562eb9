"""Laws of the loss in chunks on ranks: parity with the dense loss of one process, and its communication."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from longshard.sharding import exchange
from tests.distributed.harness import Record, assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_compile import compiled_case
from tests.distributed.test_parity import LAYOUTS, TOLERANCE, reference
from tests.slow import slow
from trainer.components.norms import settle_gradients
from trainer.models import chunked_loss, chunked_loss_functions

CHUNKED = "--training.loss_chunk_tokens=5"  # 32 tokens, or 16 with two ranks of cp: chunks of different lengths
TIED = "--model.flavor=tiny_tied"
PRECISION = "--training.dtype=float64"
ALWAYS = "--parallelism.fsdp_reshard_after_forward=always"
ZERO_BUBBLE = ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--model.flavor=tiny4"]
CASES = [
    ("fsdp2+tp2", [], "float64"),
    ("cp2", [], "float32"),
    ("pp2", [], "float64"),
]
SLOW = [
    ("fsdp2", [TIED], "float64"),
    ("fsdp2", [], "float32"),
    ("fsdp2", [ALWAYS], "float64"),
    ("ddp2", [], "float64"),
    ("tp2", [], "float64"),
    ("tp2", [TIED], "float64"),
    ("fsdp2+tp2", [TIED], "float32"),
    ("fsdp2+tp2", [ALWAYS], "float64"),
    ("hsdp2x2", [], "float64"),
    ("cp2+tp2", [], "float64"),
    ("tp2+pp2", [], "float64"),
    ("fsdp2+pp2", [], "float64"),
    ("pp2", ZERO_BUBBLE, "float64"),
    ("fsdp2+cp2+tp2", [], "float64"),
]


@pytest.mark.parametrize(
    ("layout", "settings", "dtype"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else [], id="-".join([case[0], *case[1], case[2]]))
        for case in CASES + SLOW
    ],
)
def test_every_gradient_is_that_of_all_logits_at_once(
    pool: WorkerPool, layout: str, settings: list[str], dtype: str
) -> None:
    world_size, arguments = LAYOUTS[layout]
    precision = f"--training.dtype={dtype}"
    got = pool.run(world_size, run_layout, [precision, CHUNKED, *settings, *arguments])[0]
    model = [s for s in settings if s.startswith("--model")]
    assert_parity(got, reference(pool, precision, *model), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("layout", "backend"),
    [("fsdp2", "aot_eager"), ("one", "inductor"), ("fsdp2+tp2", "inductor"), ("cp2+tp2", "aot_eager")],
)
@pytest.mark.slow
def test_compiled_chunks_are_graphs_whatever_their_lengths(pool: WorkerPool, layout: str, backend: str) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    settings = [PRECISION, CHUNKED, f"--compile.backend={backend}", *arguments]
    results = pool.run(world_size, compiled_case, settings)
    assert_parity(results[0][0], reference(pool, PRECISION), 1e-10)
    for _, counts in results:
        # All layers, and the function of a chunk; ranks that have parts of the vocabulary have two of them.
        assert counts["stats"]["unique_graphs"] == 1 + (2 if "tp2" in layout else 1)
        assert not counts.get("graph_break")


def broken_case(arguments: list[str]) -> Record:
    """A run in which each rank takes its part of the vocabulary for the first one."""
    with mock.patch.object(chunked_loss.Chunks, "first_label", return_value=0):
        return run_layout(arguments)


def test_a_wrong_part_of_the_vocabulary_is_seen(pool: WorkerPool) -> None:
    """Negative control."""
    world_size, arguments = LAYOUTS["tp2"]
    broken = pool.run(world_size, broken_case, [PRECISION, CHUNKED, *arguments])[0]
    with pytest.raises(AssertionError, match="gradient of output"):
        assert_parity(broken, reference(pool, PRECISION), 1e-3)


def calls_case(arguments: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Count the calls of each function of a chunk, in a training step and in a forward without gradients."""
    calls: Counter[str] = Counter()

    def counted(options: object) -> chunked_loss_functions.ChunkFunctions:
        def of(name: str) -> Any:
            def call(*args: Any) -> Any:
                calls[name] += 1
                return getattr(chunked_loss_functions, f"chunk_{name}")(*args)

            return call

        return chunked_loss_functions.ChunkFunctions(of("statistics"), of("gradient"), of("at_once"))

    with mock.patch.object(chunked_loss_functions.ChunkFunctions, "of", counted), trainer_of(arguments) as trainer:
        trainer.train_step(1)
        step_calls = Counter(calls)
        calls.clear()
        if trainer.pipeline is None:
            (model,), (batch,) = trainer.model_parts, trainer.data.take()[:1]
            with torch.no_grad(), trainer.task.batch_context(batch, trainer.model_parts) as share:
                trainer.task.losses(model, model(share.inputs, **share.arguments), share.targets)
        return step_calls, Counter(calls)


@pytest.mark.parametrize("layout", ["fsdp2", "cp2", "tp2"])
def test_a_step_makes_the_logits_once_and_validation_no_gradient(pool: WorkerPool, layout: str) -> None:
    """If ranks have parts of the vocabulary, a step computes the logits twice."""
    world_size, arguments = LAYOUTS[layout]
    step_calls, without = pool.run(world_size, calls_case, [PRECISION, CHUNKED, *arguments])[0]
    assert step_calls.keys() == ({"statistics", "gradient"} if layout == "tp2" else {"at_once"})
    assert without.keys() == {"statistics"}


def test_a_pipeline_makes_no_gradient_in_the_forward(pool: WorkerPool) -> None:
    """Several forwards wait for their backward, each with a sum as large as the weight."""
    world_size, arguments = LAYOUTS["pp2"]
    step_calls, _ = pool.run(world_size, calls_case, [PRECISION, CHUNKED, *arguments])[-1]
    assert step_calls["statistics"] == step_calls["gradient"] > 0 == step_calls["at_once"]


# ---- communication


class Collectives(TorchDispatchMode):
    """Counts collectives by name and elements of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does inside comes here, too
        name = func.name()
        if name.startswith("c10d::"):
            self.seen[name.removeprefix("c10d::").strip("_"), args[0].numel() if torch.is_tensor(args[0]) else 0] += 1
        return func(*args, **(kwargs or {}))


def collectives_case(arguments: list[str]) -> tuple[Counter[tuple[str, int]], Counter[str], int]:
    """Collectives of forward and backward of one micro-batch; our own ones; elements of the output's weight."""
    with trainer_of(arguments) as trainer:
        (batch,) = trainer.data.take()
        valid = torch.tensor(7)
        exchange.calls.clear()
        with Collectives() as collectives:
            trainer.forward_backward(batch, valid, last=True)
        (model,) = trainer.model_parts
        return collectives.seen, Counter(exchange.calls), model.output.weight.numel()


ONE_BATCH = "--training.global_batch_size=4"


@pytest.mark.parametrize("reshard", [[ALWAYS], *slow([])], ids=["always", "default"])
def test_fsdp_gathers_the_weight_once_and_reduces_its_gradient_once(pool: WorkerPool, reshard: list[str]) -> None:
    """The number does not grow with the chunks: 7 chunks, one chunk, and no chunks have the same collectives."""
    world_size, arguments = LAYOUTS["fsdp2"]
    chunk_counts = [
        pool.run(
            world_size,
            collectives_case,
            [PRECISION, ONE_BATCH, f"--training.loss_chunk_tokens={tokens}", *arguments, *reshard],
        )[0]
        for tokens in (5, 32, 0)
    ]
    (seen, _, elements), *others = chunk_counts
    gathers = sum(n for (name, size), n in seen.items() if "allgather" in name and size == elements)
    reductions = sum(n for (name, size), n in seen.items() if "reduce_scatter" in name and size == elements // 2)
    # The embedding has as many elements, and is gathered for the forward; its backward does not need it.
    assert (gathers, reductions) == (2 + len(reshard) * 1 + 1, 2), seen
    assert all(other[0] == seen for other in others)


def test_the_parts_of_the_vocabulary_meet_in_one_small_message(pool: WorkerPool) -> None:
    world_size, arguments = LAYOUTS["tp2"]
    settings = [PRECISION, "--training.global_batch_size=2", *arguments]
    seen, ours, _ = pool.run(world_size, collectives_case, [*settings, CHUNKED])[0]
    assert ours["all_gather"] == 1
    logits = 2 * 16 * 128
    assert max(size for _, size in seen) < logits  # hidden states, (2, 16, 64), are the largest
    assert not any(name.startswith("allreduce") for name, _ in seen)


def settled_case(arguments: list[str]) -> tuple[int, int, float]:
    """All-reduces of `settle_gradients`; how many gradients changed; their error against DTensor's own sums."""
    with trainer_of(arguments) as trainer:
        (batch,) = trainer.data.take()
        trainer.forward_backward(batch, torch.tensor(7), last=True)
        parameters = trainer.parameters
        partial = [p for p in parameters if isinstance(p, DTensor) and any(x.is_partial() for x in p.grad.placements)]
        wanted = [p.grad.redistribute(placements=p.placements).to_local() for p in partial]
        exchange.calls.clear()
        with Collectives() as collectives:
            settle_gradients(parameters)
        assert all(p.grad.placements == p.placements for p in partial)
        errors = [(p.grad.to_local() - x).abs().max().item() for p, x in zip(partial, wanted, strict=True)]
        assert sum(collectives.seen.values()) == exchange.calls["all_reduce"]
        return exchange.calls["all_reduce"], len(partial), max(errors)


def test_gradients_of_norms_are_settled_in_one_message(pool: WorkerPool) -> None:
    """Under FSDP it sums these parts itself, where it reduces a layer's gradients."""
    world_size, arguments = LAYOUTS["tp2"]
    results = pool.run(world_size, settled_case, [PRECISION, "--training.global_batch_size=2", *arguments])
    norms = 2 * 2 + 1
    assert [(calls, changed) for calls, changed, _ in results] == [(1, norms)] * world_size
    assert max(error for _, _, error in results) == 0

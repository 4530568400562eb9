"""Laws of torch.compile: every gradient is that of the single eager process, and all blocks share one graph."""

import contextlib
import io
from pathlib import Path
from unittest import mock

import pytest
import torch

import train
from tests.distributed.harness import Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, reference
from trainer.distributed import compile as compiling

PRECISION = "--training.dtype=float64"
OP = ["--activation_checkpoint.mode=selective"]
FULL = ["--activation_checkpoint.mode=full"]
# What inductor makes differs by layout, and takes it many seconds; what is traced does not.
CASES = [
    ("one", "eager", FULL),
    ("fsdp2", "inductor", []),
    ("fsdp2", "inductor", OP),
    ("tp2", "inductor", []),
    ("cp2", "inductor", OP),
    ("fsdp2+tp2", "aot_eager", []),
    ("fsdp2+tp2", "aot_eager", OP),
]
SLOW = [
    ("one", "inductor", []),
    ("cp2+tp2", "aot_eager", FULL),
    ("fsdp2+tp2", "inductor", OP),
    ("fsdp2+cp2+tp2", "aot_eager", OP),
]


def compiled_case(arguments: list[str], wait: bool = True) -> tuple[Record, dict[str, dict[str, int]]]:
    """A run, and what the compiler counted; without `wait`, the embedding's result stays asynchronous."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    waiting = compiling._wait_inside_autograd if wait else lambda _module, _args, output: output
    with mock.patch.object(compiling, "_wait_inside_autograd", waiting):
        record = run_layout(["--compile.enable", *arguments])
    return record, {name: dict(counts) for name, counts in counters.items()}


@pytest.mark.parametrize(
    ("layout", "backend", "checkpointing"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else [], id="-".join([*case[:2], *case[2]]))
        for case in CASES + SLOW
    ],
)
def test_every_gradient_is_that_of_one_eager_process(
    pool: WorkerPool, layout: str, backend: str, checkpointing: list[str]
) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    settings = [PRECISION, f"--compile.backend={backend}", *checkpointing, *arguments]
    results = pool.run(world_size, compiled_case, settings)
    assert_parity(results[0][0], reference(pool, PRECISION), 1e-10)
    for _, counts in results:  # over all layers and steps
        assert counts["stats"]["unique_graphs"] == 1
        assert not counts.get("graph_break")
        assert not counts.get("recompiles")


DOCUMENTS = ["--training.attention_mask=document", "--parallelism.context_parallel_load_balancer=balanced"]
WINDOWS = ["--model.sliding_window=5", "--model.sliding_window_every=2"]


@pytest.mark.parametrize(
    ("layout", "backend", "settings", "graphs"),
    [
        ("cp2", "inductor", [*DOCUMENTS, *OP], 1),
        ("cp2+tp2", "aot_eager", [*DOCUMENTS, "--parallelism.context_parallel_method=all_to_all"], 1),
        # A layer with a window and one without are two graphs, however many layers and steps there are.
        ("cp2", "aot_eager", [*WINDOWS, "--parallelism.context_parallel_method=all_gather", *FULL], 2),
    ],
)
def test_plans_that_change_every_step_are_not_compiled_again(
    pool: WorkerPool, layout: str, backend: str, settings: list[str], graphs: int
) -> None:
    """Documents lie elsewhere in every batch: masks, layouts and plans change, and the graph does not."""
    world_size, arguments = LAYOUTS[layout]
    results = pool.run(world_size, compiled_case, [PRECISION, f"--compile.backend={backend}", *settings, *arguments])
    mask = [s for s in settings if "mask" in s or "window" in s]
    assert_parity(results[0][0], reference(pool, PRECISION, *mask), 1e-10)
    for _, counts in results:
        assert counts["stats"]["unique_graphs"] == graphs
        assert not counts.get("graph_break")


def test_without_the_wait_the_gradient_of_the_embedding_is_lost(pool: WorkerPool) -> None:
    """The negative control: TP + FSDP + compile train on, and the embedding learns nothing."""
    world_size, arguments = LAYOUTS["fsdp2+tp2"]
    settings = [PRECISION, "--compile.backend=aot_eager", *arguments]
    broken = pool.run(world_size, compiled_case, settings, False)[0][0]
    assert not broken.gradients[0]["tok_embeddings.weight"].any()
    with pytest.raises(AssertionError, match="step 1 gradient of tok_embeddings"):
        assert_parity(broken, reference(pool, PRECISION), 1e-3)


def no_compiler_case(folder: str) -> tuple[int, str]:
    import torch._inductor.config

    stderr = io.StringIO()
    no_compiler = mock.patch.object(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with no_compiler, contextlib.redirect_stderr(stderr):
        code = train.main(["--compile.enable", f"--job.dump_folder={folder}"])
    return code, stderr.getvalue()


def test_a_machine_without_a_compiler_is_one_sentence_before_training(pool: WorkerPool, tmp_path: Path) -> None:
    code, error = pool.run(1, no_compiler_case, str(tmp_path))[0]
    assert code == 2
    assert error.startswith("error: compile.backend = 'inductor' needs a C++ compiler")
    assert "aot_eager" in error
    assert error.count("\n") == 1

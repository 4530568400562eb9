"""Laws of torch.compile: every gradient equals the single eager process, and all blocks share one graph."""

import contextlib
import io
import itertools
import os
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import train
from longshard.sharding import exchange
from tests.distributed import harness
from tests.distributed.harness import Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS, reference
from trainer.config.loader import parse_command_line
from trainer.job.transforms import resolve_compilation
from trainer.runtime.console import logger
from trainer.transforms import compile as compiling

PRECISION = "--training.dtype=float64"
OP = ["--activation_checkpoint.mode=selective"]
FULL = ["--activation_checkpoint.mode=full"]
LOSS = 1  # graph of its own
CASES = [
    ("fsdp2+tp2", "aot_eager", OP),
    ("cp2", "inductor", OP),
    ("one", "eager", FULL),
    ("fsdp2", "inductor", OP),
    ("fsdp2", "inductor", []),
    ("tp2", "inductor", []),
    ("fsdp2+tp2", "aot_eager", []),
    ("one", "inductor", []),
    ("cp2+tp2", "aot_eager", FULL),
    ("fsdp2+tp2", "inductor", OP),
    ("fsdp2+cp2+tp2", "aot_eager", OP),
]


def compiled_case(arguments: list[str], wait: bool = True) -> tuple[Record, dict[str, dict[str, int]]]:
    """Return the record of a run and the compiler's counters. wait: whether the embedding's result is waited for."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    waiting = compiling._wait_inside_autograd if wait else lambda _module, _args, output: output
    with mock.patch.object(compiling, "_wait_inside_autograd", waiting):
        record = run_layout(["--compile.enable", *arguments])
    return record, {name: dict(counts) for name, counts in counters.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "backend", "checkpointing"),
    [pytest.param(*case, id="-".join([*case[:2], *case[2]])) for case in CASES],
)
def test_every_gradient_is_that_of_one_eager_process(
    pool: WorkerPool, layout: str, backend: str, checkpointing: list[str]
) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    settings = [PRECISION, f"--compile.backend={backend}", *checkpointing, *arguments]
    results = pool.run(world_size, compiled_case, settings)
    assert_parity(results[0][0], reference(pool, PRECISION), 1e-10)
    for _, counts in results:  # over all layers and steps
        assert counts["stats"]["unique_graphs"] == 1 + LOSS
        assert not counts.get("graph_break")
        assert not counts.get("recompiles")


PARTS = "--activation_checkpoint.mlp_chunk_tokens"
OFFLOADED = ["--activation_checkpoint.offload=inputs", "--activation_checkpoint.offload_keep_last=0"]
ATTENTION, PART = 1, 2  # a part of a network without gradients, and with them


@pytest.mark.parametrize(
    ("layout", "backend", "settings"),
    [
        ("one", "aot_eager", [f"{PARTS}=6", *FULL]),
        pytest.param("fsdp2+cp2+tp2", "aot_eager", [f"{PARTS}=6", *FULL], marks=pytest.mark.slow),
        pytest.param("fsdp2", "inductor", [f"{PARTS}=6", *FULL, *OFFLOADED], marks=pytest.mark.slow),
        pytest.param("cp2", "inductor", [f"{PARTS}=8"], marks=pytest.mark.slow),
    ],
)
def test_attention_and_the_parts_of_a_network_are_graphs_of_their_own(
    pool: WorkerPool, layout: str, backend: str, settings: list[str]
) -> None:
    """One for all layers, parts and lengths of parts."""
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    results = pool.run(world_size, compiled_case, [PRECISION, f"--compile.backend={backend}", *settings, *arguments])
    assert_parity(results[0][0], reference(pool, PRECISION), 1e-10)
    for _, counts in results:
        assert not counts.get("graph_break")
        assert not counts.get("recompiles")
        assert counts["stats"]["unique_graphs"] == ATTENTION + PART + LOSS


DOCUMENTS = ["--training.attention_mask=document", "--parallelism.context_parallel_load_balancer=balanced"]
KEPT = ["--parallelism.context_parallel_method=all_to_all", "--parallelism.context_parallel_keep_exchanged"]
WINDOWS = ["--model.sliding_window=5", "--model.sliding_window_every=2"]


@pytest.mark.parametrize(
    ("layout", "backend", "settings", "graphs"),
    [
        pytest.param("cp2", "inductor", [*DOCUMENTS, *OP], 1, marks=pytest.mark.slow),
        pytest.param(
            "cp2+tp2",
            "aot_eager",
            [*DOCUMENTS, "--parallelism.context_parallel_method=all_to_all"],
            1,
            marks=pytest.mark.slow,
        ),
        # What an exchange of heads keeps has another size in each batch.
        ("cp2", "aot_eager", [*DOCUMENTS, *KEPT, *OP], 1),
        pytest.param("cp2", "inductor", [*DOCUMENTS, *KEPT], 1, marks=pytest.mark.slow),
        pytest.param("cp2+tp2", "inductor", [*KEPT, *FULL], 1, marks=pytest.mark.slow),
        # A layer with a window and one without are two graphs, however many layers and steps there are.
        pytest.param(
            "cp2",
            "aot_eager",
            [*WINDOWS, "--parallelism.context_parallel_method=all_gather", *FULL],
            2,
            marks=pytest.mark.slow,
        ),
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
        assert counts["stats"]["unique_graphs"] == graphs + LOSS
        assert not counts.get("graph_break")


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 12), reason="PyTorch 2.11 raises an error of its own instead")
def test_without_the_wait_the_gradient_of_the_embedding_is_lost(pool: WorkerPool) -> None:
    """The negative control: TP + FSDP + compile train on, and the embedding learns nothing."""
    world_size, arguments = LAYOUTS["fsdp2+tp2"]
    settings = [PRECISION, "--compile.backend=aot_eager", *arguments]
    broken = pool.run(world_size, compiled_case, settings, False)[0][0]
    assert not broken.gradients[0]["tok_embeddings.weight"].any()
    with pytest.raises(AssertionError, match="step 1 gradient of tok_embeddings"):
        assert_parity(broken, reference(pool, PRECISION), 1e-3)


BUDGET = ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--compile.backend=aot_eager"]


def kept_case(arguments: list[str]) -> tuple[int, Counter[str]]:
    """Bytes kept for the backward in one step, without parameters, and the collectives of our own."""
    torch._dynamo.reset()
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no other takes its place

    def keep(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter):
            storage = (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()
            kept[storage.data_ptr()] = storage
        return x

    exchange.calls.clear()
    with mock.patch.object(harness, "STEPS", 1), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run_layout([PRECISION, *arguments])
    return sum(storage.nbytes() for storage in kept.values()), Counter(exchange.calls)


def test_a_smaller_budget_keeps_less_and_attention_is_not_communicated_again(pool: WorkerPool) -> None:
    cp2 = LAYOUTS["cp2"][1]
    everything, calls = pool.run(2, kept_case, ["--compile.enable", "--compile.backend=aot_eager", *cp2])[0]
    some, calls_some = pool.run(2, kept_case, [*BUDGET, *cp2, "--activation_checkpoint.memory_budget=0.7"])[0]
    little, calls_little = pool.run(2, kept_case, [*BUDGET, *cp2, "--activation_checkpoint.memory_budget=0.1"])[0]
    assert little < some < everything
    assert calls == calls_some == calls_little


@pytest.mark.slow
def test_the_compiler_recomputes_every_second_layer_of_tensor_parallelism(pool: WorkerPool) -> None:
    """Recomputed blocks and other blocks are two graphs; kept memory lies halfway between recomputing all and none."""
    arguments = ["--compile.enable", "--compile.backend=aot_eager", *LAYOUTS["tp2"][1]]
    selective = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"]
    kept = [pool.run(2, kept_case, [*arguments, *options])[0][0] for options in (FULL, selective, [])]
    assert kept[0] < kept[1] < kept[2]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2, rel=0.1)
    record, counts = pool.run(2, compiled_case, [PRECISION, "--compile.backend=aot_eager", *arguments, *selective])[0]
    assert_parity(record, reference(pool, PRECISION), 1e-10)
    assert counts["stats"]["unique_graphs"] == 2 + LOSS


@pytest.mark.slow
def test_the_compiler_recomputes_whole_layers_of_tensor_parallelism(pool: WorkerPool) -> None:
    """`full` keeps as little with PyTorch's own attention as with planned attention, and trains the same."""
    tp2, window = LAYOUTS["tp2"][1], "--model.sliding_window=15"  # of 16 tokens: one pair is hidden
    full, compiled = "--activation_checkpoint.mode=full", ["--compile.enable", "--compile.backend=aot_eager"]
    everything, _ = pool.run(2, kept_case, [*compiled, *tp2])[0]
    by_compiler, _ = pool.run(2, kept_case, [full, *compiled, *tp2])[0]
    by_checkpoints, _ = pool.run(2, kept_case, [full, *compiled, *tp2, window])[0]
    assert by_compiler < 1.1 * by_checkpoints < everything
    assert_parity(pool.run(2, run_layout, [PRECISION, full, *compiled, *tp2])[0], reference(pool, PRECISION), 1e-10)


def recompiled_case(folder: str, new: int) -> list[str]:
    """Warnings of a run of four steps whose compiler finds `new` graphs after each."""
    messages: list[str] = []
    arguments = ["--compile.enable", "--compile.backend=eager", "--training.steps=4", f"--job.dump_folder={folder}"]
    counted = mock.patch.object(compiling, "compiled_graphs", itertools.count(1, new).__next__)
    with counted, mock.patch.object(logger, "warning", messages.append):
        assert train.main([*harness.BASE, *arguments, "--training.dataset=python_stdlib"]) == 0
    return messages


def test_graphs_that_are_compiled_after_the_first_steps_are_told(pool: WorkerPool, tmp_path: Path) -> None:
    messages = pool.run(1, recompiled_case, str(tmp_path / "new"), 2)[0]
    assert [message.split(" were")[0] for message in messages] == ["step 3: 2 graph(s)", "step 4: 2 graph(s)"]
    assert pool.run(1, recompiled_case, str(tmp_path / "none"), 0)[0] == []


def counter_case() -> list[int]:
    before, seen = compiling.compiled_graphs(), []
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for rows in (2, 2, 3):
        double(torch.ones(rows))
        seen.append(compiling.compiled_graphs() - before)
    return seen


def cached_case(folder: str, arguments: list[str]) -> tuple[Record, int]:
    """A run with the compiler's caches in a folder, and how many graphs it found there."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        record = run_layout(["--compile.enable", "--compile.backend=inductor", *arguments])
    return record, counters["aot_autograd"]["autograd_cache_hit"]


CACHED = pytest.mark.skipif(torch.__version__ < (2, 13), reason="PyTorch 2.11 and 2.12 find no code of an earlier run")


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([("tp2", 0), ("tp2", 1)], id="another rank", marks=[CACHED, pytest.mark.slow]),
        pytest.param([("tp2", 0), ("fsdp2+tp2", 0)], id="another job", marks=pytest.mark.slow),
    ],
)
def test_code_that_another_compiled_is_not_taken(pool: WorkerPool, tmp_path: Path, runs: list[tuple[str, int]]) -> None:
    """The caches' own key knows neither the rank's part of the vocabulary nor the names of its groups."""
    loss = [PRECISION, "--compile.components=loss"]
    for layout, hits in runs:
        world_size, arguments = LAYOUTS[layout]
        results = pool.run(world_size, cached_case, str(tmp_path), [*loss, *arguments])
        assert_parity(results[0][0], reference(pool, PRECISION), 1e-10)
        assert [hits_of_rank for _, hits_of_rank in results] == [hits] * world_size


@pytest.mark.parametrize(("rank", "groups"), [(1, "2 3"), (0, "2 4")], ids=["another rank", "another job"])
def test_the_key_of_the_caches_names_rank_and_groups(rank: int, groups: str) -> None:
    """The key keeps the user's tag, and the same job has the same key."""
    keys = []
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for job in ((0, "2 3"), (rank, groups), (0, "2 3")):
            dims = mock.Mock(rank=lambda _, job=job: job[0], group_names=lambda job=job: job[1])
            compiling.keep_caches_apart(dims)
            keys.append(torch.compiler.config.cache_key_tag)
    assert all(key.startswith("mine ") for key in keys)
    assert keys[0] == keys[2] != keys[1]


def test_graphs_are_counted(pool: WorkerPool) -> None:
    assert pool.run(1, counter_case)[0] == [1, 1, 2]


def settings_case() -> tuple[dict[str, bool], bool, float]:
    """Return the options of torch.compile for a function, and the compiler's settings in the context of a step."""
    words = [
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.enable_async_tensor_parallel",
        *BUDGET,
        "--compile.backend=inductor",
    ]
    config = parse_command_line([*words, "--float8.enable", "--float8.recipe_name=rowwise"]).config
    compilation = resolve_compilation(config, fixed_shapes=False, splits_backward=True, planned_attention=False)
    with mock.patch.object(torch, "compile") as compile_:
        compiling.compiled_loss(max, compilation)
    functorch = torch._functorch.config
    with compiling.compiler_settings(compilation):
        seen = functorch.donated_buffer, functorch.activation_memory_budget
        longer = torch.compile(lambda x, name: x + len(name), backend="eager", fullgraph=True)
        for length in range(12):  # a graph for each name: more than the 8 that PyTorch allows
            longer(torch.ones(2), "a" * length)
    assert functorch.activation_memory_budget == 1.0
    return compile_.call_args.kwargs["options"], *seen


def test_the_compiler_is_told_of_overlap_split_backwards_and_budgets(pool: WorkerPool) -> None:
    options = {"_micro_pipeline_tp": True, "emulate_precision_casts": True}
    assert pool.run(1, settings_case)[0] == (options, False, 0.5)


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

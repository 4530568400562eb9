"""Law: every layout gives the losses, the gradient of every parameter, the norm and the weights of one process."""

from functools import lru_cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.harness import BASE, Record, assert_parity, resolved, run_layout
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.config.loader import parse_command_line

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def degrees(dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1, pp: int = 1) -> list[str]:
    return [
        f"--parallelism.pipeline_parallel_degree={pp}",
        f"--parallelism.data_parallel_replicate_degree={dp_replicate}",
        f"--parallelism.data_parallel_shard_degree={dp_shard}",
        f"--parallelism.context_parallel_degree={cp}",
        f"--parallelism.tensor_parallel_degree={tp}",
    ]


ONE_ROW = "--training.local_batch_size=1"
LAYOUTS = {
    "fsdp2": (2, degrees(dp_shard=2)),
    "ddp2": (2, degrees(dp_replicate=2)),
    "tp2": (2, degrees(tp=2)),
    "fsdp4": (4, degrees(dp_shard=4)),
    "ddp4": (4, degrees(dp_replicate=4)),
    "tp4": (4, degrees(tp=4)),
    "hsdp2x2": (4, degrees(dp_replicate=2, dp_shard=2)),
    "fsdp2+tp2": (4, degrees(dp_shard=2, tp=2)),
    "ddp2+tp2": (4, degrees(dp_replicate=2, tp=2)),
    "hsdp2x2+tp2": (8, degrees(dp_replicate=2, dp_shard=2, tp=2)),
    "fsdp2+tp4": (8, degrees(dp_shard=2, tp=4)),
    "fsdp8": (8, [*degrees(dp_shard=8), ONE_ROW]),
    "hsdp2x4": (8, [*degrees(dp_replicate=2, dp_shard=4), ONE_ROW]),
    "tp8": (8, degrees(tp=8)),
    "cp2": (2, degrees(cp=2)),
    "cp4": (4, degrees(cp=4)),
    "cp8": (8, degrees(cp=8)),
    "fsdp2+cp2": (4, degrees(dp_shard=2, cp=2)),
    "ddp2+cp2": (4, degrees(dp_replicate=2, cp=2)),
    "cp2+tp2": (4, degrees(cp=2, tp=2)),
    "hsdp2x2+cp2": (8, degrees(dp_replicate=2, dp_shard=2, cp=2)),
    "fsdp2+cp2+tp2": (8, degrees(dp_shard=2, cp=2, tp=2)),
    "ddp2+cp2+tp2": (8, degrees(dp_replicate=2, cp=2, tp=2)),
    "fsdp2+cp4": (8, degrees(dp_shard=2, cp=4)),
    "cp4+tp2": (8, degrees(cp=4, tp=2)),
    "pp2": (2, degrees(pp=2)),
    "ddp2+pp2": (4, degrees(dp_replicate=2, pp=2)),
    "fsdp2+pp2": (4, degrees(dp_shard=2, pp=2)),
    "cp2+pp2": (4, degrees(cp=2, pp=2)),
    "tp2+pp2": (4, degrees(tp=2, pp=2)),
    "fsdp2+cp2+pp2": (8, degrees(dp_shard=2, cp=2, pp=2)),
    "fsdp2+tp2+pp2": (8, degrees(dp_shard=2, tp=2, pp=2)),
    "cp2+tp2+pp2": (8, degrees(cp=2, tp=2, pp=2)),
}
# What every commit runs in float32; in float64 the rows of test_pairs.py run there.
QUICK_FLOAT32 = {"tp2", "ddp2+tp2", "fsdp2+tp2", "cp2", "pp2"}
ONLY_HERE = {
    "fsdp4",
    "ddp4",
    "tp4",
    "fsdp2+tp4",
    "fsdp8",
    "hsdp2x4",
    "tp8",
    "cp8",
    "ddp2+cp2+tp2",
    "fsdp2+cp4",
    "cp4+tp2",
}
QUICK_FLOAT64: set[str] = set()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_runs_on_gpus_compute_in_the_type_of_their_tolerance(dtype: str) -> None:
    config = parse_command_line([*BASE, "--model.flavor=debugmodel", f"--training.dtype={dtype}"]).config
    job = resolved(config, SimpleNamespace(world_size=1, device=torch.device("cuda")))
    assert job.compute_dtype == dtype


@lru_cache
def reference(pool: WorkerPool, *arguments: str) -> Record:
    """The single process, with the rows of one step all in one process."""
    return pool.run(1, run_layout, list(arguments))[0]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(layout, dtype, marks=[] if layout in quick else [pytest.mark.slow])
        for dtype, layouts, quick in (
            ("float32", set(LAYOUTS), QUICK_FLOAT32),
            ("float64", ONLY_HERE, QUICK_FLOAT64),
        )
        for layout in sorted(layouts)
    ],
)
def test_layout_equals_single_process(pool: WorkerPool, layout: str, dtype: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    precision = f"--training.dtype={dtype}"
    got = pool.run(world_size, run_layout, [precision, *arguments])
    assert_parity(got[0], reference(pool, precision), TOLERANCE[dtype])


def test_the_update_of_cpus_equals_single_process(pool: WorkerPool) -> None:
    """By lists of parameters, which is the default there: the host reads the norm before it clips."""
    settings = ["--training.dtype=float32", "--optimizer.implementation=foreach"]
    got = pool.run(2, run_layout, [*settings, *LAYOUTS["cp2"][1]])[0]
    assert_parity(got, reference(pool, *settings), TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ("hsdp2x2", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(("fsdp2", "ddp2"), (1, 4))),
        pytest.param("hsdp2x2", 2, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_do_not_change_the_step(pool: WorkerPool, layout: str, rows: int) -> None:
    """Steps of 8 rows: with 4 on 2 ranks, and with 2 on 4, nothing is accumulated."""
    world_size, arguments = LAYOUTS[layout]
    settings = ["--training.dtype=float64", *arguments]
    many = pool.run(world_size, run_layout, [*settings, f"--training.local_batch_size={rows}"])[0]
    assert_parity(many, reference(pool, "--training.dtype=float64"), 1e-10)


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        ("fsdp2+cp2", 4),
        *slow(("hsdp2x2", 2), ("tp2", None), ("fsdp2", 2), ("ddp2", 1), ("fsdp2+tp2", None), ("cp4", 4)),
    ],
)
def test_each_rank_holds_its_share(pool: WorkerPool, layout: str, share: int | None) -> None:
    """A mesh of the wrong shape trains alike but holds too much: FSDP given a 2-D mesh is HSDP."""
    world_size, arguments = LAYOUTS[layout]
    got = pool.run(world_size, run_layout, ["--training.dtype=float64", *arguments])
    whole = sum(weight.numel() for weight in got[0].weights.values())
    norms = sum(weight.numel() for weight in got[0].weights.values() if weight.ndim == 1)
    for record in got:
        if share is not None:
            assert record.local_elements == whole // share
        else:  # norms are repeated over tp
            dp = 2 if layout == "fsdp2+tp2" else 1
            assert record.local_elements == (whole - norms) // world_size + norms // dp


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp4", "cp2", "fsdp2+cp2", "cp2+tp2"])
@pytest.mark.parametrize(
    "settings",
    [
        ["--training.seq_len=15"],
        ["--parallelism.context_parallel_load_balancer=contiguous"],
        ["--parallelism.context_parallel_load_balancer=contiguous", "--training.seq_len=14"],
        ["--training.seq_len=6"],
    ],
)
def test_uneven_shards_and_other_layouts(pool: WorkerPool, layout: str, settings: list[str]) -> None:
    """Lengths that do not divide, down to fewer tokens than pieces; with tp, each rank's length is a multiple of it."""
    world_size, arguments = LAYOUTS[layout]
    settings = [s.replace("=15", "=14") for s in settings] if "tp" in layout else settings
    precision = "--training.dtype=float64"
    got = pool.run(world_size, run_layout, [precision, *settings, *arguments])[0]
    seq_len = [s for s in settings if "seq_len" in s]
    assert_parity(got, reference(pool, precision, *seq_len), 1e-10)


PLANNED = {
    "all_gather": ["--parallelism.context_parallel_method=all_gather"],
    "all_gather, 1 head at a time": [
        "--parallelism.context_parallel_method=all_gather",
        "--parallelism.context_parallel_heads_per_pass=1",
    ],
    "all_to_all": ["--parallelism.context_parallel_method=all_to_all"],
    "all_to_all, 1 head at a time": [
        "--parallelism.context_parallel_method=all_to_all",
        "--parallelism.context_parallel_heads_per_pass=1",
    ],
    "all_to_all, 1 query head at a time": [
        "--parallelism.context_parallel_method=all_to_all",
        "--parallelism.context_parallel_query_heads_per_pass=1",
    ],
    "all_to_all, kept": [
        "--parallelism.context_parallel_method=all_to_all",
        "--parallelism.context_parallel_keep_exchanged",
    ],
    "hybrid": [
        "--parallelism.context_parallel_method=hybrid",
        "--parallelism.context_parallel_hybrid_degrees",
        "2",
        "2",
    ],
    "auto": ["--parallelism.context_parallel_method=auto"],
    "math": ["--parallelism.context_parallel_kernel=math"],
    "checked": ["--comm.check_consistency"],
}
MASKED = {
    "sinks, documents": ["--model.attention_sinks", "--training.attention_mask=document"],
    "documents": ["--training.attention_mask=document"],
    "window": ["--model.sliding_window=5"],
    "documents, window in every 2nd layer": [
        "--training.attention_mask=document",
        "--model.sliding_window=4",
        "--model.sliding_window_every=2",
    ],
}


def fits(method: str, layout: str) -> bool:
    """Hybrid divides four ranks; all_to_all on cp4+tp2 leaves a rank one key/value head, too few for passes."""
    return "cp4" in layout if method == "hybrid" else (method, layout) != ("all_to_all, 1 head at a time", "cp4+tp2")


EIGHT_RANKS = ("hsdp2x2+cp2", "fsdp2+cp2+tp2", "cp4+tp2", "fsdp2+cp4")
BALANCED = ["--parallelism.context_parallel_load_balancer=balanced"]


@pytest.mark.parametrize(
    ("method", "mask", "layout"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        for number, (method, mask) in enumerate(product(PLANNED, MASKED))
        for layouts in [[x for x in EIGHT_RANKS if fits(method, x)]]
        for case in [(method, mask, layouts[number % len(layouts)])]
    ],
)
def test_methods_and_masks_equal_single_process(pool: WorkerPool, method: str, mask: str, layout: str) -> None:
    """On eight ranks, each method and mask on some layout; with packed documents by cost, elsewhere head and tail."""
    world_size, arguments = LAYOUTS[layout]
    settings = ["--training.dtype=float64", *MASKED[mask]]
    balancer = BALANCED if mask.startswith("documents") else []
    got = pool.run(world_size, run_layout, [*settings, *PLANNED[method], *balancer, *arguments])[0]
    assert_parity(got, reference(pool, *settings), 1e-10)


@pytest.mark.parametrize("method", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("layout", [pytest.param(x, marks=pytest.mark.slow) for x in ("cp4", "fsdp2+cp2+tp2")])
def test_methods_equal_single_process_under_a_plain_causal_mask(pool: WorkerPool, method: str, layout: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    settings = ["--training.dtype=float64", "--training.seq_len=14"]
    got = pool.run(world_size, run_layout, [*settings, *PLANNED[method], *BALANCED, *arguments])[0]
    assert_parity(got, reference(pool, *settings), 1e-10)


def test_tied_weights_stay_one_parameter(pool: WorkerPool) -> None:
    model = ["--model.flavor=tiny_tied", "--training.dtype=float64"]
    got = pool.run(2, run_layout, [*model, *degrees(tp=2)])[0]
    assert_parity(got, reference(pool, *model), 1e-10)


def test_documents_and_windows_change_what_is_learnt(pool: WorkerPool) -> None:
    """Negative control: a mask that no layout applied would pass every comparison of layouts."""
    plain = reference(pool, "--training.dtype=float64")
    for mask in MASKED.values():
        masked = reference(pool, "--training.dtype=float64", *mask)
        if "--model.attention_sinks" in mask:  # another model
            assert masked.gradients[0]["layers.0.attention.sinks.weight"].any()
            continue
        with pytest.raises(AssertionError, match="gradient of"):
            assert_parity(masked, plain, 1e-3)


# Degrees that no other layout has, each with documents too: uneven shards, deep pipelines, a hybrid inside one.
DEGREES = {
    "cp3": (3, degrees(cp=3)),
    "cp6": (6, degrees(cp=6)),
    "cp3+tp2": (6, degrees(cp=3, tp=2)),
    "pp4": (4, [*degrees(pp=4), "--model.flavor=tiny4", "--training.local_batch_size=4"]),
    "pp4+cp2": (8, [*degrees(pp=4, cp=2), "--model.flavor=tiny4", "--training.local_batch_size=4"]),
    "ddp2+tp2": LAYOUTS["ddp2+tp2"],
    "hybrid 2x2+pp2": (
        8,
        [*degrees(cp=4, pp=2), *PLANNED["hybrid"], "--training.seq_len=32"],
    ),
    "auto 4": (4, [*degrees(cp=4), *PLANNED["auto"]]),
    "one, sharded over itself": (1, [*degrees(), "--training.enable_cpu_offload"]),  # every mesh of size one
}


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "documents", "documents, window in every 2nd layer"])
@pytest.mark.parametrize("layout", DEGREES)
def test_other_degrees_equal_single_process(pool: WorkerPool, layout: str, mask: str) -> None:
    world_size, arguments = DEGREES[layout]
    settings = ["--training.dtype=float64", *MASKED.get(mask, [])]
    model = [a for a in arguments if a.startswith(("--model.flavor", "--training.seq_len"))]
    got = pool.run(world_size, run_layout, [*settings, *arguments])[0]
    assert_parity(got, reference(pool, *settings, *model), 1e-10)


FAULTS = [
    ("one parameter not reduced", "fsdp2"),
    ("attention not under CP", "cp2"),
    *slow(("gradients averaged", "fsdp2"), ("labels shifted after cutting", "cp2")),
    *slow(("positions of the first rank", "cp2")),
]


@pytest.mark.parametrize(("fault", "layout"), FAULTS)
def test_negative_control(pool: WorkerPool, fault: str, layout: str) -> None:
    """A known mistake must fail the comparison: in gradients, not only in some metric."""
    settings = ["--training.dtype=float64", "--optimizer.implementation=for-loop"]
    world_size, arguments = LAYOUTS[layout]
    broken = pool.run(world_size, run_layout, [*settings, *arguments], fault)[0]
    with pytest.raises(AssertionError, match="gradient of"):
        assert_parity(broken, reference(pool, *settings), 1e-3)
    sound = pool.run(world_size, run_layout, [*settings, *arguments])[0]
    assert_parity(sound, reference(pool, *settings), 1e-10)

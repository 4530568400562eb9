"""Law: models of fields train as in one process on every layout of ranks and rows, float64 to 1e-12 of each tensor."""

from itertools import product

import pytest
import torch

from examples.fields.tests.drifting import write_drifting_fields, write_drifting_points
from tests.distributed.harness import Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve

TOLERANCE = 1e-12
DOMAIN = "--parallelism.domain_parallel_degrees"
ROWS = "--fields.rows"
LAYOUTS = {
    "2": (2, [f"{DOMAIN}=2"]),
    "2 uneven": (2, [f"{DOMAIN}=2", f"{ROWS}=11,5"]),
    "1 x 2": (2, [DOMAIN, "1", "2", ROWS, "16", "5,7"]),
    "4, one empty": (4, [f"{DOMAIN}=4", f"{ROWS}=9,0,1,6"]),
    "2 x 2 uneven": (4, [DOMAIN, "2", "2", ROWS, "9,7", "3,9"]),
    "fsdp2 + 2": (4, ["--parallelism.data_parallel_shard_degree=2", f"{DOMAIN}=2", f"{ROWS}=5,11"]),
    "hsdp + 2": (4, ["--parallelism.data_parallel_replicate_degree=2", f"{DOMAIN}=2", f"{ROWS}=3,13"]),
}
TENSOR_PARALLEL = {
    "tp2": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "tp2 + 2": (4, ["--parallelism.tensor_parallel_degree=2", f"{DOMAIN}=2", f"{ROWS}=11,5"]),
}


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_drifting_fields(tmp_path_factory.mktemp("fields") / "fields.zarr")


def arguments(model: str, path: str, *options: str) -> list[str]:
    return [
        "--job.imports=examples.fields",
        f"--model.name={model}",
        "--model.flavor=debugmodel",
        "--training.dataset=fields",
        f"--training.dataset_path={path}",
        "--training.data_streams=4",
        "--training.global_batch_size=4",
        "--training.local_batch_size=2",
        "--training.dtype=float64",
        *options,
    ]


@pytest.fixture(scope="module")
def references(pool: WorkerPool, fields: str) -> dict[str, Record]:
    return {model: pool.run(1, run_layout, arguments(model, fields))[0] for model in ("unet", "nat")}


CASES = [(model, layout) for model in ("unet", "nat") for layout in LAYOUTS] + [("nat", tp) for tp in TENSOR_PARALLEL]
QUICK = {("unet", "4, one empty"), ("nat", "tp2 + 2")}


@pytest.mark.parametrize(
    ("model", "layout"), [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_every_layout_trains_as_one_process(
    pool: WorkerPool, fields: str, references: dict[str, Record], model: str, layout: str
) -> None:
    world, options = (LAYOUTS | TENSOR_PARALLEL)[layout]
    got = pool.run(world, run_layout, arguments(model, fields, *options))
    assert_parity(got[0], references[model], TOLERANCE)
    assert got[0].local_elements < references[model].local_elements, "parameters are sharded over the domain"


def test_the_comparison_sees_averaged_gradients(pool: WorkerPool, fields: str, references: dict[str, Record]) -> None:
    got = pool.run(2, run_layout, arguments("unet", fields, *LAYOUTS["2 uneven"][1]), "gradients averaged")
    with pytest.raises(AssertionError, match="step 1 gradient"):
        assert_parity(got[0], references["unet"], TOLERANCE)


def test_validation_is_for_tokens_and_changes_nothing_here(
    pool: WorkerPool, fields: str, references: dict[str, Record]
) -> None:
    (got,) = pool.run(1, run_layout, arguments("unet", fields, "--validation.enable"))
    assert_parity(got, references["unet"], TOLERANCE)


POINTS = {
    "2 uneven": (2, [f"{DOMAIN}=2", f"{ROWS}=21,11"]),
    "4, one empty": (4, [f"{DOMAIN}=4", f"{ROWS}=17,0,1,14"]),
    "fsdp2 + 2": (4, ["--parallelism.data_parallel_shard_degree=2", f"{DOMAIN}=2", f"{ROWS}=5,27"]),
    "recomputed": (2, [f"{DOMAIN}=2", "--activation_checkpoint.mode=full"]),
}


@pytest.fixture(scope="module")
def point_run(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Record]:
    """The arguments of the model of points, and its steps in one process."""
    settings = arguments("points", write_drifting_points(tmp_path_factory.mktemp("points") / "points.zarr"))
    return settings, pool.run(1, run_layout, settings)[0]


@pytest.mark.parametrize("layout", ["4, one empty", *slow(*(name for name in POINTS if name != "4, one empty"))])
def test_points_train_as_in_one_process(pool: WorkerPool, point_run: tuple[list[str], Record], layout: str) -> None:
    settings, reference = point_run
    world, options = POINTS[layout]
    assert_parity(pool.run(world, run_layout, [*settings, *options])[0], reference, TOLERANCE)


COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
OLD_COMPILER = pytest.mark.skipif(torch.__version__ < (2, 13), reason="PyTorch 2.11 and 2.12 refuse to compile fields")
FULL = ["--activation_checkpoint.mode=full"]
SELECTIVE = ["--activation_checkpoint.mode=selective"]
KINDS = {"aot_eager": COMPILED, "inductor": ["--compile.enable"], "full": FULL, "selective": SELECTIVE}
QUICK_KINDS = {("selective", "unet")}


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param(
            *case,
            marks=[
                *([OLD_COMPILER] if case[0] == "aot_eager" else []),
                *([] if case in QUICK_KINDS else [pytest.mark.slow]),
            ],
        )
        for case in product(KINDS, ("unet", "nat"))
    ],
)
def test_compiled_and_recomputed_layers_train_as_eager_ones(
    pool: WorkerPool, fields: str, references: dict[str, Record], model: str, kind: str
) -> None:
    world, layout = LAYOUTS["2 uneven"]
    got = pool.run(world, run_layout, arguments(model, fields, *layout, *KINDS[kind]))
    assert_parity(got[0], references[model], TOLERANCE)


def test_compiled_layers_are_not_recomputed(fields: str) -> None:
    config = parse_command_line(arguments("nat", fields, *COMPILED, *FULL)).config
    with pytest.raises(ConfigError, match=r"with compile\.enable is not handled"):
        resolve(config, 1, "cpu")

"""Every feature on every layout, trained as a single process would or refused: docs/support_matrix.md says which."""

import re
from collections.abc import Iterator

import pytest

from tests.distributed.harness import BASE, TEST_FLAVORS, assert_parity, run_layout
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_parity import reference
from tests.support_matrix import FEATURES, PAGE, Cell, Record, cells, page, refusal
from trainer.models.llama3.args import FLAVORS

# What every commit runs: each layout with pipelines, each feature, and most pairs of a feature and a dimension.
QUICK = {
    "as it is": (
        *("ddp2", "fsdp2", "cp2", "tp2", "pp2", "ddp2+fsdp2", "fsdp2+cp2", "fsdp2+tp2", "cp2+tp2", "cp4"),
        *("ddp2+pp2", "fsdp2+pp2", "cp2+pp2", "tp2+pp2", "fsdp2+cp2+tp2", "fsdp2+tp2+pp2", "cp2+tp2+pp2"),
    ),
    "without gradient accumulation": ("fsdp2+pp2", "ddp2"),
    "packed documents": ("cp2+pp2",),
    "documents dealt by cost": ("fsdp2+cp2+pp2",),
    "sliding window in every 2nd layer": ("tp2+pp2",),
    "attention sinks": ("cp2+pp2",),
    "uneven shards": ("cp2+pp2",),
    "CP all_gather": ("cp2+pp2",),
    "CP all_to_all": ("ddp2+cp2",),
    "CP hybrid": ("cp4",),
    "CP contiguous": ("cp2+tp2",),
    "CP consistency checks": ("cp2+pp2",),
    "PP GPipe": ("fsdp2+pp2",),
    "PP Interleaved1F1B": ("ddp2+pp2", "pp2"),
    "PP LoopedBFS": ("tp2+pp2",),
    "PP InterleavedZeroBubble": ("fsdp2+pp2",),
    "PP ZBVZeroBubble": ("cp2+pp2",),
    "PP DualPipeV": ("pp2",),
    "PP zero bubble, compiled": ("pp2",),
    "recompute layers": ("cp2+pp2",),
    "recompute every 2nd layer": ("fsdp2+pp2",),
    "recompute operators": ("tp2+pp2",),
    "recompute within a budget": ("fsdp2", "tp2"),
    "recompute operators, zero bubble": ("pp2",),
    "compile": ("tp2+pp2",),
    "asynchronous TP": ("tp2",),
    "loss over whole logits": ("fsdp2+tp2",),
    "FSDP never reshards": ("fsdp2",),
    "FSDP always reshards": ("fsdp2+pp2",),
    "FSDP prefetches 2 layers": ("fsdp2", "fsdp2+pp2"),
    "float8, rowwise (emulated)": ("fsdp2",),
    "CPU offload": ("fsdp2",),
    "tied embeddings": ("fsdp2+tp2", "pp2"),
    "layernorm": ("fsdp2+tp2",),
    "layernorm without parameters": ("tp2+pp2",),
    "scaled RoPE": ("tp2+pp2",),
    "fused AdamW": ("fsdp2+pp2",),
    "Adam, parameter by parameter": ("fsdp2",),
}


assert {(layout, feature) for feature, layouts in QUICK.items() for layout in layouts} <= {
    (cell.layout, cell.feature) for cell in cells()
}


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """What earlier runs found; with --record-support, what this one finds is written, and the page made anew."""
    found = Record()
    yield found
    if request.config.getoption("--record-support"):
        found.save()
        PAGE.write_text(page(found))


@pytest.fixture(autouse=True)
def test_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in TEST_FLAVORS.items():
        monkeypatch.setitem(FLAVORS, name, shape)


def outcome(pool: WorkerPool, cell: Cell) -> str:
    """Train it and compare, unless it is refused."""
    if refused := refusal([*BASE, *cell.arguments], cell):
        return refused
    try:
        got = pool.run(cell.world_size, run_layout, cell.arguments)[0]
    except RankFailedError as error:
        if refused := re.search(r"^trainer\.config\.errors\.SharedConfigError: (.*)$", str(error), re.MULTILINE):
            return f"refused: {refused[1]}"
        raise
    assert_parity(got, reference(pool, *cell.reference_arguments), FEATURES[cell.feature].tolerance)
    return "tested"


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell,
            id=f"{cell.layout}-{cell.feature}",
            marks=[] if cell.layout in QUICK[cell.feature] else [pytest.mark.slow],
        )
        for cell in cells()
    ],
)
def test_a_cell_is_what_the_page_says(
    pool: WorkerPool, record: Record, cell: Cell, request: pytest.FixtureRequest
) -> None:
    recording = request.config.getoption("--record-support")
    if recording:
        record.note(cell, None)
    got = outcome(pool, cell)
    if recording:
        record.note(cell, got)
        record.save()
    assert got == record.outcome(cell)

"""Every feature on every layout, trained as a single process would or refused: docs/support_matrix.md says which."""

import re
from collections.abc import Iterator

import pytest

from tests.distributed.harness import BASE, FAMILY_FLAVORS, TEST_FLAVORS, assert_parity, run_layout
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_parity import reference
from tests.support_matrix import FEATURES, PAGE, Cell, Record, cells, page, refusal
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.families.registry import MODELS

# What every commit runs: what test_pairs.py does not combine. Cells that are refused cost nothing, and run too.
QUICK = {("cp4", "CP hybrid"), ("cp2", "CP consistency checks")}


def quick(cell: Cell) -> bool:
    refused = (Record().outcome(cell) or "").startswith("refused: ")
    return (cell.layout, cell.feature) in QUICK or (refused and cell.world_size == 2)


assert {(cell.layout, cell.feature) for cell in cells()} >= QUICK


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """Outcomes of earlier runs. With --record-support, this run's outcomes are saved and the page is rewritten."""
    outcomes = Record()
    yield outcomes
    if request.config.getoption("--record-support"):
        outcomes.save()
        PAGE.write_text(page(outcomes))


@pytest.fixture(autouse=True)
def test_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in TEST_FLAVORS.items():
        monkeypatch.setitem(FLAVORS, name, shape)
    for family, flavors in FAMILY_FLAVORS.items():
        for name, shape in flavors.items():
            monkeypatch.setitem(MODELS[family].flavors, name, shape)


def outcome(pool: WorkerPool, cell: Cell) -> str:
    """Train it and compare, unless it is refused."""
    if refused := refusal([*BASE, *cell.arguments], cell):
        return refused
    try:
        got = pool.run(cell.world_size, run_layout, cell.arguments, None, BASE)[0]
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
            marks=[] if quick(cell) else [pytest.mark.slow],
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

"""docs/support_matrix.md is what the tests found, of the cells as they are now."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.harness import TEST_FLAVORS
from tests.support_matrix import COMMAND, FEATURES, LAYOUTS, PAGE, Cell, Feature, Record, cells, page


def test_the_page_is_the_record():
    assert PAGE.read_text() == page(Record()), f"docs/support_matrix.md is stale: {COMMAND}"


def test_every_cell_has_run_as_it_is_now():
    record = Record()
    stale = [f"{cell.layout}: {cell.feature}" for cell in cells() if record.outcome(cell) is None]
    assert not stale, f"not run with these arguments; {COMMAND}"


def test_the_record_says_what_it_ran_on():
    """Those versions that are pinned; a cell names the commit of the code that it ran."""
    record = Record()
    pinned = re.search(r"^torch==(\S+)", (PAGE.parents[1] / "requirements.txt").read_text(), re.MULTILINE)[1]
    assert record.made_with["torch"].partition("+")[0] == pinned
    assert record.made_with["device"] == "CPU, gloo"
    assert record.commits()
    assert all(re.fullmatch(r"[0-9a-f]{7,40}", name) for name in record.commits()), "recorded with uncommitted changes"


def test_tolerance_and_model_are_part_of_a_cell(monkeypatch: pytest.MonkeyPatch):
    cell = Cell("fsdp2+tp2", "compile")
    before = cell.digest
    monkeypatch.setitem(FEATURES, "compile", replace(FEATURES["compile"], tolerance=1e-9))
    assert cell.digest != before
    monkeypatch.undo()
    assert cell.digest == before
    monkeypatch.setitem(TEST_FLAVORS, "tiny", replace(TEST_FLAVORS["tiny"], dim=128))
    assert cell.digest != before


def test_a_cell_that_changed_counts_as_untested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record = Record(tmp_path / "record.json")
    cell = Cell("fsdp2+tp2", "compile")
    record.note(cell, "tested")
    record.save()
    assert Record(tmp_path / "record.json").outcome(cell) == "tested"
    assert "| compile | ✓" not in page(record).split("Eight")[1]
    monkeypatch.setitem(FEATURES, "compile", Feature(("--compile.enable",)))
    assert Record(tmp_path / "record.json").outcome(cell) is None
    record.note(cell, None)
    assert "✓ |" not in page(record)


def test_each_pair_of_dimensions_and_the_triples_are_there():
    names = {frozenset(part[:-1] for part in layout.split("+")) for group in LAYOUTS for layout in group}
    dimensions = ("ddp", "fsdp", "cp", "tp", "pp")
    assert {frozenset(pair) for pair in ((a, b) for a in dimensions for b in dimensions)} <= names
    for triple in ("pp fsdp tp", "pp fsdp cp", "pp cp tp", "ddp fsdp cp", "fsdp cp tp"):
        assert frozenset(triple.split()) in names

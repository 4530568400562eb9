"""The benchmark of degrees for documents: no way is faster than equal work, schedules keep ranks apart."""

import json
from pathlib import Path

import numpy as np
import pytest

from lct_planner.timing import device
from scripts.benchmarks.document_degrees import (
    IDEAL,
    NODE,
    TABLES,
    Clock,
    balanced,
    dynamic,
    fixed,
    main,
    scheduled,
    table_of,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock(device("h100"))


def test_no_way_is_faster_than_equal_work_without_messages(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    assert main(["--ranks=16", "--tokens=24000", "--steps=1", f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == list(TABLES)
    for times in rows.values():
        assert min(times, key=times.get) == IDEAL
        assert times["fixed, assigned by cost"] <= times["fixed, as read"] * 1.001


def test_documents_of_one_length_give_every_way_equal_work(clock: Clock) -> None:
    lengths = np.full(16, 16384)
    ideal = clock.cut_evenly(lengths, 1) / 16
    rows = np.arange(16) // NODE
    assert dynamic(clock, lengths, 16, 16384) == pytest.approx(ideal, rel=1e-4)
    assert balanced(clock, lengths, np.zeros(16), 16) == pytest.approx(ideal, rel=1e-9)
    assert fixed(clock, lengths, rows) == pytest.approx(ideal, rel=0.02)


def test_messages_that_attention_does_not_hide_are_seen(clock: Clock) -> None:
    short = np.full(1024, 256)
    rows = np.zeros(1024)
    assert fixed(clock, short, rows) > 1.05 * balanced(clock, short, rows, NODE)


def test_one_long_document_takes_as_many_ranks_as_it_needs(clock: Clock) -> None:
    lengths = np.array([131072, *[1024] * 896])  # the long one has most of the work
    alone = clock.cut_evenly(lengths[:1], 1)
    assert clock.cut_evenly(lengths[:1], 8) < alone / 6
    assert dynamic(clock, lengths, 32, 32768) < alone / 8
    assert balanced(clock, lengths, np.zeros(len(lengths)), 32) < alone / 8


def test_a_schedule_ends_in_time_or_is_none() -> None:
    small = [(1, 1.0), (2, 0.5), (4, 0.25)]
    assert scheduled([small] * 4, 4, 1.0) == 1.0
    assert scheduled([small] * 5, 4, 1.0) is None
    assert scheduled([[(2, 1.0)], small, small], 4, 1.0) == 1.0
    assert scheduled([[(4, 1.0)], small], 4, 1.25) == 1.25, "only all four ranks end the second one in time"


@pytest.mark.parametrize("argv", ["--ranks=8", "--ranks=24", "--tokens=1024", "--steps=0"])
def test_bad_arguments_are_one_sentence(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_page_has_the_numbers() -> None:
    content = json.loads((ROOT / "docs" / "measurements" / "document_degrees.json").read_text())
    page = (ROOT / "docs" / "data.md").read_text()
    assert table_of(content["rows"]) in page
    assert f"    {content['command']}" in page

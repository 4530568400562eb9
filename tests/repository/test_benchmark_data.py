"""The benchmark of the data sources: its rows, and that the documentation has its numbers."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks.data import main

ROOT = Path(__file__).resolve().parents[2]


def test_every_source_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "restored by the test")
    file = tmp_path / "data.json"
    assert main(["--megabytes", "1", "--batches", "1", "--rounds", "2", "--files", "9", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    rows = {row["dataset"]: row for row in content["results"]}
    assert list(rows) == ["python_stdlib", "text", "jsonl", "tokens"]
    assert rows["text"]["documents"] == rows["python_stdlib"]["documents"] == rows["tokens"]["documents"]
    assert all(0 < low <= row["tokens_per_second"] <= high for row in rows.values() for low, high in [row["range"]])
    assert content["order"]["peak_bytes"] < 1 << 20
    assert content["start"]["files"] == 9


def test_the_documentation_has_the_numbers() -> None:
    content = json.loads((ROOT / "docs" / "measurements" / "data_cpu.json").read_text())
    page = (ROOT / "docs" / "data.md").read_text()
    for row in content["results"]:
        if row["dataset"] in ("python_stdlib", "jsonl"):  # the slowest and the fastest
            assert f"{row['tokens_per_second'] / 1e6:.1f} million" in page
    assert content["command"] in page

"""The benchmark of checkpoints: every way saves the same tensors, and its arithmetic."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from scripts.benchmarks import checkpoints as benchmark
from scripts.benchmarks.checkpoints import Times, main, rows
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.runtime.console import logger


@pytest.fixture(autouse=True)
def left_as_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    yield
    FLAVORS.pop("checkpoints", None)


def test_every_way_saves_the_same_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[tuple[bool, set[str], float]] = []

    def look(save: benchmark.Save, folder: Path, step: int) -> Times:
        save(folder, step)()
        path = folder if (folder / ".metadata").exists() else folder / f"step-{step}"
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        read = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        dcp.load(read, checkpoint_id=path, no_dist=True)
        saved.append((path == folder, set(read), sum(x.double().abs().sum().item() for x in read.values())))
        return Times(1.0, 1.0)

    monkeypatch.setattr(benchmark, "timed", look)
    file = tmp_path / "result.json"
    assert main(["--dim", "64", "--layers", "1", "--rounds", "1", "--folder", str(tmp_path), "--json", str(file)]) == 0
    assert [plain for plain, *_ in saved].count(True) == 2 * 2
    assert len(saved) == 2 * 5
    assert len({frozenset(names) for _, names, _ in saved}) == 1
    assert len({total for *_, total in saved}) == len(saved), "each save has the values of its own moment"
    result = json.loads(file.read_text())
    assert result["tensors"] == len(saved[0][1])
    assert [row["way"] for row in result["results"]] == ["plain save", "plain async_save", *benchmark.PLAIN]


def test_ratios_are_medians_of_those_of_a_round() -> None:
    plain, other = [Times(1, 1), Times(2, 2), Times(4, 4)], [Times(1, 2), Times(1, 2), Times(8, 16)]
    times = {"plain save": plain, "plain async_save": other, **dict.fromkeys(benchmark.PLAIN, other)}
    first, second, sync, *_, pinned = rows(times)
    assert (first["stalled_s"], second["on_disk_s"]) == (2, 2)
    assert (sync["stalled_ratio"], sync["stalled_ratio_range"], sync["on_disk_ratio"]) == (1.0, [0.5, 2.0], 2.0)
    assert (pinned["stalled_ratio"], pinned["on_disk_ratio_range"]) == (1.0, [1.0, 1.0])

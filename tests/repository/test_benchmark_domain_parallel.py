"""The benchmark of domain parallelism: its rows, the order of its rounds, and what its contenders compute."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scripts.benchmarks.domain_parallel import main, measure
from scripts.benchmarks.domain_parallel_ranks import Problem, Share, Whole
from scripts.benchmarks.teams import Times

SMALL = Problem("unet", 16, 1)


class FakeTeam:
    """Answers with known times, 2 s for the one process and 3 s for both ranks; remembers the calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def whole(self, name: str) -> Any:
        self.asked.append(("whole", name))
        if name == "account":
            return {"peak_bytes": 100, "bytes_sent": 0, "calls": 0}
        return Times(10.0, 10.5, 12.0, 4.0)

    def ranks(self, name: str) -> list[Any]:
        self.asked.append(("ranks", name))
        if name == "account":
            return [{"peak_bytes": 50 + rank, "bytes_sent": 7, "calls": 3 + rank} for rank in range(2)]
        return [Times(0.0, 1.0, 2.5, 2.0), Times(0.5, 1.25, 3.0, 3.0)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process only, and its threads as before afterwards."""
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def test_a_row_and_the_order_of_the_rounds() -> None:
    team = FakeTeam()
    row = measure(SMALL, 2, team)
    assert team.asked == [("whole", "account"), ("ranks", "account"), *[("whole", "run"), ("ranks", "run")] * 2]
    assert (row["model"], row["degree"], row["side"], row["ratio"]) == ("unet", 1, 16, 1.5)
    assert (row["peak_bytes"], row["whole_peak_bytes"], row["memory_ratio"]) == (51, 100, 0.51)
    assert (row["bytes_sent"], row["calls"]) == (14, 4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("model", ["unet", "nat"])
def test_one_rank_and_the_whole_compute_the_same(model: str) -> None:
    problem = Problem(model, 16, 1)
    whole, share = Whole(problem, 1), Share(problem, 1)
    assert all(one.start < one.middle < one.end and one.cpu > 0 for one in (share.run(), whole.run()))
    for ours, theirs in zip(share.model.parameters(), whole.model.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()
    account = share.account()
    assert (account["bytes_sent"], account["calls"]) == (0, 0)
    assert account["peak_bytes"] >= sum(parameter.nbytes for parameter in share.model.parameters())  # the gradients


def test_rows_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert main(["--models", "unet", "--sides", "32", "--degrees", "2", "--repeats", "1", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["command"].startswith("python scripts/benchmarks/domain_parallel.py --models unet ")
    assert {"commit", "torch", "python", "device"} <= written.keys()
    (row,) = written["results"]
    assert (row["model"], row["degree"], row["side"], row["flavor"]) == ("unet", 2, 32, "debugmodel")
    assert row["ratio"] > 0 < row["bytes_sent"]
    assert row["memory_ratio"] < 1
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--sides 0", "--sides 0"),
        ("--models unet --sides 10", "multiples of 4"),
        ("--models nat --sides 8", "sides of at least 10"),
        ("--flavor huge", "debugmodel, base"),
        ("--json /nowhere/rows.json", "/nowhere"),
    ],
)
def test_bad_arguments_are_one_sentence(argv: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1

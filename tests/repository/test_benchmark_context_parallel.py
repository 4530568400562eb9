"""The benchmark of context parallelism: its arithmetic, its rows, and the order of its rounds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import experimental

from longshard.context.execution.kernels.cpu import Math
from longshard.context.planning.mask import causal
from scripts.benchmarks import context_parallel as benchmark
from scripts.benchmarks.context_parallel import main, measure
from scripts.benchmarks.context_parallel_ranks import PEER, Share, Whole
from scripts.benchmarks.context_parallel_tiles import OneCall, Problem, Tiles, compared_tiles
from scripts.benchmarks.teams import PeakBytes, Times, compared

SMALL = Problem(64, 2, heads=4, kv_heads=2, head_dim=8)


def planned(problem: Problem, method: str) -> list[dict[str, int]]:
    """Bytes by kind that each rank's plan says it sends."""
    return [dict(costs["forward"].bytes_sent + costs["backward"].bytes_sent) for costs in problem.costs(method)]


class FakeTeam:
    """Answers with known times, 2 s for the one process and 3 s for both ranks; remembers the calls."""

    def __init__(self, problem: Problem) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.problem = problem

    def whole(self, name: str) -> Times:
        self.asked.append(("whole", name))
        return Times(10.0, 10.5, 12.0, 4.0)

    def ranks(self, name: str, method: str) -> list[Any]:
        self.asked.append((method, name))
        if name == "account" and method == PEER:
            return [{}, {}]
        if name == "account":
            peaks = [{"forward": rank, "backward": 10 + rank} for rank in range(2)]
            sent = planned(self.problem, method)
            return [{"bytes_sent": x, "peak_bytes": y} for x, y in zip(sent, peaks, strict=True)]
        return [Times(0.0, 1.0, 2.5, 2.0), Times(0.5, 1.25, 3.0, 3.0)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process only, and its threads as before afterwards."""
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


# ---- ranks against one process


def test_ratios_are_medians_of_rounds_and_cpu_time_is_of_all_ranks() -> None:
    whole = [Times(0.0, 1.0, 4.0, 8.0)] * 3
    rounds = [[Times(0.0, 1.0, end, 3.0), Times(1.0, 3.0, 2.0, 3.0)] for end in (2.0, 8.0, 6.0)]
    row = compared(whole, rounds)
    assert (row["ratio"], row["ratio_range"], row["ratio_of_fastest"]) == (1.5, [0.5, 2.0], 0.5)
    assert (row["ms"], row["whole_ms"], row["cpu_ratio"]) == (6000.0, 4000.0, 0.75)
    assert (row["forward_ratio"], row["backward_ratio"]) == (2.0, round(5 / 3, 4))  # of the slower rank


def test_rows_and_the_order_of_the_rounds() -> None:
    team = FakeTeam(SMALL)
    rows = list(measure(SMALL, ["ring", "all_to_all"], 2, team))
    one_round = [("whole", "run"), ("ring", "run"), ("all_to_all", "run")]
    assert team.asked == [("whole", "run"), ("ring", "account"), ("all_to_all", "account"), *one_round * 2]
    pairs = causal(64).work().sum()
    for row, method in zip(rows, ("ring", "all_to_all"), strict=True):
        assert (row["method"], row["degree"], row["seq_len"], row["ratio"]) == (method, 2, 64, 1.5)
        assert row["peak_bytes"] == {"forward": 1, "backward": 11}
        assert row["tflops"] == round(14 * pairs * 4 * 8 / 3.0 / 1e12, 4)
    assert rows[0]["bytes_sent"] != rows[1]["bytes_sent"]


def test_the_peer_has_a_row_beside_ours() -> None:
    team = FakeTeam(SMALL)
    ours, peer = measure(SMALL, ["ring", PEER], 2, team)
    assert (PEER, "run") in team.asked
    assert {name: peer[name] for name in ("ratio", "tflops")} == {name: ours[name] for name in ("ratio", "tflops")}
    assert "bytes_sent" not in peer  # it counts none


@pytest.mark.usefixtures("alone")
def test_the_peer_computes_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank and without its context, which needs a GPU: the gradients of the timed call."""
    entered, gradients = [], []
    grad = torch.autograd.grad

    @contextmanager
    def context(mesh: DeviceMesh, *, buffers: list[torch.Tensor], buffer_seq_dims: list[int]) -> Iterator[None]:
        entered.append((mesh.size(), [tuple(x.shape) for x in buffers], buffer_seq_dims))
        yield

    monkeypatch.setattr(experimental, "context_parallel", context)
    monkeypatch.setattr(torch.autograd, "grad", lambda *arguments: gradients.append(grad(*arguments)))
    share = Share(Problem(32, 1, heads=4, kv_heads=2, head_dim=8), 1, ["ring", PEER])
    for method in ("ring", PEER):
        share.run(method)
    assert share.account(PEER) == {}
    share.close()
    assert entered == [(1, [(1, 32)], [1])]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bytes_that_no_plan_announced_stop_the_benchmark() -> None:
    sent = planned(SMALL, "ring")
    benchmark.check_bytes(SMALL, "ring", sent)
    sent[1]["kv"] += 1
    with pytest.raises(RuntimeError, match="rank 1 sent"):
        benchmark.check_bytes(SMALL, "ring", sent)


def test_buffers_of_the_ring_do_not_grow_with_the_degree() -> None:
    ring, gathered = (benchmark.buffers(SMALL, method)["buffers"] for method in ("ring", "all_gather"))
    assert [ring[degree] for degree in ("4", "8", "16")] == [{"forward": 2.0, "backward": 4.0}] * 3
    assert gathered["16"]["forward"] > 2 * gathered["4"]["forward"]


@pytest.mark.usefixtures("alone")
def test_one_rank_and_the_whole_compute_the_same_problem() -> None:
    problem = Problem(32, 1, heads=2, kv_heads=1, head_dim=8)
    share = Share(problem, 1, ["ring"])
    times = share.run("ring"), Whole(problem, 1).run()
    assert all(one.start < one.middle < one.end and one.cpu > 0 for one in times)
    account = share.account("ring")
    share.close()
    assert account["bytes_sent"] == {}
    size = 32 * 2 * 8 * 4
    assert account["peak_bytes"]["forward"] >= size  # the output at least
    for x, whole in zip(share._inputs, problem.inputs(), strict=True):
        assert torch.equal(x, whole)


def test_peak_counts_what_lives_at_once() -> None:
    existing = torch.zeros(100)
    with PeakBytes(existing) as meter:
        existing.add_(1)
        assert meter.peak == 0
        kept = existing + 1
        torch.empty(1000, device="meta")
        for _ in range(3):
            _ = kept.view(10, 10) * 2
            del _
        assert meter.peak == 800
        _ = kept * 2, kept * 3
        assert meter.peak == 1200


# ---- tiles on one device


def test_the_slowest_rank_counts_against_its_share() -> None:
    rounds = [{"own": 4.0, "flash": 2.0, "ring": [1.0, 3.0]}, {"own": 4.0, "flash": 2.0, "ring": [2.0, 1.0]}] * 2
    row = compared_tiles(rounds[:3], "ring", [6 * 10**12, 3 * 10**12], comparable=True)
    assert (row["ratio"], row["ratio_range"], row["ratio_to_flash"]) == (1.5, [1.0, 1.5], 3.0)
    assert row["tflops"] == 2.0
    assert "ratio_to_flash" not in compared_tiles(rounds, "ring", [1, 1], comparable=False)


@pytest.mark.parametrize("method", benchmark.METHODS)
def test_tiles_of_all_ranks_are_the_whole(method: str) -> None:
    inputs = [x.double() for x in SMALL.inputs()]
    whole = OneCall(SMALL, Math(), inputs)
    out, lse = whole.forward()
    dq = whole.backward(out, lse)[0]
    for rank in range(2):
        tiles = Tiles(SMALL, method, rank, Math(), inputs)
        joined = [x.transpose(1, 2) for x in tiles.forward()]
        joined.append(tiles.backward(*tiles.forward())[0].transpose(1, 2))
        rows, heads = torch.from_numpy(SMALL.layout.indices(rank)), slice(None)
        if method == "all_to_all":
            rows, heads = slice(None), slice(2 * rank, 2 * rank + 2)
        wanted = [x.transpose(1, 2)[:, rows][:, :, heads] for x in (out, dq)]
        for result, expected in zip((joined[0], joined[2]), wanted, strict=True):
            assert (result - expected).norm() <= 1e-12 * expected.norm()


def test_tile_rows_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    file = tmp_path / "rows.json"
    shape = ["--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--repeats", "1"]
    lengths = ["--seq-len", "64", "96", "--degrees", "2", "4"]
    assert main(["--tiles", *shape, *lengths, "--json", str(file)]) == 0
    torch.set_num_threads(threads)
    written = json.loads(file.read_text())
    assert written["command"].startswith("python scripts/benchmarks/context_parallel.py --tiles --heads 4 ")
    assert {"commit", "torch", "python", "device"} <= written.keys()
    rows = written["results"]
    cases = {(row["kernel"], row["method"], row["degree"], row["seq_len"]) for row in rows}
    assert cases == {("cpu_flash", m, d, s) for m in benchmark.METHODS for d in (2, 4) for s in (64, 96)}
    assert len(rows) == 12
    assert all(row["ratio"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 13


# ---- arguments


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--heads 7", "--kv-heads 2"),
        ("--degrees 3", "1, 2, 4, 8"),
        ("--seq-len 3", "too short"),
        ("--repeats 0", "--repeats 0"),
        ("--kernels cpu_flash", "--tiles"),
        ("--tiles --kernels varlen", "varlen"),
        ("--json /nowhere/rows.json", "/nowhere"),
        ("--methods pytorch", "GPUs only; add --device cuda --ranks"),
    ],
)
def test_bad_arguments_are_one_sentence(argv: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--degrees 4", "--degrees 4 needs as many GPUs, and there are 2"),
        ("--seq-len 4098 --methods pytorch", "lengths that 4 divides"),
        ("--load-balancer contiguous --methods pytorch", "head_tail layout"),
        ("--tiles --methods pytorch", "add --device cuda --ranks"),
    ],
)
def test_ranks_on_gpus_need_a_gpu_each_and_the_peer_its_layout(
    argv: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["--device", "cuda", "--ranks", *argv.split()]) == 2
    assert named in capsys.readouterr().err


def test_an_unknown_method_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--methods", "telepathy"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1

"""Law of the exchange: each rank gets the rows it wants, and their gradients add up at the owner."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from longshard.sharding import exchange as door
from longshard.sharding.layout import AxisLayout, contiguous, head_tail
from longshard.sharding.rows import Axis, exchange
from tests.distributed.attention_cases import mesh_of_all, random
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.config.loader import parse_command_line
from trainer.runtime.process_group import Process, process_group

pytestmark = pytest.mark.about("longshard/sharding/movement.py")

LAYOUTS = {
    "contiguous": lambda n, degree: contiguous(n, degree),
    "head_tail": lambda n, degree: head_tail(n, degree),
    "uneven": lambda n, degree: AxisLayout(
        "uneven",
        n,
        tuple(((a, b),) if a < b else () for a, b in pairwise([*[min(r * r, n) for r in range(degree)], n])),
    ),
}


def wishes(kind: str, layout: AxisLayout) -> list[list[tuple[int, int]]]:
    n, degree = layout.length, layout.degree
    if kind == "everything":
        return [[(0, n)]] * degree
    if kind == "halo":  # wider than a neighbour's shard, and beyond the ends
        return [[(r * n // degree - 3, (r + 1) * n // degree + 3)] for r in range(degree)]
    if kind == "other layout":
        return [list(ranges) for ranges in head_tail(n, degree).ranges]
    if kind == "from one":
        return [[(0, n)] if r == 1 else [] for r in range(degree)]
    return [[(2, 5), (1, 4), (2, 5)] for _ in range(degree)]  # overlapping


def exchange_case(length: int) -> list[tuple]:
    """Differences of results and of gradients from the whole tensor's, and that each exchange was one collective."""
    process = Process.from_environment()
    results = []
    with process_group(process, parse_command_line([]).config.comm):
        group = mesh_of_all(process).get_group()
        for name, build in LAYOUTS.items():
            layout = build(length, process.world_size)
            for kind in ("everything", "halo", "other layout", "from one", "overlapping"):
                for dim in (0, 1, -1):
                    wanted = wishes(kind, layout)
                    whole = random(*[length if d == dim % 3 else 2 + d for d in range(3)])
                    own = torch.from_numpy(layout.indices(process.rank))
                    x = whole.index_select(dim, own).to(process.device).requires_grad_()
                    door.calls.clear()
                    got = exchange(x, Axis(layout, group), tuple(map(tuple, wanted)), dim)
                    cotangents = [random(*expected(whole, w, dim).shape, seed=r) for r, w in enumerate(wanted)]
                    (gradient,) = torch.autograd.grad(got, x, cotangents[process.rank].to(got.device))
                    assert door.calls == {"exchange": 2}
                    leaf = whole.clone().requires_grad_()
                    total = sum((expected(leaf, w, dim) * c).sum() for w, c in zip(wanted, cotangents, strict=True))
                    (all_gradients,) = torch.autograd.grad(total, leaf)
                    wanted_gradient = all_gradients.index_select(dim, own)
                    same = torch.equal(got.cpu(), expected(whole, wanted[process.rank], dim))
                    results.append((name, kind, dim, same, torch.allclose(gradient.cpu(), wanted_gradient, atol=1e-12)))
    return results


def expected(whole: torch.Tensor, ranges: list[tuple[int, int]], dim: int) -> torch.Tensor:
    """By padding: zeros outside the axis."""
    dim %= whole.ndim
    margin = [0, 0] * (whole.ndim - 1 - dim) + [8, 8]
    padded = F.pad(whole, margin)
    parts = [padded.narrow(dim, start + 8, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)


@pytest.mark.parametrize(("degree", "length"), [(3, 5), (4, 17), *slow((1, 7), (2, 9), (4, 3))])
def test_rows_come_from_their_owners_and_gradients_add_up_there(pool: WorkerPool, degree: int, length: int) -> None:
    for results in pool.run(degree, exchange_case, length):
        assert len(results) == 45
        assert [r for r in results if not (r[3] and r[4])] == []

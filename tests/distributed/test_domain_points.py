"""Law: points have the same neighbours however they are divided; features get all gradients."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longshard.domain.domain import Axis, Domain, balanced
from longshard.domain.gradients import average_gradients
from longshard.domain.modules import parallelize
from longshard.domain.points import nearest, within
from longshard.domain.tensor import DomainTensor
from longshard.domain.transfer import gather
from longshard.sharding import exchange as door
from scripts.gpu_blocks.block import largest
from tests.distributed.domain_cases import error, layout_of, local, meshes
from tests.distributed.pool import WorkerPool
from tests.slow import slow

pytestmark = pytest.mark.about("longshard/domain/grid_sample.py")

RADIUS = 0.4


def cloud(kind: str, number: int, seed: int) -> torch.Tensor:
    """Points at random, on a grid, where many distances are equal, or in two clusters far apart."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(number, 3, dtype=torch.float64, generator=generator)
    if kind == "grid":
        return (points * 4).floor() / 4
    return points + 10 * (torch.arange(number) % 2)[:, None] if kind == "clusters" else points


def by_hand(queries: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All distances in order, with the numbers of the points."""
    return (queries[:, None] - points).norm(dim=-1).sort(dim=1, stable=True)


def neighbours(seed: int) -> list[str]:
    """Return the cases that differ from distances computed by hand."""
    wrong, rng = [], random.Random(seed)
    with meshes() as (mesh, *_):
        group = mesh.get_all_groups()[0]
        for kind in ("random", "grid", "clusters"):
            queries, points = cloud(kind, 17, seed), cloud(kind, 40, seed + 1)
            for divided in ("both", "queries", "none"):
                domains = [Domain({}), Domain({})]
                if divided != "none":
                    domains[0] = Domain({0: Axis(layout_of(rng, 17, group.size()), group)})
                if divided == "both":
                    domains[1] = Domain({0: Axis(layout_of(rng, 40, group.size()), group)})
                inputs = [DomainTensor(local(x, d), d) for x, d in zip((queries, points), domains, strict=True)]
                distances, order = by_hand(queries, points)
                got, numbers = (gather(part).local for part in nearest(*inputs, 5))
                same = torch.allclose(got, distances[:, :5], rtol=1e-12) and torch.equal(numbers, order[:, :5])
                wrong += [f"nearest {kind} {divided}"] * (not same)
                numbers, is_near = (gather(part).local for part in within(*inputs, RADIUS, at_most=6))
                expected = distances[:, :6] <= RADIUS
                same = torch.equal(is_near, expected) and torch.equal(numbers, order[:, :6] * expected)
                wrong += [f"within {kind} {divided}"] * (not same)
                far, there = (gather(part).local for part in within(*inputs, 100.0, at_most=50))
                same = torch.equal(there.sum(1), torch.full((17,), 40)) and torch.equal(far[:, :40], order)
                wrong += [f"all within {kind} {divided}"] * (not same)
    return wrong


@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
def test_neighbours_are_those_of_all_points(pool: WorkerPool, world_size: int, seed: int) -> None:
    assert pool.run(world_size, neighbours, seed) == [[]] * world_size


def sent_by_regions() -> tuple[int, int]:
    """Return the number of points that this rank sends, if ranks have regions, and if their points lie everywhere."""
    sent = []
    with meshes() as (mesh, *_):
        domain = Domain({0: Axis(balanced(400, mesh.size()), mesh.get_all_groups()[0])})
        points = cloud("random", 400, 3)
        for order in (points[:, 0].argsort(), torch.arange(400)):
            x = DomainTensor(local(points[order], domain), domain)
            door.bytes_sent.clear()
            within(x, x, 0.05, at_most=4)
            sent.append(
                (door.bytes_sent["points"] - 8 * (mesh.size() - 1)) // (4 * 8)
            )  # three coordinates and a number
    return sent[0], sent[1]


def test_ranks_with_regions_send_only_points_near_their_borders(pool: WorkerPool) -> None:
    for regions, everywhere in pool.run(2, sent_by_regions):
        assert 0 < regions < 40  # of 200 points: a layer of a twentieth of the cube's width has a tenth of them
        assert everywhere > 150


class Cloud(nn.Module):
    """Features of surface points from a ball of neighbours and the k nearest, and of all points from attention."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.out = nn.Linear(6, 8), nn.Linear(7, 8), nn.Linear(8, 2)
        self.query, self.pair = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, points: Any, features: Any, surface: Any) -> Any:
        numbers, is_near = within(surface, points, RADIUS, at_most=6)
        offsets = points[numbers] - surface[:, None]
        seen = self.near(torch.cat([offsets, features[numbers]], -1)).masked_fill(~is_near[..., None], -1e3)
        distances, order = nearest(surface, points, 3)
        weights = ((points[order] - surface[:, None]).square().sum(-1) * -4).softmax(-1)
        close = torch.cat([features[order], points[order], distances[..., None]], -1)
        y = F.gelu(self.far((close * weights[..., None]).sum(1)) + seen.amax(1).clamp(min=-10))
        k, v = self.pair(y).chunk(2, -1)
        return self.out(y + F.scaled_dot_product_attention(self.query(y)[None], k[None], v[None])[0])


def trained() -> dict[str, float]:
    """Errors of output and gradients of a model of point clouds, after `parallelize`."""
    with meshes() as (mesh, *_):
        rng, group = random.Random(4), mesh.get_all_groups()[0]
        torch.manual_seed(0)
        ours, theirs = Cloud().double(), Cloud().double()
        theirs.load_state_dict(ours.state_dict())
        wholes = [cloud("random", 40, 1), torch.randn(40, 3, dtype=torch.float64), cloud("random", 17, 2)]
        domains = [Domain({0: Axis(layout_of(rng, n, group.size()), group)}) for n in (40, 17)]
        domains.insert(1, domains[0])
        shards = [local(x, d).requires_grad_() for x, d in zip(wholes, domains, strict=True)]
        leaves = [x.clone().requires_grad_() for x in wholes]
        inputs = [DomainTensor(x, d) for x, d in zip(shards, domains, strict=True)]
        predicted, got = parallelize(ours, *inputs), ours(*inputs)
        expected = theirs(*(DomainTensor(leaf, Domain({})) for leaf in leaves)).local
        errors = {"told": float(predicted.domain != got.domain), "output": error(gather(got).local, expected)}
        got.sin().mean().backward()
        expected.sin().mean().backward()
        average_gradients(ours, mesh)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            errors[name] = error(p.grad, q.grad)
        for name, a, b, d in zip(("points", "features", "surface"), shards, leaves, domains, strict=True):
            errors[name] = error(a.grad / group.size(), local(b.grad, d), b.grad)
    return errors


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
def test_a_model_of_point_clouds_equals_one_process(pool: WorkerPool, world_size: int) -> None:
    for errors in pool.run(world_size, trained):
        assert len(errors) == 15
        assert largest(*errors.values()) <= 1e-12, errors


def wrong_uses() -> list[str]:
    said = []
    with meshes() as (mesh, *_):
        domain = Domain({0: Axis(balanced(6, mesh.size()), mesh.get_all_groups()[0])})
        x, whole = DomainTensor(torch.zeros(3, 2), domain), DomainTensor(torch.zeros(6, 2), Domain({}))
        for use in (
            lambda: nearest(x, x, 7),
            lambda: nearest(whole, x, 2),
            lambda: nearest(x, x[:, :1], 2),
            lambda: within(x, x, 0.0, at_most=2),
            lambda: within(x, x, torch.inf, at_most=9),
        ):
            with pytest.raises(ValueError) as raised:
                use()
            said.append(str(raised.value))
    return said


def test_wrong_uses_get_a_sentence(pool: WorkerPool) -> None:
    positive = "must be positive, and finite"
    expected = [
        "k = 7 must be from 1 to the 6 points",
        "shard both over the same",
        "whole coordinates",
        *[positive] * 2,
    ]
    for said in pool.run(2, wrong_uses):
        assert all(part in text for part, text in zip(expected, said, strict=True)), said

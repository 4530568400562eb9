"""Law: a move of the sharding to another dimension, and operators on a mesh of three dimensions, equal one process."""

import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from longshard.domain.domain import Axis, Domain, balanced, sized
from longshard.domain.tensor import DomainTensor
from longshard.domain.transfer import from_dtensor, move, to_dtensor
from longshard.sharding import exchange as door
from scripts.gpu_blocks.block import largest
from tests.distributed.domain_cases import (
    NUMBERS,
    DomainCase,
    check,
    error,
    layout_of,
    local,
    meshes,
    on_shards,
    seeds,
    worst,
)
from tests.distributed.pool import WorkerPool
from tests.slow import slow


def draw_move(rng: random.Random) -> DomainCase:
    """From the first sharded dimension to a whole one; the layouts there are random too."""
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(2, 4)))
    target = rng.randrange(len(shape))
    key = rng.random()

    def split(x: torch.Tensor, domain: Domain) -> tuple[torch.Tensor, Domain]:
        source = next(iter(domain.axes))
        layout = layout_of(random.Random(key), shape[target], domain.axes[source].degree)
        return on_shards(lambda x: move(x, source, target, layout))(x, domain)

    others = tuple(dim for dim in range(len(shape)) if dim != target)
    return DomainCase(f"move to {target}", shape, others, lambda x: x * 1, split, is_linear=True)


def moves(numbers: range) -> list[tuple[float, str]]:
    return worst(draw_move, numbers)


def bytes_of_a_move() -> tuple[int, int, int, bool]:
    """Bytes forward and backward beyond a count of elements; that count; whether a move there and back is exact."""
    with meshes() as (mesh, *_):
        group = mesh.get_group()
        axis, layout = Axis(sized([4, 0, 3]), group), sized([1, 5, 2])
        whole = torch.arange(7 * 8 * 3, dtype=torch.float32).view(7, 8, 3)
        x, domain = local(whole, Domain({0: axis})).requires_grad_(), Domain({0: axis})
        door.bytes_sent.clear()
        y = move(DomainTensor(x, domain), 0, 1, layout)
        forward = door.bytes_sent["move"]
        y.local.backward(torch.ones_like(y.local))
        back = move(y.detach(), 1, 0, axis.layout).local
        sent = axis.rows * (8 - layout.local_length(axis.rank)) * 3 * 4
        received = layout.local_length(axis.rank) * (7 - axis.rows) * 3 * 4
        return forward - sent, door.bytes_sent["move"] - forward - 2 * received, sent, torch.equal(back, x)


def refusals() -> list[str]:
    with meshes() as (mesh, *_):
        domain = Domain({0: Axis(sized([2, 1]), mesh.get_group())})
        x = DomainTensor(torch.ones(domain.axes[0].rows, 4), domain)
        said = []
        for source, target, layout in ((1, 0, sized([2, 1])), (0, 1, sized([3, 2])), (0, 0, sized([2, 1]))):
            with pytest.raises(ValueError) as error:
                move(x, source, target, layout)
            said.append(str(error.value))
        return said


def draw_3d(rng: random.Random) -> DomainCase:
    """Draw a case whose spatial dimensions are all sharded."""
    shape = (2, 4, rng.randint(3, 6), rng.randint(3, 7), rng.randint(4, 6))
    if rng.random() < 0.5:
        return DomainCase(
            "group norm",
            shape,
            (2, 3, 4),
            lambda x, w, b: F.group_norm(x, 2, w, b),
            None,
            ((4,), (4,)),
            keeps_layout=True,
        )
    stride = rng.randint(1, 2)
    return DomainCase(
        f"conv3d, stride {stride}",
        shape,
        (2, 3, 4),
        lambda x, w, b: F.conv3d(x, w, b, stride=stride, padding=1),
        None,
        ((6, 4, 3, 3, 2), (6,)),
    )


def cubes(numbers: range) -> list[tuple[float, str]]:
    return worst(draw_3d, numbers)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
def test_a_move_is_a_permutation_with_its_adjoint(pool: WorkerPool, world_size: int, number: int) -> None:
    check(pool.run(world_size, moves, seeds(world_size, number)))


def test_a_move_sends_each_element_once(pool: WorkerPool) -> None:
    results = pool.run(3, bytes_of_a_move)
    assert [(forward, backward, same) for forward, backward, _, same in results] == [(0, 0, True)] * 3
    assert sum(sent for *_, sent, _ in results) > 0


def test_a_wrong_move_is_refused_on_every_rank(pool: WorkerPool) -> None:
    for said in pool.run(2, refusals):
        assert all("The source must be sharded, the target whole" in text for text in said)


@pytest.mark.slow
def test_three_sharded_dimensions_equal_one_process(pool: WorkerPool) -> None:
    check(pool.run(8, cubes, range(12)))


def bridged(folder: str) -> dict[str, float]:
    """Return errors of tensors that become DTensors and come back, of their gradients, and of a checkpoint."""
    errors, rng = {}, random.Random(2)
    with meshes() as all_meshes:
        for mesh in all_meshes:
            groups = mesh.get_all_groups()
            whole = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            for dims in ([1, 2], [2, 0], [1]):  # the last one leaves a dimension of the mesh with copies
                axes = {
                    d: Axis(layout_of(rng, whole.shape[d], g.size()), g) for d, g in zip(dims, groups, strict=False)
                }
                domain, name = Domain(axes), f"{mesh.ndim} {dims}"
                x, leaf = local(whole, domain).requires_grad_(), whole.clone().requires_grad_()
                there = to_dtensor(DomainTensor(x, domain), mesh)
                errors[f"there {name}"] = error(there.full_tensor(), whole)
                (there.sin() * there).sum().full_tensor().backward()
                (leaf.sin() * leaf).sum().backward()
                copies = math.prod(g.size() for g in groups) // math.prod(a.degree for a in axes.values())
                errors[f"gradient there {name}"] = error(x.grad * copies, local(leaf.grad, domain), leaf.grad)
                x.grad = leaf.grad = None
                back = from_dtensor(to_dtensor(DomainTensor(x, domain), mesh) * 2)
                errors[f"back {name}"] = error(back.local, local(whole * 2, back.domain), whole)
                back.square().mean().backward()
                (leaf * 2).square().mean().backward()
                shares = x.grad / (mesh.size() // copies)  # what every rank has whole counts once a rank
                errors[f"gradient back {name}"] = error(shares, local(leaf.grad, domain), leaf.grad)
                path = f"{folder}/{name}"
                checkpoint.save({"x": there.detach()}, checkpoint_id=path)
                other = Domain({0: Axis(balanced(2, groups[0].size()), groups[0])})
                empty = to_dtensor(DomainTensor(torch.zeros(other.local_shape(whole.shape)).double(), other), mesh)
                checkpoint.load(state := {"x": empty}, checkpoint_id=path)
                read = from_dtensor(state["x"])
                errors[f"checkpoint {name}"] = error(read.local, local(whole, read.domain), whole)
    return errors


@pytest.mark.parametrize("world_size", [3, *slow(2, 4)])
def test_a_sharded_tensor_becomes_a_dtensor_and_comes_back(pool: WorkerPool, world_size: int, tmp_path: Path) -> None:
    for errors in pool.run(world_size, bridged, str(tmp_path)):
        assert len(errors) >= 15
        assert largest(*errors.values()) <= 1e-14, errors


def over_two_dimensions() -> list[str]:
    """The refusals of a DTensor whose rows FSDP and tensor parallelism divide."""
    with meshes() as all_meshes:
        mesh = next(mesh for mesh in all_meshes if mesh.ndim == 2)
        strided = _StridedShard(0, split_factor=mesh.shape[1])
        refusals = []
        for placements in ([strided, Shard(0)], [strided, Replicate()]):
            x = DTensor.from_local(torch.zeros(2, 3), mesh, placements, run_check=False, shape=(8, 3), stride=(3, 1))
            with pytest.raises(ValueError) as raised:
                from_dtensor(x)
            refusals.append(str(raised.value))
        return refusals


def test_a_dtensor_that_two_dimensions_of_the_mesh_shard_is_refused(pool: WorkerPool) -> None:
    assert all(
        "shard one tensor dimension over several mesh dimensions" in said
        for refusals in pool.run(4, over_two_dimensions)
        for said in refusals
    )

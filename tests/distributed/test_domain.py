"""Laws of domains: layouts, transfers, bytes, sizes of one, running statistics, refusals, compiled code."""

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from longshard.domain import transfer, windows
from longshard.domain.domain import Axis, Domain, balanced, gathered, sized
from longshard.domain.tensor import DomainTensor
from longshard.sharding import exchange as door
from tests.distributed.domain_cases import DomainCase, check, compare, layout_of, local, meshes, worst
from tests.distributed.pool import WorkerPool

SHAPE = (2, 9, 7)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_domain(rng: random.Random, mesh: DeviceMesh, dims: tuple[int, ...] = (1, 2)) -> Domain:
    pairs = zip(dims, mesh.get_all_groups(), strict=False)
    return Domain({dim: Axis(layout_of(rng, SHAPE[dim], group.size()), group) for dim, group in pairs})


def transfers() -> list[str]:
    """Scatter from each rank, read, reshard there and back, gather: bit-exact."""
    wrong, x = [], noise(*SHAPE)
    with meshes() as all_meshes:
        for mesh, seed in itertools.product(all_meshes, range(6)):
            rng = random.Random(seed)
            domain, other = random_domain(rng, mesh), random_domain(rng, mesh)
            shard = local(x, domain)
            there = transfer.reshard(DomainTensor(shard, domain), {d: a.layout for d, a in other.axes.items()})
            back = transfer.reshard(there, {d: axis.layout for d, axis in domain.axes.items()})
            whole = transfer.gather(there)
            source = {dim: rng.randrange(axis.degree) for dim, axis in domain.axes.items()}
            has = all(axis.rank == source[dim] for dim, axis in domain.axes.items())
            cut = transfer.scatter(x if has else None, domain, SHAPE, x.dtype, source=source)
            parts = transfer.read(x.numpy(), domain)
            pairs = {"there": (there.local, local(x, other)), "back": (back.local, shard), "whole": (whole.local, x)}
            pairs |= {"cut": (cut, shard), "read": (parts, shard)}
            wrong += [f"{name}, seed {seed}" for name, pair in pairs.items() if not torch.equal(*pair)]
            wrong += ["domain"] * bool(whole.domain.axes)
    return wrong


def scatter_holds_only_parts() -> int:
    """Return the bytes that this rank sends when rank 0 has a tensor: every row goes to its owner, once."""
    with meshes() as all_meshes:
        group = all_meshes[0].get_group()
        domain = Domain({1: Axis(sized([4, 0, 5]), group)})
        door.bytes_sent.clear()
        transfer.scatter(noise(*SHAPE) if group.rank() == 0 else None, domain, SHAPE, torch.float64)
        return door.bytes_sent["exchange"]


def bytes_of_a_convolution() -> tuple[int, int, int]:
    """Return bytes sent, bytes that a count row by row expects, and calls, of kernel 6, stride 2 on uneven shards."""
    with meshes() as all_meshes:
        group = all_meshes[0].get_group()
        sizes = [5, 1, 0, 6][: group.size()]
        axis = Axis(sized(sizes), group)
        x = noise(3, 2, sum(sizes)).index_select(2, torch.from_numpy(axis.layout.indices(axis.rank)))
        door.bytes_sent.clear()
        door.calls.clear()
        F.conv1d(DomainTensor(x, Domain({2: axis})), noise(2, 2, 6), stride=2, padding=2)
        owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
        outputs = (sum(sizes) + 4 - 6) // 2 + 1
        needs: list[set[int]] = [set() for _ in sizes]
        for output in range(outputs):
            needs[owner[2 * output]] |= {2 * output - 2 + tap for tap in range(6)} & set(range(sum(sizes)))
        sent = sum(owner[row] == axis.rank != rank for rank, rows in enumerate(needs) for row in rows)
        return door.bytes_sent["exchange"], sent * 3 * 2 * 8, door.calls["exchange"]


def nothing_is_sent() -> tuple[int, bool]:
    """A domain of one rank, and windows that end with shards: no collective, and no copy of the rows."""
    with meshes() as all_meshes:
        group = all_meshes[0].get_group()
        domain = Domain({2: Axis(sized([4] * group.size()), group)})
        x = DomainTensor(noise(2, 2, 4), domain)
        door.calls.clear()
        F.conv1d(x, noise(2, 2, 2), stride=2)
        F.max_pool1d(x, 2)
        F.avg_pool1d(x, 4)
        same = transfer.reshard(x, {2: domain.axes[2].layout})
        if group.size() == 1:
            for stride, padding in itertools.product((1, 2), (0, 1)):
                F.conv1d(x, noise(2, 2, 3), stride=stride, padding=padding)
            F.group_norm(x, 1)
            transfer.gather(x)
            transfer.move(x, 2, 1, sized([2]))
        return sum(door.calls.values()), same.local is x.local


def running_statistics() -> list[float]:
    """Errors of the buffers after three steps, and of evaluation, against one process."""
    with meshes() as all_meshes:
        group = all_meshes[0].get_group()
        domain = Domain({0: Axis(sized([0, 1, 2][: group.size()]), group)})
        ours, theirs = ([torch.zeros(4).double(), torch.ones(4).double()] for _ in range(2))
        for step in range(3):
            x = noise(3, 4, 5, seed=step) + 100
            F.batch_norm(DomainTensor(local(x, domain), domain), *ours, training=True, momentum=0.3)
            F.batch_norm(x, *theirs, training=True, momentum=0.3)
        y = F.batch_norm(DomainTensor(local(x, domain), domain), *ours).local
        expected = local(F.batch_norm(x, *theirs), domain)
        pairs = [*zip(ours, theirs, strict=True), (y, expected)]
        return [((a - b).norm() / max(b.norm(), torch.tensor(1e-9))).item() for a, b in pairs]


def block(x, weight, other):
    """A residual block: its layouts must not drift."""
    y = F.group_norm(F.conv2d(x, weight, padding="same"), 2)
    y = F.conv2d(y.relu(), other, padding="same")
    assert not isinstance(x, DomainTensor) or y.domain == x.domain
    return F.interpolate(F.max_pool2d(x + y, 3, 2, padding=1), scale_factor=2.0, mode="bilinear")


BLOCK = DomainCase("block", (2, 4, 9, 10), (0, 2, 3), block, None, ((4, 4, 3, 3), (4, 4, 2, 4)), keeps_layout=False)


def blocks(seeds: range) -> list[tuple[float, str]]:
    return worst(lambda rng: BLOCK, seeds)


def compiled_block() -> list[float]:
    """Largest differences of compiled and eager code: the result and each gradient."""
    with meshes() as all_meshes:
        group = all_meshes[0].get_group()
        domain = Domain({2: Axis(sized([6, 3]), group)})
        leaves = [local(noise(2, 4, 9, 10), domain), noise(4, 4, 3, 3, seed=1), noise(4, 4, 2, 4, seed=2)]
        leaves = [leaf.requires_grad_() for leaf in leaves]

        def run(x, weight, other):
            return block(DomainTensor(x, domain), weight, other).local

        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        results = [function(*leaves) for function in (run, compiled)]
        cotangent = noise(*results[0].shape, seed=3)
        gradients = [torch.autograd.grad(result, leaves, cotangent) for result in results]
        pairs = [results, *zip(*gradients, strict=True)]
        return [(a - b).abs().max().item() for a, b in pairs]


OPERATORS = {
    "conv_transpose": lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3).double(), stride=2),
    "circular conv": lambda x: windows.conv(
        F.conv2d, x, torch.ones(4, 4, 3, 2).double(), padding=(2, 1), periodic=True
    ),
    "avg_pool": lambda x: F.avg_pool2d(x, (3, 2), padding=1, ceil_mode=True),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 1),
    "norm": lambda x: x.norm(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, (10,)),
    "var": lambda x: x.var((2, 3)),
    "nearest": lambda x: F.interpolate(x, (13, 7)),
    "pad": lambda x: F.pad(x, (0, 0, 2, 1)),
    "gather": transfer.gather,
    "reshard": lambda x: transfer.reshard(x, {2: sized([2, 7])}),
}


def compiled_operators() -> dict[str, object]:
    """Return the largest difference between compiled and eager code for each operator, or torch.compile's error."""
    errors: dict[str, object] = {}
    with meshes() as all_meshes:
        domain = Domain({2: Axis(sized([6, 3]), all_meshes[0].get_group())})
        x = local(noise(2, 4, 9, 10), domain).requires_grad_()
        for name, operator in OPERATORS.items():
            torch._dynamo.reset()

            def run(x, operator=operator):
                return operator(DomainTensor(x, domain)).local

            results = [f(x) for f in (run, torch.compile(run, backend="aot_eager", fullgraph=True))]
            gradients = [torch.autograd.grad(y, x, noise(*y.shape, seed=3))[0] for y in results]
            errors[name] = max((a - b).abs().max().item() for a, b in (results, gradients))
    return errors


def refusals() -> list[str]:
    """Return the error of each wrong use."""
    with meshes() as all_meshes:
        group = all_meshes[0].get_group()
        domain = Domain({2: Axis(sized([3, 2]), group)})
        x = DomainTensor(noise(1, 2, domain.axes[2].rows), domain)
        uses: list[Callable[[], object]] = [
            lambda: Axis(sized([1, 2, 3]), group),
            lambda: Domain({-1: domain.axes[2]}),
            lambda: DomainTensor(x.local[..., 1:], domain),
            lambda: F.conv1d(x, noise(2, 2, 7)),
            lambda: F.conv1d(x, noise(2, 2, 3), stride=2, padding="same"),
            lambda: F.conv1d(x, noise(2, 2, 3), padding="around"),
            lambda: F.max_pool1d(x, 2, padding=2),
            lambda: x.sum(5),
            lambda: F.layer_norm(x, (4,)),
            lambda: transfer.reshard(x, {2: sized([3, 3])}),
            lambda: transfer.scatter(x.local, domain, (1, 2, 6), torch.float64),
        ]
        said = []
        for use in uses:
            with pytest.raises((ValueError, RuntimeError, IndexError, NotImplementedError)) as error:
                use()
            said.append(str(error.value))
        return said


def control() -> float:
    """The comparison sees a convolution that pads at each shard."""
    with meshes() as all_meshes:
        group = all_meshes[0].get_group()
        domain = Domain({2: Axis(balanced(8, group.size()), group)})
        case = DomainCase(
            "no halo",
            (1, 2, 8),
            (2,),
            lambda x, w: F.conv1d(x, w, padding=1),
            lambda x, domain, w: (F.conv1d(x, w, padding=1), domain),
            ((2, 2, 3),),
        )
        return min(value for name, value in compare(case, domain, 0).items() if name in ("output", "input"))


def layouts_gathered() -> tuple:
    with meshes() as all_meshes:
        group = all_meshes[0].get_group()
        return gathered(2 * dist.get_rank(), group).ranges


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_rows_arrive_where_they_belong(pool: WorkerPool, world_size: int) -> None:
    assert pool.run(world_size, transfers) == [[]] * world_size


def test_scatter_sends_each_row_once(pool: WorkerPool) -> None:
    assert pool.run(3, scatter_holds_only_parts) == [2 * 5 * 7 * 8, 0, 0]


def test_a_convolution_sends_the_halo_alone_and_at_once(pool: WorkerPool) -> None:
    results = pool.run(4, bytes_of_a_convolution)
    assert [sent for sent, _, _ in results] == [wanted for _, wanted, _ in results]
    assert sum(sent for sent, _, _ in results) > 0
    assert {calls for _, _, calls in results} == {1}


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_halo_costs_nothing(pool: WorkerPool, world_size: int) -> None:
    assert pool.run(world_size, nothing_is_sent) == [(0, True)] * world_size


def test_running_statistics_are_those_of_one_process(pool: WorkerPool) -> None:
    assert max(error for errors in pool.run(3, running_statistics) for error in errors) <= 1e-12


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_residual_block_keeps_its_layouts(pool: WorkerPool, world_size: int) -> None:
    check(pool.run(world_size, blocks, range(world_size * 100, world_size * 100 + 15)))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="the compiler of PyTorch 2.11 and 2.12 cannot follow it")
@pytest.mark.slow
def test_compiled_code_agrees(pool: WorkerPool) -> None:
    assert max(error for errors in pool.run(2, compiled_block) for error in errors) <= 1e-12


@pytest.mark.slow
def test_every_operator_compiles(pool: WorkerPool) -> None:
    for errors in pool.run(2, compiled_operators):
        assert errors.keys() == OPERATORS.keys()
        assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


def test_a_wrong_use_is_refused_on_every_rank(pool: WorkerPool) -> None:
    for said in pool.run(2, refusals):
        assert len(said) == 11
        assert len(set(said)) == 11


def test_the_comparison_sees_a_missing_halo(pool: WorkerPool) -> None:
    assert min(pool.run(2, control)) > 1e-3


def test_layouts_from_local_sizes(pool: WorkerPool) -> None:
    assert pool.run(3, layouts_gathered) == [((), ((0, 2),), ((2, 6),))] * 3
    assert [balanced(10, 4).local_length(rank) for rank in range(4)] == [3, 3, 2, 2]
    assert np.array_equal(sized([2, 0, 3]).indices(2), [2, 3, 4])

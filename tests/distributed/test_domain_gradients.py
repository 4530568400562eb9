"""Law: after `average_gradients` the gradients of a model on shards equal one process, whatever wraps it."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longshard.domain import Axis, Domain, DomainTensor, average_gradients, parallelize, sized
from tests.distributed.domain_cases import error, local, meshes
from tests.distributed.pool import WorkerPool
from tests.slow import slow

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 5, 3, 2)).double()


def whole_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh._flatten()


def fsdp(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


WRAPS: dict[str, Wrap] = {
    "nothing": lambda model, mesh: model,
    "DDP": lambda model, mesh: ddp(whole_mesh(mesh), model),
    "FSDP2": lambda model, mesh: fsdp(whole_mesh(mesh), model),
    "FSDP2 of a part": lambda model, mesh: nn.Sequential(fsdp(whole_mesh(mesh), model[:2]), *model[2:]),
    "HSDP": lambda model, mesh: fsdp(mesh if mesh.ndim == 2 else pair(mesh, (2, 1)), model),
    "HSDP, sharded over the rows": lambda model, mesh: fsdp(mesh if mesh.ndim == 2 else pair(mesh, (1, 2)), model),
}
OVER_DATA: dict[str, Wrap] = {
    "DDP over data": lambda model, mesh: ddp(mesh["dp"], model),
    "FSDP2 over data": lambda model, mesh: fsdp(mesh["dp"], model),
    "FSDP2 over rows": lambda model, mesh: fsdp(mesh["rows"], model),
}


def pair(mesh: DeviceMesh, shape: tuple[int, int]) -> DeviceMesh:
    return DeviceMesh(mesh.device_type, torch.arange(2).view(shape), mesh_dim_names=("replicate", "shard"))


def step(wrap: Wrap, mesh: DeviceMesh, fault: bool = False) -> float:
    """Return the largest error of a gradient after two accumulated backwards of undivided losses."""
    rows, *data = reversed(mesh.get_all_groups())
    batch = slice(0, 4) if not data else slice(2 * data[0].rank(), 2 * data[0].rank() + 2)
    domain = Domain({2: Axis(sized([3, 6]), rows)})
    steps = [torch.randn(4, 3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    theirs, ours = network(), network()
    for x in steps:
        theirs(x).square().mean().backward()
    parallelize(ours, DomainTensor(local(steps[0][batch], domain), domain))
    ours = wrap(ours, mesh)
    for x in steps:
        ours(DomainTensor(local(x[batch], domain), domain)).square().mean().backward()
    if not fault:
        average_gradients(ours, mesh)
    errors = []
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        errors.append(error(gradient, q.grad))
    return max(errors)


def steps(names: list[str], fault: bool = False) -> dict[str, float]:
    with meshes() as all_meshes:
        last = all_meshes[-1]
        names_of = ("dp", "rows") if last.ndim == 2 else ("rows",)
        mesh = DeviceMesh(last.device_type, last.mesh, mesh_dim_names=names_of)
        return {name: step((WRAPS | OVER_DATA)[name], mesh, fault) for name in names}


@pytest.mark.parametrize(("world_size", "names"), [(2, [*WRAPS]), *slow((4, [*WRAPS, *OVER_DATA]))])
def test_gradients_are_those_of_one_process(pool: WorkerPool, world_size: int, names: list[str]) -> None:
    for errors in pool.run(world_size, steps, names):
        assert len(errors) == len(names)
        assert {name: value for name, value in errors.items() if not value <= 1e-12} == {}


def test_the_comparison_sees_gradients_that_are_not_averaged(pool: WorkerPool) -> None:
    for errors in pool.run(2, steps, ["nothing"], True):
        assert errors["nothing"] > 1e-2


def hooked_steps() -> float:
    """Return the largest error of a gradient that hooks of every module change, before and after a norm."""
    with meshes() as (mesh, *_):
        domain = Domain({2: Axis(sized([3, 6]), mesh.get_group())})
        x = torch.randn(4, 3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        shard = local(x.detach(), domain).requires_grad_()
        theirs, ours = network(), network()
        for model in (theirs, ours):
            for module in model:
                module.register_full_backward_hook(lambda _, into, out: (into[0] * (1 + out[0].norm()),))
        parallelize(ours, DomainTensor(shard, domain))
        theirs(x).square().mean().backward()
        ours(DomainTensor(shard, domain)).square().mean().local.backward(torch.tensor(0.5, dtype=torch.float64))
        errors = [error(shard.grad, local(x.grad, domain))]
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            dist.all_reduce(p.grad)
            errors.append(error(p.grad, q.grad))
        return max(errors)


def test_hooks_of_modules_get_whole_gradients(pool: WorkerPool) -> None:
    assert max(pool.run(2, hooked_steps)) <= 1e-12


def odd_ones() -> dict[str, object]:
    """Return the gradients of parameters that lacked one, and the messages of refusals."""
    results: dict[str, object] = {}
    with meshes() as (mesh, *_):
        rank = mesh.get_rank()
        model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), *map(torch.ones, (3, 4))])
        model[0].grad = torch.full((2,), 3.0 + 2 * rank, dtype=torch.bfloat16)
        if rank:
            model[1].grad = torch.full((3,), 8.0)
        average_gradients(model, mesh)
        results["gradients"] = [None if p.grad is None else p.grad.tolist() for p in model]
        divided = fsdp(mesh, network())
        divided.set_gradient_divide_factor(1.0)
        old = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
        nn.Module.__init__(old)
        for name, wrong in {"divisor": divided, "FSDP1": nn.Sequential(old)}.items():
            with pytest.raises(ValueError) as error:
                average_gradients(wrong, mesh)
            results[name] = str(error.value)
    return results


def test_odd_parameters_and_wrappers(pool: WorkerPool) -> None:
    for results in pool.run(2, odd_ones):
        assert results["gradients"] == [[4.0] * 2, [4.0] * 3, None]
        assert "divides gradients by 1.0, so they are no mean over its ranks" in results["divisor"]
        assert "module 0 is of FSDP1" in results["FSDP1"]


def half_wrapped() -> str:
    """Return the message about a wrapper that has two of the four ranks of a mesh dimension."""
    with meshes() as (mesh, square):
        with pytest.raises(ValueError) as error:
            average_gradients(DistributedDataParallel(network(), process_group=square.get_group(1)), mesh)
        return str(error.value)


@pytest.mark.slow
def test_a_wrapper_over_some_of_the_ranks_is_refused(pool: WorkerPool) -> None:
    for said in pool.run(4, half_wrapped):
        assert "some of the ranks [0, 1, 2, 3] of a dimension of the mesh" in said

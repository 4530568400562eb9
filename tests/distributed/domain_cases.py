"""Random cases of operators over sharded axes, and their comparison with one process: the law of every operator.

The operator runs on shards, and torch's function on the whole tensor, with random cotangents in float64. Outputs, input
gradients, parameter gradients summed over the ranks, and <Ax, c> = <x, A'c> must agree to 1e-12.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longshard.domain.domain import Axis, Domain, balanced, sized
from longshard.domain.tensor import DomainTensor
from longshard.sharding.layout import AxisLayout, head_tail
from longshard.sharding.ranges import union
from trainer.config.loader import parse_command_line
from trainer.runtime.process_group import Process, process_group

Operator = Callable[..., tuple[torch.Tensor, Domain]]
MESHES = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)], 8: [(2, 2, 2)]}
TOLERANCE = 1e-12
NUMBERS = (25, pytest.param(300, marks=pytest.mark.slow))
"""Cases of a test; a family has 100 over all worlds, 1,200 in the full set."""


@dataclass(frozen=True)
class DomainCase:
    """An operator and its input.

    shape: shape of x. sharded: dimensions of x that may be sharded. whole: torch's function of the whole tensor.
    split(x, domain, *parameters): the operator on shards; None: the same function as `whole`.
    """

    name: str
    shape: tuple[int, ...]
    sharded: tuple[int, ...]
    whole: Callable[..., torch.Tensor]
    split: Operator | None = None
    parameters: Sequence[tuple[int, ...]] = ()
    is_linear: bool = False
    keeps_layout: bool = False
    ties: bool = False


def on_shards(function: Callable[..., DomainTensor]) -> Operator:
    """Return a function of torch on a `DomainTensor` as an operator on shards."""

    def split(x: torch.Tensor, domain: Domain, *operands: torch.Tensor) -> tuple[torch.Tensor, Domain]:
        result = function(DomainTensor(x, domain), *operands)
        assert isinstance(result, DomainTensor)
        return result.local, result.domain

    return split


def layout_of(rng: random.Random, length: int, degree: int) -> AxisLayout:
    """Return a random layout: balanced, uneven with shards of 0 and 1 rows, all on one rank, or two pieces a rank."""
    kind = rng.choice(["balanced", "uneven", "uneven", "uneven", "one", "pieces", "shuffled"])
    if kind == "balanced":
        return balanced(length, degree)
    if kind == "pieces":
        return head_tail(length, degree)
    if kind == "one":
        owner = rng.randrange(degree)
        return sized([length * (rank == owner) for rank in range(degree)])
    ends = sorted(rng.choices(range(length + 1), k=degree - 1))
    pieces = [*zip([0, *ends], [*ends, length], strict=True)]
    if kind == "shuffled":
        rng.shuffle(pieces)
    return AxisLayout(kind, length, tuple(union([piece]) for piece in pieces))


def place(rng: random.Random, mesh: DeviceMesh, case: DomainCase) -> Domain:
    """Return a random domain that shards as many dimensions as the mesh and the case allow."""
    dims = rng.sample(case.sharded, min(mesh.ndim, len(case.sharded)))
    groups = mesh.get_all_groups()
    return Domain({d: Axis(layout_of(rng, case.shape[d], g.size()), g) for d, g in zip(dims, groups, strict=False)})


def local(x: torch.Tensor, domain: Domain) -> torch.Tensor:
    for dim, axis in domain.axes.items():
        x = x.index_select(dim, torch.from_numpy(axis.layout.indices(axis.rank)))
    return x


@contextlib.contextmanager
def meshes() -> Iterator[list[DeviceMesh]]:
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        yield [init_device_mesh(process.device.type, shape) for shape in MESHES[process.world_size]]
        dist.barrier()  # a rank that sent nothing would leave before others have connected to it


def error(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    if a.shape != b.shape:
        return float("inf")
    size = (b if scale is None else scale).norm().item()
    return (a - b).norm().item() / (size or 1.0)


def compare(case: DomainCase, domain: Domain, seed: int) -> dict[str, float]:
    """Return the relative errors of this rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        return x.mul(2).round() if case.ties else x

    x, parameters = draw(case.shape), [draw(shape) for shape in case.parameters]
    wholes = [x.clone().requires_grad_(), *(p.clone().requires_grad_() for p in parameters)]
    expected = case.whole(*wholes)
    cotangent = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    wanted = torch.autograd.grad(expected, wholes, cotangent)
    leaves = [local(x, domain).requires_grad_(), *(p.clone().requires_grad_() for p in parameters)]
    got, result = (case.split or on_shards(case.whole))(leaves[0], domain, *leaves[1:])
    local_cotangent = _cotangent(cotangent, domain, result)
    gradients = torch.autograd.grad(got, leaves, local_cotangent, allow_unused=False)
    result.shape(got)
    errors = {"output": error(got, local(expected, result), expected)}
    errors["input"] = error(gradients[0], local(wanted[0], domain), wanted[0])
    for name, gradient, whole in zip("abcd", gradients[1:], wanted[1:], strict=False):
        dist.all_reduce(gradient := gradient.contiguous())
        errors[f"parameter {name}"] = error(gradient / _copies(domain), whole)
    if case.is_linear:
        dots = torch.stack([(got * local_cotangent).sum(), (gradients[0] * leaves[0]).sum()]).detach()
        dist.all_reduce(dots)
        errors["adjoint"] = abs(dots[0] - dots[1]).item() / max((expected.norm() * cotangent.norm()).item(), 1e-9)
    if case.keeps_layout:
        wanted = DomainTensor(leaves[0].detach(), domain).domain  # without axes of one rank
        errors["layout"] = float(any(result.axes[d].layout != axis.layout for d, axis in wanted.axes.items()))
    return errors


def _copies(domain: Domain) -> int:
    """Return the number of ranks that compute the same, because the domain does not use all dimensions of the mesh."""
    used = 1
    for axis in domain.axes.values():
        used *= axis.degree
    return dist.get_world_size() // used


def _cotangent(cotangent: torch.Tensor, domain: Domain, result: Domain) -> torch.Tensor:
    """Return this rank's part of the cotangent. If ranks have the same output, each takes a share of the cotangent."""
    local_cotangent = local(cotangent, result)
    shared = [axis for dim, axis in domain.axes.items() if all(a.group is not axis.group for a in result.axes.values())]
    for axis in shared:
        shares = torch.softmax(torch.arange(axis.degree, dtype=torch.float64), 0)
        local_cotangent = local_cotangent * shares[axis.rank]
    return local_cotangent


def worst(draw: Callable[[random.Random], DomainCase], seeds: range) -> list[tuple[float, str]]:
    """Compare a case for each seed, on a mesh of all ranks; return the cases with the largest errors."""
    failures = []
    with meshes() as all_meshes:
        for seed in seeds:
            rng = random.Random(seed)
            case = draw(rng)
            domain = place(rng, rng.choice(all_meshes), case)
            layouts = {d: axis.layout.ranges for d, axis in domain.axes.items()}
            try:
                errors = compare(case, domain, seed)
            except Exception as reason:
                raise RuntimeError(f"seed {seed}: {case.name}, shape {case.shape}, {layouts}") from reason
            for name, value in errors.items():
                if not value <= TOLERANCE:
                    failures.append((value, f"seed {seed}, {name}: {case.name}, shape {case.shape}, {layouts}"))
    return sorted(failures, reverse=True)[:5]


def seeds(world_size: int, number: int) -> range:
    """Return the seeds of a number of ranks; the full set has other seeds."""
    first = world_size * 10_000 + number
    return range(first, first + number)


def check(results: Sequence[list[tuple[float, str]]]) -> None:
    lines = [f"{value:.1e} {line}" for rank in results for value, line in rank]
    assert not lines, "\n".join(lines)

"""Law: reductions and norms over sharded axes equal one process."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from longshard.domain.domain import Axis, Domain, sized
from longshard.domain.tensor import DomainTensor
from tests.distributed.domain_cases import NUMBERS, DomainCase, check, error, local, meshes, seeds, worst
from tests.distributed.pool import WorkerPool
from tests.slow import slow

REDUCTIONS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "var": torch.var,
    "max": torch.amax,
    "norm": torch.linalg.vector_norm,
}


def draw_reduction(rng: random.Random) -> DomainCase:
    name = rng.choice([*REDUCTIONS])
    ndim = rng.randint(1, 4)
    shape = [rng.randint(2, 9) for _ in range(ndim)]
    dims = rng.sample(range(ndim), rng.randint(1, ndim))
    options = {"keepdim": rng.random() < 0.5, "dim": tuple(dim - ndim * rng.randint(0, 1) for dim in dims)}
    if name == "var":
        options["correction"] = rng.randint(0, 1)
    if name == "norm":
        options["ord"] = rng.choice([1.0, 2.0, 3.0, torch.inf])
    return DomainCase(
        f"{name} {options}",
        tuple(shape),
        tuple(range(ndim)),
        partial(REDUCTIONS[name], **options),
        is_linear=name in ("sum", "mean"),
        ties=name == "max",
    )


def draw_norm(rng: random.Random) -> DomainCase:
    ndim = rng.randint(1, 3)
    name = rng.choice(["group", "instance", "batch"])
    # Of two values each becomes 1 or -1, whose gradient is what rounding leaves; so there are three or more.
    shape = (rng.randint(2, 3), 4, *[rng.randint(3, 7) for _ in range(ndim)])
    sharded = (0, *range(2, 2 + ndim))
    groups, mode = rng.choice([1, 2, 4]), rng.choice([(), ((4,),), ((4,), (4,))])
    whole = {
        "group": lambda x, *p: F.group_norm(x, groups, *p),
        "instance": lambda x, *p: F.instance_norm(x, None, None, *p),
        "batch": lambda x, *p: F.batch_norm(x, None, None, *p, training=True),
    }[name]
    return DomainCase(f"{name} norm, parameters {mode}", shape, sharded, whole, None, mode, keeps_layout=True)


DRAW = {"reductions": draw_reduction, "norms": draw_norm}


def cases(name: str, numbers: range) -> list[tuple[float, str]]:
    return worst(DRAW[name], numbers)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
@pytest.mark.parametrize("name", DRAW)
def test_reductions_and_norms_equal_one_process(pool: WorkerPool, name: str, world_size: int, number: int) -> None:
    check(pool.run(world_size, cases, name, seeds(world_size, number)))


def far_from_zero() -> list[float]:
    """Errors of a group norm of float32 values about 1,000, and of its gradient, against one process in float64."""
    with meshes() as all_meshes:
        domain = Domain({2: Axis(sized([90, 38]), all_meshes[0].get_group())})
        generator = torch.Generator().manual_seed(0)
        x, cotangent = (torch.randn(2, 4, 128, 8, generator=generator) for _ in range(2))
        x = (x + 1000).requires_grad_()
        whole = x.detach().double().requires_grad_()
        expected = F.group_norm(whole, 2)
        (wanted,) = torch.autograd.grad(expected, whole, cotangent.double())
        y = F.group_norm(DomainTensor(local(x, domain), domain), 2).local
        (gradient,) = torch.autograd.grad(y, x, local(cotangent, domain))
        return [error(a, local(b, domain)) for a, b in ((y, expected), (local(gradient, domain), wanted))]


def test_statistics_of_values_far_from_zero_lose_no_digits(pool: WorkerPool) -> None:
    assert max(error for errors in pool.run(2, far_from_zero) for error in errors) <= 1e-3


PRECISE = {
    "mean": lambda x: (x + 10).mean(),
    "mean of rows": lambda x: (x.abs() * 20).mean(2),
    "sum": lambda x: (x / 100).sum((0, 2, 3)),
    "var": lambda x: x.var(),
    "var of values about ten": lambda x: (x + 10).var((2, 3), correction=0),
    "std": lambda x: (x * 1000).std(),
    "norm": lambda x: (x * 40).norm(),
    "mse": lambda x: F.mse_loss(x, x * 0),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x + 10, 1),
    "average pool": lambda x: F.avg_pool2d(x.abs() * 1000 + 5000, 16),
}
"""name -> reduction of a tensor (2, 2, 128, 64)."""


def precision() -> list[str]:
    """Return the reductions that are less exact than torch's, or have another type; also for their gradients."""
    wrong = []
    with meshes() as all_meshes:
        domain = Domain({2: Axis(sized([90, 38]), all_meshes[0].get_group())})
        for dtype, slack in ((torch.float16, 1e-4), (torch.bfloat16, 1e-4), (torch.float32, 1.2e-7)):
            x = torch.randn(2, 2, 128, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
            for name, function in PRECISE.items():
                leaves = [x.double(), x.clone(), local(x, domain)]
                for leaf in leaves:
                    leaf.requires_grad_()
                exact, theirs = function(leaves[0]), function(leaves[1])
                ours = function(DomainTensor(leaves[2], domain))
                own = local(exact, ours.domain)
                errors = error(ours.local.double(), own), error(local(theirs, ours.domain).double(), own)
                gradients = [
                    torch.autograd.grad(y, leaf, torch.ones_like(y))[0].double()
                    for y, leaf in zip((exact, theirs, ours.local), leaves, strict=True)
                ]
                wanted = local(gradients[0], domain)
                scale = 1 if ours.domain.axes else 2  # a result that both ranks have whole counts twice
                gradient_errors = error(gradients[2] / scale, wanted), error(local(gradients[1], domain), wanted)
                if ours.dtype != dtype or not all(a <= 2 * b + slack for a, b in (errors, gradient_errors)):
                    wrong.append(f"{name} in {dtype}: {errors}, gradients {gradient_errors}")
    return wrong


def test_reductions_are_as_exact_as_those_of_torch(pool: WorkerPool) -> None:
    for wrong in pool.run(2, precision):
        assert wrong == []


SPECIAL = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax((0, 2)),
    "amin": lambda x: x.amin(2, keepdim=True),
    "norm": lambda x: x.norm(torch.inf),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, 1),
    "infinite": lambda x: x.nan_to_num(-torch.inf).amax() - x.nan_to_num(torch.inf).amin((0, 2)),
    "var of too few": lambda x: x.nan_to_num(1.0).var(correction=64) + x.nan_to_num(1.0).var(correction=100),
    "var of one value": lambda x: x[:1, :1, 7:, :1].var() + x[:1, :1, 7:, :1].std(correction=3),
}
"""name -> function of a tensor (2, 2, 8, 2) with a NaN; its result has NaN or infinite values."""


def special_values() -> list[str]:
    """The functions whose results are others than torch's, with the NaN in the rows of one rank."""
    wrong = []
    with meshes() as all_meshes:
        domain = Domain({2: Axis(sized([5, 3]), all_meshes[0].get_group())})
        for row in (1, 6):
            for name, function in SPECIAL.items():
                x = torch.randn(2, 2, 8, 2, generator=torch.Generator().manual_seed(0))
                x[1, 1, row, 0] = torch.nan
                result, wanted = function(DomainTensor(local(x, domain), domain)), function(x)
                if not torch.equal(result.local.nan_to_num(7.0), local(wanted, result.domain).nan_to_num(7.0)):
                    wrong.append(f"{name}, NaN in row {row}: {result.local}, {wanted}")
    return wrong


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.filterwarnings("ignore:std")
def test_results_are_nan_or_infinite_where_those_of_torch_are(pool: WorkerPool) -> None:
    for wrong in pool.run(2, special_values):
        assert wrong == []


def under_autocast() -> float:
    """The error of a cumulative sum of float32 values under autocast."""
    with meshes() as all_meshes, torch.autocast("cpu", torch.bfloat16):
        domain = Domain({2: Axis(sized([90, 38]), all_meshes[0].get_group())})
        x = torch.randn(2, 2, 128, 8, generator=torch.Generator().manual_seed(0))
        y = DomainTensor(local(x, domain), domain).cumsum(2)
        assert y.dtype == torch.float32
        return error(y.local, local(x.double().cumsum(2), domain))


def test_a_cumulative_sum_under_autocast_loses_no_digits(pool: WorkerPool) -> None:
    assert max(pool.run(2, under_autocast)) <= 1e-6

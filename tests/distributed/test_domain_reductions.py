"""Law: reductions and norms over sharded axes equal those of one process, with either placement of the gradient."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.domain_cases import NUMBERS, DomainCase, check, error, local, meshes, seeds, worst
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.distributed.domain_parallel import norms, reductions
from trainer.distributed.domain_parallel.domain import Axis, Domain, sized

REDUCTIONS = {
    "sum": (reductions.domain_sum, torch.sum),
    "mean": (reductions.domain_mean, torch.mean),
    "var": (reductions.domain_var, torch.var),
    "max": (reductions.domain_max, torch.amax),
    "norm": (reductions.domain_norm, torch.linalg.vector_norm),
}


def draw_reduction(rng: random.Random) -> DomainCase:
    name = rng.choice([*REDUCTIONS])
    split, whole = REDUCTIONS[name]
    ndim = rng.randint(1, 4)
    shape = [rng.randint(2, 9) for _ in range(ndim)]
    dims = rng.sample(range(ndim), rng.randint(1, ndim))
    options, grad = {"keepdim": rng.random() < 0.5}, rng.choice(["partial", "replicated"])
    theirs = dict(options)
    if name == "var":
        options["correction"] = theirs["correction"] = rng.randint(0, 1)
    if name == "norm":
        options["order"] = theirs["ord"] = rng.choice([1.0, 2.0, 3.0, torch.inf])
    signed = [dim - ndim * rng.randint(0, 1) for dim in dims]
    # Dimensions that stay sharded need a gradient for each shard, so a replicated one is drawn for whole results.
    sharded = tuple(dims) if grad == "replicated" else tuple(range(ndim))
    return DomainCase(
        f"{name} over {dims} {options} {grad}",
        tuple(shape),
        sharded,
        lambda x, domain: split(x, domain, signed, grad=grad, **options),
        lambda x: whole(x, dim=tuple(dims), **theirs),
        grad=grad,
        is_linear=name in ("sum", "mean"),
        ties=name == "max",
    )


def draw_norm(rng: random.Random) -> DomainCase:
    ndim = rng.randint(1, 3)
    name = rng.choice(["group", "instance", "batch", "layer", "rms"])
    # Of two values each becomes 1 or -1, whose gradient is what rounding leaves; so there are three or more.
    shape = (rng.randint(2, 3), 4, *[rng.randint(3, 7) for _ in range(ndim)])
    sharded = (0, *range(2, 2 + ndim))
    if name in ("group", "instance", "batch"):
        groups, mode = rng.choice([1, 2, 4]), rng.choice([(), ((4,),), ((4,), (4,))])
        split, whole = {
            "group": (partial(group, groups=groups), lambda x, *p: F.group_norm(x, groups, *p)),
            "instance": (norms.instance_norm, lambda x, *p: F.group_norm(x, 4, *p)),
            "batch": (batch, lambda x, *p: F.batch_norm(x, None, None, *p, training=True)),
        }[name]
    else:
        last = rng.randint(1, ndim)
        normalized = shape[-last:]
        mode = rng.choice([(), (normalized,), (normalized, normalized)])[: 1 if name == "rms" else 2]
        function, whole_function = {"layer": (norms.layer_norm, F.layer_norm), "rms": (norms.rms_norm, F.rms_norm)}[
            name
        ]
        split = lambda x, domain, *p: function(x, domain, normalized, *p)  # noqa: E731
        whole = lambda x, *p: whole_function(x, normalized, *p)  # noqa: E731
    return DomainCase(f"{name} norm, parameters {mode}", shape, sharded, split, whole, mode, keeps_layout=True)


def group(x, domain, *parameters, groups):
    return norms.group_norm(x, domain, groups, *parameters)


def batch(x, domain, *parameters):
    return norms.batch_norm(x, domain, None, None, *parameters, training=True)


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
        y, _ = norms.group_norm(local(x, domain), domain, 2)
        (found,) = torch.autograd.grad(y, x, local(cotangent, domain))
        return [error(a, local(b, domain)) for a, b in ((y, expected), (local(found, domain), wanted))]


def test_statistics_of_values_far_from_zero_lose_no_digits(pool: WorkerPool) -> None:
    assert max(error for errors in pool.run(2, far_from_zero) for error in errors) <= 1e-3

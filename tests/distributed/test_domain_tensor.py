"""Law: a function of torch gives for a sharded `DomainTensor` what it gives for the whole tensor, with its gradients.

Layouts are random, with shards of 0 and 1 rows and several ranges a rank.
"""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from longshard.domain.domain import Axis, Domain, sized
from longshard.domain.tensor import DomainTensor
from tests.distributed.domain_cases import DomainCase, check, error, layout_of, local, meshes, worst
from tests.distributed.domain_ones import X, made
from tests.distributed.pool import WorkerPool
from tests.distributed.tensor_cases import FAMILIES
from tests.slow import slow

TIMES = (1, pytest.param(12, marks=pytest.mark.slow))


def draw(family: str, seed: int) -> DomainCase:
    """The next case, so that each comes as often as any other."""
    return FAMILIES[family][seed % len(FAMILIES[family])]


def cases(family: str, numbers: range) -> list[tuple[float, str]]:
    count = iter(numbers)

    def drawn(_: random.Random) -> DomainCase:
        return draw(family, next(count))

    return worst(drawn, numbers)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_equal_those_of_a_whole_tensor(pool: WorkerPool, family: str, world_size: int, times: int) -> None:
    number = times * len(FAMILIES[family])
    check(pool.run(world_size, cases, family, range(world_size * number, (world_size + 1) * number)))


def whole_tensors() -> list[str]:
    """Run every function on a domain of one rank and on an unsharded tensor; results must equal torch's."""
    wrong = []
    with meshes() as (mesh, *_):
        plain = torch.randn(2, 4, 3, 5, dtype=torch.float64)
        one_rank = [Domain({2: Axis(sized([3]), mesh.get_group())})] if mesh.size() == 1 else []
        for domain in [Domain({}), *one_rank]:
            x = DomainTensor(plain, domain)
            pairs = {
                "fft": (torch.fft.fft(x).local, torch.fft.fft(plain)),
                "sort": (x.sort(2).values.local, plain.sort(2).values),
                "max": (x.max(2).indices.local, plain.max(2).indices),
                "index": (x[:, :, 1, plain[0, 0, 0] > 0].local, plain[:, :, 1, plain[0, 0, 0] > 0]),
                "split": (x.split(2, 2)[1].local, plain.split(2, 2)[1]),
                "softmax": (x.flatten(1, 2).softmax(1).local, plain.flatten(1, 2).softmax(1)),
                "number": (torch.tensor(float(x.sum())), plain.sum().float()),
            }
            wrong += [name for name, pair in pairs.items() if not torch.equal(*pair)]
            wrong += ["item"] * (x.sum().item() != plain.sum().item())
            y = x.clone()
            y += 1
            wrong += ["in place"] * (not torch.equal(y.local, plain + 1))
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_whole_tensors_run_every_function(pool: WorkerPool, world_size: int) -> None:
    assert pool.run(world_size, whole_tensors) == [[]] * world_size


def properties() -> dict[str, object]:
    """Return properties of a sharded tensor."""
    with meshes() as (mesh, *_):
        x = made((4, 2), mesh)
        values, _ = x.max(1)
        return {
            "shape": (tuple(x.shape), x.size(), x.size(-1), x.ndim, x.dim(), x.numel(), len(x)),
            "dtype": (x.dtype, x.long().sum().dtype, x.bool().max().dtype),
            "sum": (x.long() * 2**40 + 1).sum().item(),
            "names": type(x.max(1)).__name__ + str(tuple(values.shape)),
            "same": x.add_(0) is x,
            "one local row": made((1, 5), mesh).squeeze().shape,
            "numpy": torch.equal((np.float64(2) * x - np.float32(1)).local, x.local * 2 - 1),
            "copies": [
                (y.shape, y.domain == x.domain, torch.equal(y.local, x.local), y.local is x.local)
                for y in (copy.copy(x), copy.deepcopy({"x": [x]})["x"][0])
            ],
            "repr": repr(x).split(", local")[0],
        }


def test_a_sharded_tensor_looks_like_the_whole_one(pool: WorkerPool) -> None:
    for properties_of_rank in pool.run(2, properties):
        shape = torch.Size(X)
        assert properties_of_rank == {
            "shape": (X, shape, 5, 4, 4, 240, 2),
            "dtype": (torch.float64, torch.int64, torch.bool),
            "sum": 240 * (2**40 + 1),  # exact: not added up in floats
            "names": "max(2, 6, 5)",
            "same": True,
            "one local row": shape,
            "numpy": True,
            "copies": [(shape, True, True, True), (shape, True, True, False)],
            "repr": "DomainTensor(shape=(2, 4, 6, 5)",
        }


def running_statistics() -> list[float]:
    """Errors of the statistics of nn.BatchNorm2d and nn.BatchNorm1d after three steps."""
    errors = []
    with meshes() as (mesh, *_):
        rng = random.Random(5)
        for kind, shape in ((nn.BatchNorm2d, (3, 4, 8, 7)), (nn.BatchNorm1d, (3, 4, 9))):
            ours, theirs = (kind(4, momentum=m, dtype=torch.float64) for m in (None, None))
            for step in range(3):
                x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) + 10
                domain = Domain({2: Axis(layout_of(rng, shape[2], mesh.size()), mesh.get_group())})
                ours(DomainTensor(local(x, domain), domain))
                theirs(x)
            pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
            errors += [error(a.double(), b.double()) for a, b in pairs]
    return errors


def test_batch_norm_keeps_the_running_statistics_of_one_process(pool: WorkerPool) -> None:
    assert max(value for errors in pool.run(3, running_statistics) for value in errors) <= 1e-12

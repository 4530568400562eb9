"""Law: interpolation, padding, flips, rolls and cumulative sums along sharded axes equal those of one process."""

import random

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.domain_cases import NUMBERS, DomainCase, check, seeds, worst
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.distributed.domain_parallel import resample

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def draw_interpolation(rng: random.Random) -> DomainCase:
    ndim, mode = rng.choice([1, 1, 2, 2, 3]), rng.choice(["nearest", "linear"])
    most = 14 if ndim == 1 else 6
    sizes = [rng.randint(1, most) for _ in range(ndim)]
    if rng.random() < 0.5:
        target = {"size": [rng.randint(1, 2 * most) for _ in range(ndim)]}
    else:
        target = {"scale_factor": [max(rng.choice([0.5, 0.7, 1.0, 2.0, 3.0, 1.6]), 1 / n) for n in sizes]}
    options = {"align_corners": rng.random() < 0.5} if mode == "linear" else {}
    torch_mode = LINEAR[ndim] if mode == "linear" else mode
    return DomainCase(
        f"interpolate {target} {mode} {options}",
        (2, 2, *sizes),
        (0, *range(2, 2 + ndim)),
        lambda x, domain: resample.interpolate(x, domain, mode=mode, **target, **options),
        lambda x: F.interpolate(x, mode=torch_mode, **target, **options),
        is_linear=True,
    )


def whole_pad(x: torch.Tensor, rows: dict[int, tuple[int, int]], mode: str, value: float) -> torch.Tensor:
    for dim, (before, after) in rows.items():
        y = x.movedim(dim, -1)
        flat = F.pad(y.reshape(1, -1, y.shape[-1]), (before, after), mode=mode, value=value or None)
        x = flat.view(*y.shape[:-1], -1).movedim(-1, dim)
    return x


def draw_moves(rng: random.Random) -> DomainCase:
    ndim = rng.randint(1, 3)
    shape = tuple(rng.randint(2, 9) for _ in range(ndim))
    dims = rng.sample(range(ndim), rng.randint(1, ndim))
    name = rng.choice(["pad", "pad", "flip", "roll", "cumsum"])
    everything = tuple(range(ndim))
    if name == "pad":
        mode = rng.choice(["constant", "circular", "reflect", "replicate"])
        low = -1 if mode == "constant" else 0
        rows = {d: (rng.randint(low, shape[d] - 1), rng.randint(0, shape[d] - 1)) for d in dims}
        value = rng.choice([0.0, 2.5]) if mode == "constant" else 0.0
        return DomainCase(
            f"pad {rows} {mode} {value}",
            shape,
            everything,
            lambda x, domain: resample.pad(x, domain, rows, mode=mode, value=value),
            lambda x: whole_pad(x, rows, mode, value),
            is_linear=not value,
        )
    split, whole = {
        "flip": (lambda x, domain: resample.flip(x, domain, dims), lambda x: x.flip(*dims)),
        "roll": (
            lambda x, domain: resample.roll(x, domain, {d: 2 * d - 5 for d in dims}),
            lambda x: x.roll([2 * d - 5 for d in dims], dims),
        ),
        "cumsum": (lambda x, domain: resample.cumsum(x, domain, dims[0]), lambda x: x.cumsum(dims[0])),
    }[name]
    return DomainCase(f"{name} {dims}", shape, everything, split, whole, is_linear=True, keeps_layout=True)


DRAW = {"interpolation": draw_interpolation, "moves": draw_moves}


def cases(name: str, numbers: range) -> list[tuple[float, str]]:
    return worst(DRAW[name], numbers)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
@pytest.mark.parametrize("name", DRAW)
def test_resampling_equals_one_process(pool: WorkerPool, name: str, world_size: int, number: int) -> None:
    check(pool.run(world_size, cases, name, seeds(world_size, number)))

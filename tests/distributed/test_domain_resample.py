"""Law: interpolation, padding, flips, rolls and cumulative sums along sharded axes equal one process."""

import random
from functools import partial

import pytest
import torch.nn.functional as F

from tests.distributed.domain_cases import NUMBERS, DomainCase, check, seeds, worst
from tests.distributed.pool import WorkerPool
from tests.slow import slow

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
        lambda x: F.interpolate(x, mode=torch_mode, **target, **options),
        is_linear=True,
    )


def draw_padding(rng: random.Random) -> DomainCase:
    ndim, mode = rng.randint(1, 3), rng.choice(["constant", "circular", "reflect", "replicate"])
    shape = (2, 2, *(rng.randint(2, 9) for _ in range(ndim)))
    low = -1 if mode == "constant" else 0
    pads = [rng.randint(low, n - 1) if rng.random() < 0.7 else 0 for n in reversed(shape[2:]) for _ in range(2)]
    value = rng.choice([0.0, 2.5]) if mode == "constant" else None
    name, pad = f"pad {pads} {mode} {value}", partial(F.pad, pad=pads, mode=mode, value=value)
    return DomainCase(name, shape, (0, *range(2, 2 + ndim)), pad, is_linear=not value)


def draw_move(rng: random.Random) -> DomainCase:
    ndim = rng.randint(1, 3)
    shape = tuple(rng.randint(2, 9) for _ in range(ndim))
    dims = rng.sample(range(ndim), rng.randint(1, ndim))
    name, move = rng.choice(
        [
            ("flip", lambda x: x.flip(*dims)),
            ("roll", lambda x: x.roll([2 * d - 5 for d in dims], dims)),
            ("cumsum", lambda x: x.cumsum(dims[0])),
        ]
    )
    return DomainCase(f"{name} {dims}", shape, tuple(range(ndim)), move, is_linear=True, keeps_layout=True)


DRAW = {"interpolation": draw_interpolation, "padding": draw_padding, "moves": draw_move}


def cases(name: str, numbers: range) -> list[tuple[float, str]]:
    return worst(DRAW[name], numbers)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
@pytest.mark.parametrize("name", DRAW)
def test_resampling_equals_one_process(pool: WorkerPool, name: str, world_size: int, number: int) -> None:
    check(pool.run(world_size, cases, name, seeds(world_size, number)))

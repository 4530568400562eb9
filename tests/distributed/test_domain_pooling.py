"""Law: pooling over sharded axes equals one process: overlapping windows, ceil_mode, padding that counts or not."""

import random
from functools import partial

import pytest
import torch.nn.functional as F

from tests.distributed.domain_cases import NUMBERS, DomainCase, check, seeds, worst
from tests.distributed.pool import WorkerPool
from tests.slow import slow

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
ADAPTIVE_AVERAGE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def draw_pooling(rng: random.Random) -> DomainCase:
    name, ndim = rng.choice(["max", "max", "avg", "avg", "avg", "adaptive"]), rng.choice([1, 1, 2, 2, 3])
    kernel = [rng.randint(1, 5 if ndim == 1 else 3) for _ in range(ndim)]
    stride = rng.choice([None, [rng.randint(1, 4) for _ in range(ndim)]])
    dilation = [rng.randint(1, 2) if name == "max" else 1 for _ in range(ndim)]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    padding = [rng.randint(0, min(r, k) // 2) for r, k in zip(reach, kernel, strict=True)]
    options = {"padding": padding, "ceil_mode": rng.random() < 0.5}
    sizes = [max(rng.randint(2, 14 if ndim == 1 else 7), r) for r in reach]
    shape, sharded = (2, 3, *sizes), (0, *range(2, 2 + ndim))
    if name == "adaptive":
        average = rng.random() < 0.5
        pool = (ADAPTIVE_AVERAGE if average else ADAPTIVE_MAX)[ndim]
        return DomainCase(f"adaptive, average {average}", shape, sharded, partial(pool, output_size=1))
    if name == "max":
        options["dilation"] = dilation
        whole = MAX[ndim]
    else:
        options["count_include_pad"] = rng.random() < 0.5
        if ndim > 1 and rng.random() < 0.3:
            options["divisor_override"] = 3
        whole = AVERAGE[ndim]
    return DomainCase(
        f"{name} {kernel} stride {stride} {options}",
        shape,
        sharded,
        partial(whole, kernel_size=kernel, stride=stride, **options),
        is_linear=name == "avg",
    )


def cases(numbers: range) -> list[tuple[float, str]]:
    return worst(draw_pooling, numbers)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
def test_pooling_equals_one_process(pool: WorkerPool, world_size: int, number: int) -> None:
    check(pool.run(world_size, cases, seeds(world_size, number)))

"""Law: convolutions over sharded axes equal one process, whatever the options and the layout."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from longshard.domain.windows import conv
from tests.distributed.domain_cases import NUMBERS, DomainCase, check, on_shards, seeds, worst
from tests.distributed.pool import WorkerPool
from tests.slow import slow

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def padded_conv(x, weight, bias=None, *, pads, mode, **options):
    """By padding first: circular rows by indices, for any width."""
    for axis, (before, after) in enumerate(pads):
        dim = x.ndim - len(pads) + axis
        if mode == "circular":
            x = x.index_select(dim, torch.arange(-before, x.shape[dim] + after) % x.shape[dim])
        else:
            x = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])
    return CONV[len(pads)](x, weight, bias, **options)


def draw_conv(rng: random.Random) -> DomainCase:
    ndim = rng.choice([1, 1, 2, 2, 3])
    kernel = [rng.randint(1, 5 if ndim == 1 else 3) for _ in range(ndim)]
    dilation = [rng.randint(1, 3) for _ in range(ndim)]
    stride = [rng.randint(1, 4) for _ in range(ndim)]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = rng.choice([[rng.randint(0, 4) for _ in range(ndim)]] * 2 + ["valid", "same"])
    if padding == "same":
        stride = [1] * ndim
    pads = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in reach]
    pads = pads if isinstance(padding, str) else [(p, p) for p in padding]
    sizes = [max(rng.randint(1, 14 if ndim == 1 else 8), r + 1 - sum(p)) for r, p in zip(reach, pads, strict=True)]
    groups, batch = rng.choice([1, 2]), rng.choice([(), (1,), (2,)])
    mode = rng.choice(["zeros", "circular"])
    parameters = [(4, 2 // groups, *kernel), (4,)][: rng.randint(1, 2)]
    options = {"stride": tuple(stride), "dilation": tuple(dilation), "groups": groups}
    first = len(batch) + 1
    keeps = all(s == 1 and sum(p) == r for s, p, r in zip(stride, pads, reach, strict=True))
    return DomainCase(
        f"conv {kernel} padding {padding} {mode} {options}",
        (*batch, 2, *sizes),
        tuple(range(first, first + ndim)) + ((0,) if batch == (2,) else ()),
        partial(padded_conv, pads=pads, mode=mode, **options),
        on_shards(partial(conv, CONV[ndim], padding=padding, periodic=mode == "circular", **options)),
        parameters,
        is_linear=len(parameters) == 1,
        keeps_layout=keeps,
    )


def whole_transposed(x, weight, bias=None, *, pads, stride, dilation, output_padding, groups):
    """Return all outputs without the padding; output padding is appended at the end."""
    y = TRANSPOSED[len(pads)](x, weight, None, stride, 0, 0, groups, dilation)
    for axis, (before, after) in enumerate(pads):
        dim = y.ndim - len(pads) + axis
        y = F.pad(y, [0, 0] * (y.ndim - 1 - dim) + [0, output_padding[axis]])
        y = y.narrow(dim, before, y.shape[dim] - before - after)
    return y if bias is None else y + bias.view(-1, *[1] * len(pads))


def draw_transposed(rng: random.Random) -> DomainCase:
    ndim = rng.choice([1, 1, 2, 2, 3])
    kernel = [rng.randint(1, 5 if ndim == 1 else 3) for _ in range(ndim)]
    stride, dilation = ([rng.randint(1, 3) for _ in range(ndim)] for _ in range(2))
    extra = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    pads, sizes = [], []
    for k, s, d, e in zip(kernel, stride, dilation, extra, strict=True):
        pads.append((rng.randint(0, 3),) * 2)
        least = 1
        while (least - 1) * s - sum(pads[-1]) + d * (k - 1) + e < 0:
            least += 1
        sizes.append(max(least, rng.randint(1, 10 if ndim == 1 else 5)))
    groups = rng.choice([1, 2])
    options = {"stride": stride, "dilation": dilation, "output_padding": extra, "groups": groups}
    parameters = [(4, 3, *kernel), (3 * groups,)][: rng.randint(1, 2)]
    padding = [p for p, _ in pads]
    return DomainCase(
        f"conv_transpose {kernel} padding {padding} {options}",
        (2, 4, *sizes),
        (0, *range(2, 2 + ndim)),
        partial(whole_transposed, pads=pads, **options),
        on_shards(partial(TRANSPOSED[ndim], padding=padding, **options)),
        parameters,
        is_linear=len(parameters) == 1,
    )


DRAW = {"conv": draw_conv, "conv_transpose": draw_transposed}


def cases(name: str, numbers: range) -> list[tuple[float, str]]:
    return worst(DRAW[name], numbers)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
@pytest.mark.parametrize("name", DRAW)
def test_convolutions_equal_one_process(pool: WorkerPool, name: str, world_size: int, number: int) -> None:
    check(pool.run(world_size, cases, name, seeds(world_size, number)))

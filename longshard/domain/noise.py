"""Rules of functions that draw random numbers: a number is a hash of a key and the element's place in the whole tensor.

So every layout draws the same, and so does a domain tensor that is whole. The key is drawn from torch's generator of
the CPU, which must have the same seed on all ranks of a domain. Checkpointing restores its state, and draws the same
again. For a plain tensor, torch draws other numbers.
"""

import math

import torch

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule
from longshard.domain.domain import Domain
from longshard.sharding.placement import rows_on
from longshard.sharding.random_bits import random_bits
from longshard.sharding.rows import layout_of
from longshard.sharding.tensors import to_device, wide_type

_BLOCK = 2**22
"""Number of elements with bits, 64 each, in memory at once."""


_SPATIAL = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}


@rule("dropout", "alpha_dropout", *_SPATIAL, "feature_alpha_dropout", draws=True)
def _dropout(function, x, p=0.5, training=True, inplace=False) -> DomainTensor:
    """Drop elements, or whole channels of x: (N, C, *spatial), or (C, *spatial) if the name has a number.

    With p = 0, or in evaluation, the result is x itself.
    """
    name = function.__name__
    refuse_unless(0 <= p <= 1, f"a share of {p}")
    if not training or p == 0:
        return x
    # each element of the first `dims` dimensions is drawn; the other dimensions share it
    dims = 2 if name == "feature_alpha_dropout" else x.ndim - _SPATIAL.get(name, 0)
    shape = (*x.shape[:dims], *[1] * (x.ndim - dims))
    kept = uniform(x, shape, torch.float32) >= p
    if "alpha" not in name:
        result = x * (kept.to(x.dtype) / max(1 - p, 1e-30))
    else:  # self-normalizing networks, arXiv 1706.02515: mean and variance stay
        low = -1.7580993408473766
        scale = ((1 - p) * (1 + p * low**2)) ** -0.5 if p < 1 else 0.0
        result = torch.where(kept, x, low) * scale - low * p * scale
    if inplace:
        x.copy_(result)
    return x if inplace else result


@rule("rand_like", "randn_like", "randint_like", draws=True)
def _random_like(function, x, *bounds, dtype=None, generator=None, **named) -> DomainTensor:
    """Return random numbers of the shape and domain of x.

    function: `rand_like`, `randn_like` or `randint_like`. bounds: high, or low and high, of `randint_like`, which may
    also come by name. A generator is refused. Other named arguments describe the memory of the result, and are not
    needed.
    """
    _check(generator)
    if "high" in named:
        bounds = (*(bounds or [named.get("low", 0)]), named["high"])
    dtype = dtype or x.dtype
    exact = wide_type(dtype) if dtype.is_floating_point else torch.float64
    if function.__name__ == "randn_like":
        return normal(x, exact).to(dtype)
    drawn = uniform(x, x.shape, exact)
    if bounds:
        low, high = (0, *bounds)[-2:]
        drawn = (low + drawn * (high - low)).floor()
    return drawn.to(dtype)


@rule("bernoulli", draws=True)
def _bernoulli(function, x, p=None, *, generator=None) -> DomainTensor:
    _check(generator)
    return (uniform(x, x.shape, torch.float64) < (x if p is None else p)).to(x.dtype)


@rule("normal_", "uniform_", draws=True)
def _drawn_in_place(
    function, x, first=0.0, second=1.0, *, generator=None, **named
) -> DomainTensor:
    """Fill x in place: with a mean and a deviation, or between the bounds `from` and `to`."""
    _check(generator)
    first = named.get("mean", named.get("from", first))
    second = named.get("std", named.get("to", second))
    exact = wide_type(x.dtype)
    is_normal = function.__name__ == "normal_"
    drawn = normal(x, exact) if is_normal else uniform(x, x.shape, exact)
    return x.copy_(drawn * (second if is_normal else second - first) + first)


def _check(generator: torch.Generator | None) -> None:
    refuse_unless(
        generator is None,
        "a generator, because its numbers would depend on the rank's shard",
    )


def normal(x: DomainTensor, dtype: torch.dtype) -> DomainTensor:
    """Return normally distributed numbers of the shape and domain of x (Box and Muller, 1958).

    Args:
        x: The tensor, any shape.
        dtype: The type of the numbers, float32 or float64.
    """
    radius = (-2 * (1 - uniform(x, x.shape, dtype)).log()).sqrt()
    return radius * (2 * math.pi * uniform(x, x.shape, dtype)).cos()


def uniform(x: DomainTensor, shape: tuple[int, ...], dtype: torch.dtype) -> DomainTensor:
    """Return numbers in [0, 1) of a global shape; a dimension is sharded as in x if the sizes are equal.

    Each call draws a key from torch's random state of the CPU, which must be the same on all ranks of the domain.

    Args:
        x: The tensor, any shape.
        shape: The global shape.
        dtype: The type of the numbers, float32 or float64.
    """
    axes = {dim: axis for dim, axis in x.domain.axes.items() if shape[dim] == x.shape[dim]}
    domain = Domain(axes)
    local = domain.local_shape(shape)
    if x.local.is_meta:
        torch.rand((), device="meta")  # shows `_Draws` that random numbers are drawn
        return DomainTensor(torch.empty(local, dtype=dtype, device="meta"), domain)
    key = to_device(torch.randint(2**62, (), device="cpu"), x.device)
    layouts = (layout_of(axes.get(dim), size) for dim, size in enumerate(shape))
    rows = [rows_on(layout, rank, x.device) for layout, rank in layouts]
    # the place of each row: the index over all dimensions before the last one
    before = x.local.new_zeros(1, dtype=torch.int64)
    for size, own in zip(shape[:-1], rows[:-1], strict=True):
        before = (before.unsqueeze(-1) * size + own).reshape(-1)
    last, size = (rows[-1], shape[-1]) if shape else (before, 1)
    digits = 53 if dtype == torch.float64 else 24
    bits = []
    for part in before.split(max(_BLOCK // max(len(last), 1), 1)):
        drawn = random_bits((part.unsqueeze(-1) * size + last).reshape(-1), key) >> (
            64 - digits
        )
        bits.append(drawn.bitwise_and_(2**digits - 1).to(dtype).mul_(2.0**-digits))
    return DomainTensor(torch.cat(bits).view(local), domain)

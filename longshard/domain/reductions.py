"""Rules of reductions over sharded axes: statistics of the ranks, combined by counts, never a mean of means.

The result of a reduction is whole on every rank. Its gradient is partial: the ranks' gradients are summed in the
backward. Statistics are computed in at least float32.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule
from longshard.domain.domain import Axis, Domain
from longshard.sharding.exchange import all_reduce, send_rows
from longshard.sharding.placement import added_up, summed
from longshard.sharding.tensors import to_device, wide_type, with_adjoint

# ---- Reductions


@rule("sum", "mean")
def _total(function, x, dim=None, keepdim=False, dtype=None) -> DomainTensor:
    local = x.local.to(dtype or x.dtype)
    dims = _dims(x, dim)
    # Floats are summed in float32 at least: in float16 a sum may overflow although the mean does not.
    result = local.sum(
        dims, keepdim=True, dtype=wide_type(local.dtype) if local.is_floating_point() else None
    )
    for axis in _axes(x, dims):
        result = added_up(result, axis.group)
    if function.__name__ == "mean":
        result = result / math.prod([x.shape[d] for d in dims])
    return _reduced(
        result.to(local.dtype) if local.is_floating_point() else result, x, dims, keepdim
    )


@rule("amax", "amin")
def extreme(function, x, dim=None, keepdim=False) -> DomainTensor:
    """Return the maximum or minimum; equal extremes share the gradient evenly, and a NaN on any rank is the result.

    Args:
        function: torch.amax, torch.amin, or a function of these names.
        x: The tensor, any shape.
        dim: One or several dimensions; None means all.
        keepdim: Whether the dimensions stay, with size 1.
    """
    name = function.__name__
    sign = -1 if name in ("amin", "min") else 1
    dims = _dims(x, dim)
    signed = sign * (x.local if x.is_floating_point() else x.local.long())
    top = _Max.apply(signed, dims, [axis.group for axis in _axes(x, dims)])
    return _reduced((sign * top).to(x.dtype), x, dims, keepdim)


@rule("all", "any")
def _truth(function, x, dim=None, keepdim=False) -> DomainTensor:
    is_any = function.__name__ == "any"
    sought = (x.local if is_any else x.local == 0).bool().long()
    number = _total(torch.sum, DomainTensor(sought, x.domain), dim, keepdim)
    return DomainTensor(number.local > 0 if is_any else number.local == 0, number.domain)


@rule("var", "std")
def _variance(
    function, x, dim=None, unbiased=None, keepdim=False, *, correction=None
) -> DomainTensor:
    """Compute the variance, or its root if the function is named `std`.

    As in torch, it is computed in float64 on CPUs, and in float32 at least on GPUs. Without a positive divisor the
    result is infinite or NaN. A root of 0 has the gradient 0.
    """
    if isinstance(dim, bool):  # the first argument may be `unbiased`
        unbiased = dim
        dim = None
    correction = (unbiased is not False) if correction is None else correction
    dims = _dims(x, dim)
    exact = torch.promote_types(x.dtype, torch.float64 if x.is_cpu else torch.float32)
    stats = moments(x.local, x.domain, dims, exact)
    var = (stats.squares / max(stats.number - correction, 0)).to(wide_type(x.dtype))
    if function.__name__ == "std":  # without a gradient where it is 0
        var = torch.where(var == 0, 0.0, torch.where(var == 0, 1.0, var).sqrt())
    return _reduced(var.to(x.dtype), x, dims, keepdim)


@rule("prod")
def _product(function, x, dim=None, keepdim=False, dtype=None) -> DomainTensor:
    dims = _dims(x, dim)
    exact = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    result = x.local.to(exact)
    for d in dims:
        result = result.prod(d, keepdim=True)
        for axis in _axes(x, [d]):
            result = gathered(result, axis).prod(0)
    return _reduced(result, x, dims, keepdim)


@rule("norm", "linalg_vector_norm")
def vector_norm(
    function, x, p=2.0, dim=None, keepdim=False, dtype=None, **named
) -> DomainTensor:
    """Return the p-norm over some dimensions.

    Args:
        function: The function of torch.
        x: The tensor, any shape.
        p: The order, a positive number or infinity.
        dim: One or several dimensions; None means all.
        keepdim: Whether the dimensions stay, with size 1.
        dtype: The type in which it is computed; None means the type of x.
        **named: May have `ord`, another name of `p`.

    Raises:
        DomainOperatorError: The order is not handled.
    """
    p = named.pop("ord", p)
    order = 2.0 if p in (None, "fro") else p
    refuse_unless(not isinstance(order, str) and order > 0, f"order {p!r}")
    dims = _dims(x, dim)
    local = x.local.to(dtype or x.dtype)
    if order == torch.inf:
        return extreme(torch.amax, DomainTensor(local.abs(), x.domain), dims, keepdim)
    norm = torch.linalg.vector_norm(
        local, order, dims, keepdim=True, dtype=wide_type(local.dtype)
    )
    for axis in _axes(x, dims):
        norm = torch.linalg.vector_norm(gathered(norm, axis), order, 0)
    return _reduced(norm if local.is_complex() else norm.to(local.dtype), x, dims, keepdim)


def _dims(x: DomainTensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the dimensions in ascending order, counted from 0; None or an empty list means all."""
    asked = (dim,) if isinstance(dim, int) else dim or range(x.ndim)
    return tuple(sorted({d % x.ndim for d in asked}))


def _axes(x: DomainTensor, dims: Iterable[int]) -> list[Axis]:
    return [x.domain.axes[dim] for dim in dims if dim in x.domain.axes]


def _reduced(
    result: Tensor, x: DomainTensor, dims: tuple[int, ...], keepdim: bool
) -> DomainTensor:
    """Return a result that has size 1 in the reduced dimensions as the result of a reduction of x."""
    return DomainTensor(
        result if keepdim else result.squeeze(dims), x.domain.reduced(dims, keepdim=keepdim)
    )


# ---- Statistics


class Moments(NamedTuple):
    """Mean, sum of squares about it, and number of elements.

    Attributes:
        mean: The mean, of size 1 in the reduced dimensions.
        squares: The sum of squares of x - mean, of size 1 in the reduced dimensions.
        number: The number of elements of each mean.
    """

    mean: Tensor
    squares: Tensor
    number: int


def moments(
    x: Tensor,
    domain: Domain,
    dims: Sequence[int],
    dtype: torch.dtype,
) -> Moments:
    """Return the moments over some dimensions.

    Each axis gathers the ranks' means and squares, which are combined as in Chan, Golub and LeVeque (1983). One
    collective for each sharded axis.

    Args:
        x: This rank's shard, any shape.
        domain: Its domain.
        dims: The dimensions.
        dtype: The type of the moments.
    """
    dims = tuple(dims)
    sizes = {dim: x.shape[dim] for dim in dims}
    number = math.prod([*sizes.values()])
    mean, squares = _Moments.apply(x, dims, max(number, 1), dtype)
    for dim, axis in domain.axes.items():
        if dim not in dims:
            continue
        sizes[dim] = axis.layout.length
        number = math.prod([*sizes.values()])
        means, parts = gathered(torch.stack([mean, squares]), axis).unbind(1)
        rows = torch.tensor(axis.layout.lengths, dtype=means.dtype)
        weights = to_device(rows / max(axis.layout.length, 1), means.device).view(
            -1, *[1] * mean.ndim
        )
        mean = (means * weights).sum(0)
        squares = parts.sum(0) + ((means - mean).square() * weights).sum(0) * number
    return Moments(mean, squares, number)


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Return the x of all ranks of an axis, (ranks, *x.shape); a collective, differentiable.

    Args:
        x: A small tensor of one shape on all ranks, any shape.
        axis: The axis.
    """
    sizes = [x.numel()] * axis.degree

    def swap(parts: Tensor) -> Tensor:
        return send_rows(parts, sizes, sizes, axis.group, kind="statistics")

    return with_adjoint(torch.cat([x.reshape(-1)] * axis.degree), swap, swap).view(
        axis.degree, *x.shape
    )


class _Moments(torch.autograd.Function):
    """Mean and sum of squares about it, of local elements, in two passes: on CPUs many times as fast as var_mean."""

    @staticmethod
    def forward(ctx, x, dims, number, dtype):
        ctx.number = number
        mean = x.sum(dims, keepdim=True, dtype=dtype) / number  # 0 without elements
        squares = torch.linalg.vector_norm(x - mean, 2, dims, keepdim=True).square()
        ctx.save_for_backward(x, mean)
        return mean, squares

    @staticmethod
    def backward(ctx, mean_gradient, squares_gradient):
        x, mean = ctx.saved_tensors
        slope = 2 * squares_gradient
        constant = mean_gradient / ctx.number - slope * mean
        return torch.addcmul(constant, x.to(slope.dtype), slope).to(x.dtype), None, None, None


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims, groups):
        ctx.dims, ctx.groups = dims, groups
        shape = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
        lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        filled = 0 not in [x.shape[dim] for dim in dims]
        top = x.amax(dims, keepdim=True) if filled else x.new_full(shape, lowest)
        for group in groups:
            if not x.is_floating_point():
                all_reduce(top, group, "max")
                continue
            # A NaN on any rank is the result; back ends may lose it.
            both = torch.stack(
                [top.nan_to_num(-torch.inf, torch.inf, -torch.inf), top.isnan().to(top.dtype)]
            )
            top, is_nan = all_reduce(both, group, "max")
            top = top.masked_fill(is_nan > 0, torch.nan)
        ctx.save_for_backward(x, top)
        return top

    @staticmethod
    def backward(ctx, gradient):
        x, top = ctx.saved_tensors
        equal = (x == top).to(gradient.dtype)
        ties = equal.sum(ctx.dims, keepdim=True)
        for group in ctx.groups:
            ties = summed(ties, group)
            gradient = added_up(gradient, group)
        return equal * (gradient / ties), None, None

"""Reductions over sharded axes. The result is whole on every rank, and weighted by counts: never a mean of means.

Each returns (result, domain of the result). The gradient of the result has one of two placements, which the caller
names as in trainer/distributed/sharding/placement.py:

                 forward                  backward
    partial      sum over the ranks       sum over the ranks    each rank's gradient is its part, as where the result
                                                                is used on shards, or losses are parts of a sum
    replicated   sum over the ranks       nothing is sent       every rank has the whole gradient

`replicate` there is the counterpart: nothing is sent in the forward, and gradients are summed in the backward.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.distributed.domain_parallel.domain import Axis, Domain
from trainer.distributed.sharding.exchange import all_gather, all_reduce
from trainer.distributed.sharding.placement import PLACEMENTS
from trainer.distributed.sharding.tensors import to_device

Dims = int | Sequence[int] | None
"""Dimensions, negative ones from the end; None: all."""


def domain_sum(
    x: torch.Tensor, domain: Domain, dims: Dims = None, *, keepdim: bool = False, grad: str = "partial"
) -> tuple[torch.Tensor, Domain]:
    """Return the sum over dimensions, in which x may be sharded."""
    dims = check_reduction(x, domain, dims, grad)
    total = _total(x, domain, dims, keepdim, grad)
    return total.to(x.dtype) if x.is_floating_point() else total, domain.reduced(dims, keepdim=keepdim)


def domain_mean(
    x: torch.Tensor, domain: Domain, dims: Dims = None, *, keepdim: bool = False, grad: str = "partial"
) -> tuple[torch.Tensor, Domain]:
    """Return the mean over dimensions: the sum over all ranks, divided by the number of all elements."""
    dims = check_reduction(x, domain, dims, grad)
    mean = _total(x, domain, dims, keepdim, grad) / count(x, domain, dims)
    return mean.to(x.dtype) if x.is_floating_point() else mean, domain.reduced(dims, keepdim=keepdim)


def _total(x: torch.Tensor, domain: Domain, dims: tuple[int, ...], keepdim: bool, grad: str) -> torch.Tensor:
    """Return the sum over the ranks, of floats in at least float32: in float16 it overflows where a mean does not."""
    dtype = wide(x.dtype) if x.is_floating_point() else None
    total = x.sum(dims, keepdim=keepdim, dtype=dtype) if dims else x
    for axis in domain.split(dims).values():
        total = _Sum.apply(total, axis.group, grad)
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the floating type in which sums are kept."""
    return torch.promote_types(dtype, torch.float32)


def domain_var(
    x: torch.Tensor,
    domain: Domain,
    dims: Dims = None,
    *,
    correction: int = 1,
    keepdim: bool = False,
    grad: str = "partial",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, Domain]:
    """Return the variance over dimensions: the sum of squares about the mean, divided by (elements - correction).

    As in torch it is computed in float64 on CPUs, and infinite or NaN where elements - correction is not positive.
    dtype: of the result; None: that of x.
    """
    dims = check_reduction(x, domain, dims, grad)
    exact = torch.promote_types(x.dtype, torch.float64 if x.is_cpu else torch.float32)
    _, squares, number = moments(x, domain, dims, grad=grad, dtype=exact)
    var = (squares / max(number - correction, 0)).to(dtype or x.dtype)
    return _dropped(var, dims, keepdim), domain.reduced(dims, keepdim=keepdim)


def domain_max(
    x: torch.Tensor, domain: Domain, dims: Dims = None, *, keepdim: bool = False, grad: str = "partial"
) -> tuple[torch.Tensor, Domain]:
    """Return the maximum over dimensions. Equal maxima share the gradient evenly, as with torch.amax.

    Raises:
        ValueError: there is no element.
    """
    dims = check_reduction(x, domain, dims, grad)
    if not count(x, domain, dims):
        raise ValueError("the maximum of no elements is not defined; give the axis at least one row")
    groups = [axis.group for axis in domain.split(dims).values()]
    top = _Max.apply(x, dims, groups, grad) if groups else x.amax(dims, keepdim=True)
    return _dropped(top, dims, keepdim), domain.reduced(dims, keepdim=keepdim)


def domain_norm(
    x: torch.Tensor,
    domain: Domain,
    dims: Dims = None,
    *,
    order: float = 2.0,
    keepdim: bool = False,
    grad: str = "partial",
) -> tuple[torch.Tensor, Domain]:
    """Return the vector norm over dimensions; order: positive, or infinity."""
    dims = check_reduction(x, domain, dims, grad)
    if order == torch.inf:
        return domain_max(x.abs(), domain, dims, keepdim=keepdim, grad=grad)
    if not order > 0:
        raise ValueError(f"a norm of order {order} is not handled; use a positive number, or infinity")
    norm = torch.linalg.vector_norm(x, order, dims, keepdim=keepdim, dtype=wide(x.dtype)) if dims else x.abs()
    for axis in domain.split(dims).values():
        norm = torch.linalg.vector_norm(gather_statistics(norm, axis, grad), order, 0)
    return norm if x.is_complex() else norm.to(x.dtype), domain.reduced(dims, keepdim=keepdim)


def moments(
    x: torch.Tensor,
    domain: Domain,
    dims: Sequence[int],
    *,
    grad: str = "partial",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and sum of squares about it, of size 1 in `dims`, and the number of elements.

    dtype: of the statistics; None: that of x.

    Each axis gathers the ranks' means and squares, which are combined as in Chan, Golub and LeVeque (1983). One
    collective for each sharded axis.
    """
    dims = tuple(dims)
    sizes = {dim: x.shape[dim] for dim in dims}
    if number := math.prod([*sizes.values()]):
        mean, squares = _Moments.apply(x, dims, number, dtype or x.dtype)
    else:
        mean = squares = x.sum(dims, keepdim=True, dtype=dtype)  # zeros that depend on x
    for dim, axis in domain.split(dims).items():
        layout = axis.layout
        sizes[dim] = layout.length
        number = math.prod([*sizes.values()])
        means, parts = gather_statistics(torch.stack([mean, squares]), axis, grad).unbind(1)
        rows = torch.tensor([layout.local_length(rank) for rank in range(layout.degree)], dtype=means.dtype)
        weights = to_device(rows / max(layout.length, 1), means.device).view(-1, *[1] * mean.ndim)
        mean = (means * weights).sum(0)
        squares = parts.sum(0) + ((means - mean).square() * weights).sum(0) * number
    return mean, squares, number


def gather_statistics(x: torch.Tensor, axis: Axis, grad: str = "partial") -> torch.Tensor:
    """Return the x of all ranks of an axis, small and of one shape: (ranks, *x.shape); a collective, differentiable."""
    return _Gather.apply(x, axis.group, grad)


def count(x: torch.Tensor, domain: Domain, dims: Sequence[int]) -> int:
    """Return the number of elements of the whole tensor over dimensions."""
    return math.prod([domain.axes[d].layout.length if d in domain.axes else x.shape[d] for d in dims])


def check_reduction(x: torch.Tensor, domain: Domain, dims: Dims, grad: str = "partial") -> tuple[int, ...]:
    """Return the dimensions in order, counted from 0.

    Raises:
        ValueError: a tensor that does not fit its domain, a dimension that it lacks, or another placement.
    """
    domain.shape(x)
    asked = range(x.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    if grad not in PLACEMENTS or any(not -x.ndim <= dim < x.ndim for dim in asked):
        raise ValueError(
            f"dims = {dims!r}, grad = {grad!r} do not fit a tensor of {x.ndim} dimensions; dims count from "
            f"{-x.ndim} to {x.ndim - 1}, and grad is one of {', '.join(map(repr, PLACEMENTS))}"
        )
    return tuple(sorted({dim % x.ndim for dim in asked}))


def _dropped(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    return x if keepdim or not dims else x.squeeze(dims)


class _Moments(torch.autograd.Function):
    """Mean and sum of squares about it of local elements: two passes, in CPUs' kernels many times var_mean's speed."""

    @staticmethod
    def forward(ctx, x, dims, number, dtype):
        ctx.number = number
        mean = x.mean(dims, keepdim=True, dtype=dtype)
        squares = torch.linalg.vector_norm(x - mean, 2, dims, keepdim=True).square()
        ctx.save_for_backward(x, mean)
        return mean, squares

    @staticmethod
    @once_differentiable
    def backward(ctx, mean_gradient, squares_gradient):
        x, mean = ctx.saved_tensors
        slope = 2 * squares_gradient
        constant = mean_gradient / ctx.number - slope * mean
        return torch.addcmul(constant, x.to(slope.dtype), slope).to(x.dtype), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, grad):
        ctx.group, ctx.grad = group, grad
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _summed(gradient, ctx.group) if ctx.grad == "partial" else gradient, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, grad):
        ctx.group, ctx.grad = group, grad
        return all_gather(x.contiguous(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        whole = _summed(gradient, ctx.group) if ctx.grad == "partial" else gradient
        return whole[ctx.group.rank()], None, None


class _Max(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims, groups, grad):
        ctx.dims, ctx.groups, ctx.grad = dims, groups, grad
        shape = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
        lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        filled = 0 not in [x.shape[dim] for dim in dims]
        top = x.amax(dims, keepdim=True) if filled else x.new_full(shape, lowest)
        for group in groups:
            top = _largest(top, group)
        ctx.save_for_backward(x, top)
        return top

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, top = ctx.saved_tensors
        equal = (x == top).to(gradient.dtype)
        ties = equal.sum(ctx.dims, keepdim=True)
        for group in ctx.groups:
            all_reduce(ties, group)
            gradient = _summed(gradient, group) if ctx.grad == "partial" else gradient
        return equal * (gradient / ties), None, None, None


def _largest(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the maximum over the ranks, which is NaN if it is on any of them; backends may lose it."""
    if not x.is_floating_point():
        return all_reduce(x, group, "max")
    both = torch.stack([x.nan_to_num(-torch.inf, torch.inf, -torch.inf), x.isnan().to(x.dtype)])
    top, is_nan = all_reduce(both, group, "max")
    return top.masked_fill(is_nan > 0, torch.nan)


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over the ranks, of floats computed in at least float32."""
    dtype = wide(x.dtype) if x.is_floating_point() else x.dtype
    total = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return all_reduce(total, group).to(x.dtype)

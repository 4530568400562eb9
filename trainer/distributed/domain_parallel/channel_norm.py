"""Norms of channels over sharded axes: one node of autograd, in the kernels of torch's own norms.

Each channel of each sample is a cell. A kernel computes mean and squares of each cell; cells that share statistics, and
then the ranks, combine them by counts. The normalised x is x * scale + shift, of each cell. With g = weight * gradient
and the normalised values n, averages over what shares statistics,

    gradient of x = (g - average(g) - n * average(g * n)) / deviation

so the backward has one pass for both sums, one all-reduce of them for each sharded axis, and one pass for the result.
"""

import math
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from trainer.distributed.domain_parallel.domain import Axis
from trainer.distributed.domain_parallel.reductions import over_ranks
from trainer.distributed.sharding.exchange import all_gather, all_reduce


class Sharing(NamedTuple):
    """Which cells share statistics: the shape in which (N, C) is seen, and its dimensions over which it is averaged.

    dims: of x, over which statistics are taken, channels of a group apart; axes: the sharded ones, with their dims.
    """

    shape: tuple[int, ...]
    averaged: tuple[int, ...]
    dims: tuple[int, ...]
    axes: tuple[tuple[int, Axis], ...]


def channel_norm(
    x: torch.Tensor, sharing: Sharing, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normalised x: (N, C, *spatial), the mean, and the sum of squares about it.

    weight, bias: (C,), whole on every rank; their gradients are this rank's part.
    """
    y, mean, squares = _ChannelNorm.apply(x, weight, bias, sharing, eps)
    return y.view(x.shape), mean, squares


class _ChannelNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, sharing, eps):
        wide = _wide(x)
        mean, squares = _cell_moments(wide)
        mean, squares = _averaged(mean, squares, math.prod(x.shape[2:]), sharing)
        sizes = {dim: x.shape[dim] for dim in sharing.dims}
        sizes[1] = math.prod([sharing.shape[dim] for dim in sharing.averaged if dim])  # channels of a group
        mean, squares, number = over_ranks(mean, squares, sizes, sharing.axes, _gathered)
        deviation = (squares / number + eps).sqrt()
        means, inverse = (_of_cells(s, sharing) for s in (mean, 1 / deviation))
        ctx.save_for_backward(x, weight, means, inverse)
        ctx.sharing, ctx.number = sharing, number
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        shift = -means * scale if bias is None else bias.to(inverse.dtype) - means * scale
        ctx.mark_non_differentiable(mean, squares)
        return _affine(wide, scale, shift).to(x.dtype), mean, squares  # no view, which could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _mean, _squares):
        x, weight, means, inverse = ctx.saved_tensors
        gradient, wide, sharing = _wide(gradient.reshape(x.shape)), _wide(x), ctx.sharing
        products, sums = _cell_sums(gradient, wide, means, inverse)
        scale = torch.ones_like(inverse) if weight is None else weight.to(inverse.dtype).expand_as(inverse)
        both = torch.stack([(scale * part).view(sharing.shape) for part in (products, sums)])
        both = both.sum([dim + 1 for dim in sharing.averaged], keepdim=True)
        for _, axis in sharing.axes:
            both = all_reduce(both, axis.group)
        product, average = (_of_cells(part / ctx.number, sharing) for part in both)
        slope = -product * inverse * inverse
        result = _affine(wide, slope, -average * inverse - slope * means).view(x.shape)
        cells = [*inverse.shape, *[1] * (x.ndim - 2)]
        result = result.addcmul_(gradient, (scale * inverse).view(cells)).to(x.dtype)
        _, has_weight, has_bias, *_ = ctx.needs_input_grad
        of_weight, of_bias = products.sum(0) if has_weight else None, sums.sum(0) if has_bias else None
        return result, of_weight, of_bias, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _cell_moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and sum of squares about it of each cell, (N, C), in one pass; zeros of cells without elements."""
    batch, channels, *spatial = x.shape
    if not x.numel():
        return x.new_zeros(batch, channels), x.new_zeros(batch, channels)
    points = math.prod(spatial)
    # The kernel's own result is not used; var_mean is many times slower on CPUs.
    _, mean, inverse = torch.native_group_norm(x, None, None, batch, channels, points, channels, 0.0)
    return mean, points * inverse.pow(-2)


def _averaged(
    mean: torch.Tensor, squares: torch.Tensor, points: int, sharing: Sharing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine cells of as many points each."""
    mean, squares = mean.view(sharing.shape), squares.view(sharing.shape)
    if not mean.numel():
        return mean.sum(sharing.averaged, keepdim=True), squares.sum(sharing.averaged, keepdim=True)
    whole = mean.mean(sharing.averaged, keepdim=True)
    return whole, (squares + points * (mean - whole).square()).sum(sharing.averaged, keepdim=True)


def _gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return all_gather(x.contiguous(), axis.group)


def _of_cells(statistic: torch.Tensor, sharing: Sharing) -> torch.Tensor:
    """Return the statistic of each cell: (N, C)."""
    return statistic.expand(sharing.shape).contiguous().view(sharing.shape[0], math.prod(sharing.shape[1:]))


def _affine(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return x * scale + shift as (1, cells, elements), scale and shift of each cell.

    It is a batch norm, whose kernel is faster than addcmul.
    """
    zeros, ones = torch.zeros_like(scale).flatten(), torch.ones_like(scale).flatten()
    flat = x.view(1, zeros.numel(), math.prod(x.shape[2:]))
    if not x.numel():
        return torch.zeros_like(flat)
    y, *_ = torch.native_batch_norm(flat, scale.flatten(), shift.flatten(), zeros, ones, False, 0.0, 0.0)
    return y


def _cell_sums(
    gradient: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each cell, (N, C), the sums of gradient * normalised x and of gradient, in one pass."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    cells, points, ones = mean.numel(), math.prod(x.shape[2:]), torch.ones_like(mean).flatten()
    statistics = mean.view(1, -1), inverse.reshape(1, -1)
    mask = [False, True, True]
    _, products, sums = torch.ops.aten.native_group_norm_backward(
        gradient, x, *statistics, ones, 1, cells, points, cells, mask
    )
    return products.view(mean.shape), sums.view(mean.shape)

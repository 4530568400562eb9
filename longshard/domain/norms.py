"""Rules of norms over sharded axes: by the statistics of all ranks, which may take along a halo (halos.py)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule
from longshard.domain.domain import Axis, Domain
from longshard.domain.halos import Halo, Reach, Use, foreign_rows, reach_of, send_with
from longshard.domain.reductions import gathered, moments, wide
from longshard.sharding.exchange import exchange, plan_movement
from longshard.sharding.tensors import version_of


@rule("group_norm", first_only=True)
def group_norm(function, x, num_groups, weight=None, bias=None, eps=1e-5) -> DomainTensor:
    """x: (N, C, *spatial); weight, bias: (C,), whole on every rank."""
    _check_channels(function, x)
    grouped = x.local.unflatten(1, (num_groups, -1))
    domain = x.domain.moved(1, first=2)
    reach = reach_of(x.asked, x.domain)
    inside = None if reach is None else reach._replace(dim=reach.dim + 1)
    found = _normed(grouped, domain, range(2, x.ndim + 1), inside, Affine(weight, bias, eps, 2))
    y, halo = (None if rows is None else rows.flatten(1, 2) for rows in (found.y, found.halo))
    return _with_halo(DomainTensor(y, x.domain), halo, reach, x)


@rule("instance_norm", first_only=True)
def instance_norm(
    function,
    x,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
) -> DomainTensor:
    refuse_unless(
        use_input_stats and running_mean is None, function, x, "running statistics of instances"
    )
    return group_norm(function, x, x.shape[1], weight, bias, eps)


@rule("batch_norm", first_only=True)
def batch_norm(
    function,
    x,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
) -> DomainTensor:
    """x: (N, C, *spatial). In training the running statistics are updated in place, equally on every rank."""
    _check_channels(function, x)
    if not training:
        shape = [1, -1, *[1] * (x.ndim - 2)]
        y = _scaled(
            x.local,
            running_mean.view(shape),
            running_var.view(shape),
            Affine(weight, bias, eps, 1),
        )
        return DomainTensor(y, x.domain)
    reach = reach_of(x.asked, x.domain)
    found = _normed(
        x.local, x.domain, (0, *range(2, x.ndim)), reach, Affine(weight, bias, eps, 1)
    )
    with torch.no_grad():
        for running, new in (
            (running_mean, found.mean),
            (running_var, found.squares / (found.number - 1)),
        ):
            if running is not None:
                running.lerp_(new.flatten().to(running.dtype), momentum)
    return _with_halo(DomainTensor(found.y, x.domain), found.halo, reach, x)


@rule("layer_norm", "rms_norm", first_only=True)
def last_norm(function, x, normalized_shape, *args, **kwargs) -> DomainTensor:
    is_whole = all(dim < x.ndim - len(normalized_shape) for dim in x.domain.axes)
    refuse_unless(is_whole, function, x, "it normalises over a sharded dimension")
    return DomainTensor(function(x.local, normalized_shape, *args, **kwargs), x.domain)


def _check_channels(function: Callable, x: DomainTensor) -> None:
    refuse_unless(1 not in x.domain.axes, function, x, "sharded channels")


class Affine(NamedTuple):
    """Weight and bias of a norm, of each entry of dimension `channel` with those before it, and its epsilon."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    channel: int


class Normed(NamedTuple):
    """A norm's result, with the halo of it, mean and sum of squares of the input, and how many elements these have."""

    y: torch.Tensor
    halo: torch.Tensor | None
    mean: torch.Tensor
    squares: torch.Tensor
    number: int


def _normed(
    x: torch.Tensor, domain: Domain, dims: Sequence[int], reach: Reach | None, affine: Affine
) -> Normed:
    """Return the norm of x over `dims`, and the rows of it that a reach asks of other ranks."""
    if reach is None or torch.compiler.is_compiling():
        found = moments(x, domain, dims, wide(x.dtype))
        return Normed(
            _scaled(x, found.mean, found.squares / found.number, affine), None, *found
        )
    return Normed(
        *_Norm.apply(
            x,
            affine.weight,
            affine.bias,
            domain,
            tuple(dims),
            reach,
            affine.eps,
            affine.channel,
        )
    )


def _scaled(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, affine: Affine
) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias in one pass over x."""
    weight, bias = (_beside(parameter, mean, affine.channel) for parameter in affine[:2])
    scale = (var + affine.eps).rsqrt()
    shift = -mean * scale
    if weight is not None:
        scale = scale * weight
        shift = shift * weight
    if bias is not None:
        shift = shift + bias
    return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)


def _beside(
    parameter: torch.Tensor | None, mean: torch.Tensor, channel: int
) -> torch.Tensor | None:
    """Return the parameter of channels in a shape that broadcasts with x."""
    if parameter is None:
        return None
    return parameter.view(1, *mean.shape[1:channel], -1, *[1] * (mean.ndim - channel - 1))


class _Norm(torch.autograd.Function):
    """A norm whose statistics take along rows for other ranks: one message forward, and one backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, domain, dims, reach, eps, channel):
        axis = domain.axes[reach.dim]
        dtype = wide(x.dtype)
        shape = [*x.shape]
        foreign = foreign_rows(
            axis.layout.ranges, axis.layout.length, reach.wanted, reach.periodic
        )
        movement = plan_movement(axis.layout.ranges, foreign, axis.rank)
        shape[reach.dim] = movement.rows
        halo = x.new_empty(shape, dtype=dtype)

        def send(statistics: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
            if dim != reach.dim:
                return gathered(statistics, axis)
            theirs, parts = send_with(
                statistics, x.to(dtype), movement.sent, movement.received, axis, dim
            )
            for (start, stop), part in parts:
                halo.narrow(dim, start, stop - start).copy_(part)
            return theirs

        found = moments(x, domain, dims, dtype, send)
        var = found.squares / found.number
        affine = Affine(weight, bias, eps, channel)
        y, of_halo = (_scaled(rows, found.mean, var, affine).to(x.dtype) for rows in (x, halo))
        ctx.save_for_backward(x, halo, weight, bias, found.mean, (var + eps).rsqrt())
        ctx.options = domain, dims, reach, eps, channel, movement, foreign, found.number
        ctx.mark_non_differentiable(found.mean, found.squares)
        return y, of_halo, *found

    @staticmethod
    def backward(ctx, gradient, halo_gradient, *_):
        if torch.is_grad_enabled():
            return _Norm.differentiable(ctx, gradient, halo_gradient)
        x, halo, weight, bias, mean, scale = ctx.saved_tensors
        domain, dims, reach, _, channel, movement, _, number = ctx.options
        dtype = mean.dtype
        within = tuple(range(channel + 1, x.ndim))
        both = [
            (g.to(dtype), rows.to(dtype)) for g, rows in ((gradient, x), (halo_gradient, halo))
        ]
        sums = sum(g.sum(within, keepdim=True) for g, _ in both)
        products = (
            sum((g * rows).sum(within, keepdim=True) for g, rows in both) - mean * sums
        ) * scale
        entries = _beside(weight, mean, channel)
        slopes = scale if entries is None else scale * entries
        statistics = torch.stack([sums, products])
        if entries is not None:
            statistics = statistics * entries
        statistics = statistics.sum([dim + 1 for dim in dims], keepdim=True)
        parts = []
        for dim in dims:
            if dim == reach.dim:
                rows = both[1][0] * slopes
                theirs, parts = send_with(
                    statistics, rows, movement.received, movement.sent, domain.axes[dim], dim
                )
                statistics = theirs.sum(0)
            elif dim in domain.axes:
                statistics = gathered(statistics, domain.axes[dim]).sum(0)
        of_sums, of_products = statistics / number * scale
        slope = -of_products * scale
        result = torch.addcmul(-of_sums - slope * mean, both[0][1], slope).addcmul_(
            both[0][0], slopes
        )
        for (start, stop), part in parts:
            result.narrow(reach.dim, start, stop - start).add_(part)
        of_weight, of_bias = (
            None
            if like is None
            else total.sum_to_size(_beside(like, mean, channel).shape)
            .view_as(like)
            .to(like.dtype)
            for like, total in ((weight, products), (bias, sums))
        )
        return result.to(x.dtype), of_weight, of_bias, *[None] * 5

    @staticmethod
    def differentiable(ctx, *gradients):
        """Return gradients that have derivatives: those of a norm, and of a halo that is fetched behind it."""
        x, _, weight, bias, *_ = ctx.saved_tensors
        domain, dims, reach, eps, channel, _, foreign, _ = ctx.options
        axis = domain.axes[reach.dim]
        inputs = [p for p in (x, weight, bias) if p is not None and p.requires_grad]
        y = _normed(x, domain, dims, None, Affine(weight, bias, eps, channel)).y
        halo = exchange(y, axis.layout, foreign, dim=reach.dim, group=axis.group)
        found = iter(torch.autograd.grad([y, halo], inputs, gradients, create_graph=True))
        return *(
            next(found) if p is not None and p.requires_grad else None
            for p in (x, weight, bias)
        ), *[None] * 5


def _with_halo(
    y: DomainTensor, halo: torch.Tensor | None, reach: Reach | None, x: DomainTensor
) -> DomainTensor:
    """Return the norm y of x with the rows of it that came with the statistics."""
    y.asked = x.asked
    if halo is not None:
        y.halo = Halo(halo, reach, version_of(y.local), Use())
    return y

"""Rules of norms over sharded axes: by the statistics of all ranks, which may take along a halo (halos.py)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from trainer.distributed.domain_parallel.dispatch import DomainTensor, refuse_unless, rule
from trainer.distributed.domain_parallel.domain import Axis, Domain
from trainer.distributed.domain_parallel.halos import Halo, Reach, Use, foreign_rows, reach_of, send_with
from trainer.distributed.domain_parallel.reductions import Moments, gathered, moments, wide
from trainer.distributed.sharding.exchange import plan_movement
from trainer.distributed.sharding.tensors import version_of


@rule("group_norm", first_only=True)
def group_norm(function, x, num_groups, weight=None, bias=None, eps=1e-5) -> DomainTensor:
    """x: (N, C, *spatial); weight, bias: (C,), whole on every rank."""
    _check_channels(function, x)
    grouped, domain = x.local.unflatten(1, (num_groups, -1)), x.domain.moved(1, first=2)
    reach = reach_of(x.asked, x.domain)
    inside = None if reach is None else reach._replace(dim=reach.dim + 1)
    found = _normed(grouped, domain, range(2, x.ndim + 1), inside, weight, bias, eps, channel=2)
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
    refuse_unless(use_input_stats and running_mean is None, function, x, "running statistics of instances")
    return group_norm(function, x, x.shape[1], weight, bias, eps)


@rule("batch_norm", first_only=True)
def batch_norm(
    function, x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
) -> DomainTensor:
    """x: (N, C, *spatial). In training the running statistics are updated in place, equally on every rank."""
    _check_channels(function, x)
    if not training:
        shape = [1, -1, *[1] * (x.ndim - 2)]
        y = _scaled(x.local, running_mean.view(shape), running_var.view(shape), weight, bias, eps, 1)
        return DomainTensor(y, x.domain)
    reach = reach_of(x.asked, x.domain)
    found = _normed(x.local, x.domain, (0, *range(2, x.ndim)), reach, weight, bias, eps, channel=1)
    mean, squares, number = found.moments
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, squares / (number - 1))):
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


class Normed(NamedTuple):
    """A norm's result, with the halo of it, and the moments of its input."""

    y: torch.Tensor
    halo: torch.Tensor | None
    moments: Moments


def _normed(
    x: torch.Tensor,
    domain: Domain,
    dims: Sequence[int],
    reach: Reach | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    channel: int,
) -> Normed:
    """Return the norm of x over `dims`, and the rows of it that a reach asks of other ranks.

    channel: the dimension of x of which weight and bias have an entry for each element, with those before it.
    """
    halo, dtype = None, wide(x.dtype)

    def send(statistics: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        nonlocal halo
        if reach is None or dim != reach.dim or torch.compiler.is_compiling():
            return gathered(statistics, axis)
        foreign = foreign_rows(axis.layout.ranges, axis.layout.length, reach.wanted, reach.periodic)
        movement = plan_movement(axis.layout.ranges, foreign, axis.rank)
        statistics, halo = send_with(statistics, x.to(dtype), movement, axis, dim)
        return statistics

    found = moments(x, domain, dims, dtype, send)
    var = found.squares / found.number
    y, of_halo = (
        None if rows is None else _scaled(rows, found.mean, var, weight, bias, eps, channel).to(x.dtype)
        for rows in (x, halo)
    )
    return Normed(y, of_halo, found)


def _scaled(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    channel: int,
) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias in one pass over x."""
    weight, bias = (
        None if p is None else p.view(1, *mean.shape[1:channel], -1, *[1] * (mean.ndim - channel - 1))
        for p in (weight, bias)
    )
    scale = (var + eps).rsqrt()
    shift = -mean * scale
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    return _Scaled.apply(x, scale, shift)


class _Scaled(torch.autograd.Function):
    """x * scale + shift, computed in their type; x is kept for the backward in its own."""

    @staticmethod
    def forward(ctx, x, scale, shift):
        ctx.save_for_backward(x, scale)
        ctx.shape = shift.shape
        return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        exact = gradient.to(scale.dtype)
        return (exact * scale).to(x.dtype), (exact * x).sum_to_size(scale.shape), exact.sum_to_size(ctx.shape)


def _with_halo(y: DomainTensor, halo: torch.Tensor | None, reach: Reach | None, x: DomainTensor) -> DomainTensor:
    """Return the norm y of x with the rows of it that came with the statistics."""
    y.asked = x.asked
    if halo is not None:
        y.halo = Halo(halo, reach, version_of(y.local), Use())
    return y

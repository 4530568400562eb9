"""Rules of norms over sharded axes: each rank normalises its shard by the statistics of all ranks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule
from longshard.domain.domain import Domain
from longshard.domain.reductions import Moments, moments
from longshard.sharding.tensors import wide_type


@rule("group_norm", first_only=True)
def _group_norm(function, x, num_groups, weight=None, bias=None, eps=1e-5) -> DomainTensor:
    """Normalise x, (N, C, *spatial). weight, bias: (C,), whole on every rank."""
    _check_channels(function, x)
    grouped = x.local.unflatten(1, (num_groups, -1))
    domain = x.domain.moved(1, first=2)
    y, _ = _normed(grouped, domain, range(2, x.ndim + 1), Affine(weight, bias, eps, 2))
    return DomainTensor(y.flatten(1, 2), x.domain)


@rule("instance_norm", first_only=True)
def _instance_norm(
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
    return _group_norm(function, x, x.shape[1], weight, bias, eps)


@rule("batch_norm", first_only=True)
def _batch_norm(
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
    """Normalise x, (N, C, *spatial). In training the running statistics are updated in place, equally on every rank."""
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
    dims = (0, *range(2, x.ndim))
    y, stats = _normed(x.local, x.domain, dims, Affine(weight, bias, eps, 1))
    with torch.no_grad():
        for running, new in (
            (running_mean, stats.mean),
            (running_var, stats.squares / (stats.number - 1)),
        ):
            if running is not None:
                running.lerp_(new.flatten().to(running.dtype), momentum)
    return DomainTensor(y, x.domain)


@rule("layer_norm", "rms_norm", first_only=True)
def _last_norm(function, x, normalized_shape, *args, **kwargs) -> DomainTensor:
    is_whole = all(dim < x.ndim - len(normalized_shape) for dim in x.domain.axes)
    refuse_unless(is_whole, function, x, "it normalises over a sharded dimension")
    return DomainTensor(function(x.local, normalized_shape, *args, **kwargs), x.domain)


def _check_channels(function: Callable, x: DomainTensor) -> None:
    refuse_unless(1 not in x.domain.axes, function, x, "sharded channels")


class Affine(NamedTuple):
    """The parameters of a norm.

    Attributes:
        weight: The factor of each channel, for the dimensions up to `channel`; None if absent.
        bias: The bias, in the same shape; None if absent.
        eps: Is added to the variance.
        channel: The dimension of the channels in x.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    channel: int


def _normed(
    x: Tensor, domain: Domain, dims: Sequence[int], affine: Affine
) -> tuple[Tensor, Moments]:
    """Return the norm of x over `dims`, and the moments of all ranks."""
    stats = moments(x, domain, dims, wide_type(x.dtype))
    return _scaled(x, stats.mean, stats.squares / stats.number, affine), stats


def _scaled(x: Tensor, mean: Tensor, var: Tensor, affine: Affine) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias in one pass over x."""
    weight, bias = (_broadcast(parameter, mean, affine.channel) for parameter in affine[:2])
    scale = (var + affine.eps).rsqrt()
    shift = -mean * scale
    if weight is not None:
        scale = scale * weight
        shift = shift * weight
    if bias is not None:
        shift = shift + bias
    return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)


def _broadcast(parameter: Tensor | None, mean: Tensor, channel: int) -> Tensor | None:
    """Return the parameter of channels in a shape that broadcasts with x; None if absent."""
    if parameter is None:
        return None
    return parameter.view(1, *mean.shape[1:channel], -1, *[1] * (mean.ndim - channel - 1))

"""Rules of norms over sharded axes: each rank normalises its shard by the statistics of all ranks."""

import torch
from torch import Tensor

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule
from longshard.domain.reductions import moments
from longshard.sharding.tensors import wide_type


@rule("group_norm", first_only=True)
def _group_norm(function, x, num_groups, weight=None, bias=None, eps=1e-5) -> DomainTensor:
    """Normalise x, (N, C, *spatial). weight, bias: (C,), whole on every rank."""
    _check_channels(x)
    grouped = x.local.unflatten(1, (num_groups, -1))
    domain = x.domain.moved(1, first=2)
    stats = moments(grouped, domain, range(2, x.ndim + 1), wide_type(x.dtype))
    affine = _viewed((weight, bias), (1, num_groups, -1, *[1] * (x.ndim - 2)))
    y = _scaled(grouped, stats.mean, stats.squares / stats.number, eps, affine)
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
    refuse_unless(use_input_stats and running_mean is None, "running statistics of instances")
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
    _check_channels(x)
    shape = (1, -1, *[1] * (x.ndim - 2))
    affine = _viewed((weight, bias), shape)
    if not training:
        mean, var = _viewed((running_mean, running_var), shape)
        return DomainTensor(_scaled(x.local, mean, var, eps, affine), x.domain)
    stats = moments(x.local, x.domain, (0, *range(2, x.ndim)), wide_type(x.dtype))
    y = _scaled(x.local, stats.mean, stats.squares / stats.number, eps, affine)
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
    refuse_unless(is_whole, "it normalises over a sharded dimension")
    return DomainTensor(function(x.local, normalized_shape, *args, **kwargs), x.domain)


def _check_channels(x: DomainTensor) -> None:
    refuse_unless(1 not in x.domain.axes, "sharded channels")


def _viewed(parameters: tuple, shape: tuple[int, ...]) -> list[Tensor | None]:
    """Return parameters of channels in a shape that broadcasts with x; None if absent."""
    return [
        parameter if parameter is None else parameter.view(shape) for parameter in parameters
    ]


def _scaled(x: Tensor, mean: Tensor, var: Tensor, eps: float, affine: list) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias in one pass over x. affine: weight and bias."""
    weight, bias = affine
    scale = (var + eps).rsqrt()
    shift = -mean * scale
    if weight is not None:
        scale = scale * weight
        shift = shift * weight
    if bias is not None:
        shift = shift + bias
    return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)

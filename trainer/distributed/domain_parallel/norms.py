"""Normalisation over sharded axes: statistics of the whole tensor, combined by counts.

Each returns (result, domain); the domain does not change. weight and bias are whole on every rank, and their gradients
are partial sums over the ranks of the domain. Statistics are computed in at least float32.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.domain_parallel.reductions import count, domain_mean, moments
from trainer.distributed.sharding.placement import shard
from trainer.distributed.sharding.rows import connected


def group_norm(
    x: torch.Tensor,
    domain: Domain,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, Domain]:
    """Normalise groups of channels of each sample. x: (N, C, *spatial); weight, bias: (C,).

    Raises:
        ValueError: sharded channels, or channels that are no multiple of `num_groups`.
    """
    domain.shape(x)
    _check_channels(x, domain)
    if x.shape[1] % num_groups:
        raise ValueError(f"{x.shape[1]} channels cannot be cut into {num_groups} groups; use a divisor")
    if not domain.split(range(2, x.ndim)):
        # F.group_norm refuses one value a channel, and a shard of a batch may have one where the batch has more.
        return torch.group_norm(x, num_groups, weight, bias, eps) if x.numel() else connected(x, weight, bias), domain
    grouped, dims = x.unflatten(1, (num_groups, -1)), range(2, x.ndim + 1)
    mean, squares, number = moments(_wide(grouped), domain.moved(1, first=2), dims)
    channels = [1, num_groups, -1, *[1] * (x.ndim - 2)]
    parameters = (p if p is None else p.view(channels) for p in (weight, bias))
    return _apply(grouped, *_affine(mean, squares / number, eps), *parameters).flatten(1, 2), domain


def instance_norm(
    x: torch.Tensor,
    domain: Domain,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, Domain]:
    """Normalise each channel of each sample. x: (N, C, *spatial); weight, bias: (C,)."""
    return group_norm(x, domain, x.shape[1], weight, bias, eps)


def batch_norm(
    x: torch.Tensor,
    domain: Domain,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, Domain]:
    """Normalise each channel, over batch and domain in training, else by the running statistics. x: (N, C, *spatial).

    In training the running statistics are updated in place, equally on every rank. A batch that is cut over ranks is a
    sharded axis too: give dimension 0 in the domain.

    Raises:
        ValueError: sharded channels, one value a channel in training, or no running statistics in evaluation.
    """
    domain.shape(x)
    _check_channels(x, domain)
    dims = (0, *range(2, x.ndim))
    if not training or not domain.split(dims):
        if not training and (running_mean is None or running_var is None):
            raise ValueError("batch_norm with training=False needs running_mean and running_var")
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps), domain
    number = count(x, domain, dims)
    if number <= 1:
        raise ValueError(f"batch_norm in training needs more than one value a channel; x has {number}")
    mean, squares, _ = moments(_wide(x), domain, dims)
    parameters = (p if p is None else p.view(1, -1, *[1] * (x.ndim - 2)) for p in (weight, bias))
    y = _apply(x, *_affine(mean, squares / number, eps), *parameters)
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, squares / (number - 1))):
            if running is not None:
                running.lerp_(new.flatten().to(running.dtype), momentum)
    return y, domain


def layer_norm(
    x: torch.Tensor,
    domain: Domain,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, Domain]:
    """Normalise over the last dimensions. normalized_shape: their global sizes; weight, bias: of that shape, whole.

    Raises:
        ValueError: another shape.
    """
    dims = _last_dims(x, domain, normalized_shape)
    if not domain.split(dims):
        return F.layer_norm(x, tuple(normalized_shape), weight, bias, eps), domain
    mean, squares, number = moments(_wide(x), domain, dims)
    parameters = (_own_rows(p, domain, dims) for p in (weight, bias))
    return _apply(x, *_affine(mean, squares / number, eps), *parameters), domain


def rms_norm(
    x: torch.Tensor,
    domain: Domain,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> tuple[torch.Tensor, Domain]:
    """Divide by the root of the mean square over the last dimensions; as `layer_norm`. eps: None for the dtype's."""
    dims = _last_dims(x, domain, normalized_shape)
    if not domain.split(dims):
        return F.rms_norm(x, tuple(normalized_shape), weight, eps), domain
    square, _ = domain_mean(_wide(x).square(), domain, dims, keepdim=True)
    scale = (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    weight = _own_rows(weight, domain, dims)
    return (x * (scale if weight is None else scale * weight)).to(x.dtype), domain


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _affine(mean: torch.Tensor, var: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and shift with which x * scale + shift is normalised."""
    scale = (var + eps).rsqrt()
    return scale, -mean * scale


def _apply(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return (x * scale + shift) * weight + bias in one pass over x, where the parameters are small."""
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)


def _check_channels(x: torch.Tensor, domain: Domain) -> None:
    if x.ndim < 2 or domain.split([1]):
        raise ValueError(f"x of shape {tuple(x.shape)} must have its channels, dimension 1, whole on every rank")


def _last_dims(x: torch.Tensor, domain: Domain, normalized_shape: Sequence[int]) -> range:
    shape = domain.shape(x)
    dims = range(x.ndim - len(normalized_shape), x.ndim)
    if not len(dims) or dims[0] < 0 or shape[dims[0] :] != tuple(normalized_shape):
        raise ValueError(f"normalized_shape {tuple(normalized_shape)} is not the end of the global shape {shape}")
    return dims


def _own_rows(parameter: torch.Tensor | None, domain: Domain, dims: range) -> torch.Tensor | None:
    """Return the part of a parameter, whole on every rank, that belongs to this rank's rows."""
    if parameter is None:
        return None
    for dim, axis in domain.split(dims).items():
        parameter = shard(parameter, axis.layout, dim - dims[0], group=axis.group)
    return parameter

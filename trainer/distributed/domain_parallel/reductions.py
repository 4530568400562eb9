"""Rules of reductions and norms over sharded axes: statistics of the ranks, combined by counts, never a mean of means.

The result of a reduction is whole on every rank. Its gradient is partial: the ranks' gradients are summed in the
backward. Statistics are computed in at least float32.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from trainer.distributed.domain_parallel.dispatch import DomainTensor, refuse_unless, rule
from trainer.distributed.domain_parallel.domain import Axis, Domain
from trainer.distributed.domain_parallel.halos import Halo, Reach, Use, plan_halo, reach_of, send_with
from trainer.distributed.sharding.exchange import all_reduce, exchange, put_rows, send_rows
from trainer.distributed.sharding.placement import added_up, summed, with_adjoint
from trainer.distributed.sharding.tensors import to_device, version_of

# ---- reductions


@rule("sum", "mean")
def total(function, x, dim=None, keepdim=False, dtype=None) -> DomainTensor:
    local, dims = x.local if dtype is None else x.local.to(dtype), _dims(x, dim)
    # Of floats in at least float32: in float16 a sum overflows where a mean does not.
    result = local.sum(dims, keepdim=True, dtype=wide(local.dtype) if local.is_floating_point() else None)
    for axis in _axes(x.domain, dims):
        result = added_up(result, axis.group)
    if function.__name__ == "mean":
        result = result / math.prod([x.shape[d] for d in dims])
    return _reduced(result.to(local.dtype) if local.is_floating_point() else result, x, dims, keepdim)


@rule("amax", "amin")
def extreme(function, x, dim=None, keepdim=False) -> DomainTensor:
    """Equal maxima share the gradient evenly, as with torch.amax; a NaN on any rank is the result."""
    name = function.__name__
    sign, dims = -1 if name in ("amin", "min") else 1, _dims(x, dim)
    signed = sign * (x.local if x.is_floating_point() else x.local.long())
    top = _Max.apply(signed, dims, [axis.group for axis in _axes(x.domain, dims)])
    return _reduced((sign * top).to(x.dtype), x, dims, keepdim)


@rule("all", "any")
def truth(function, x, dim=None, keepdim=False) -> DomainTensor:
    sought = (x.local if function.__name__ == "any" else x.local == 0).bool().long()
    found = total(torch.sum, DomainTensor(sought, x.domain), dim, keepdim)
    return DomainTensor(found.local > 0 if function.__name__ == "any" else found.local == 0, found.domain)


@rule("var", "std")
def variance(function, x, dim=None, unbiased=None, keepdim=False, *, correction=None) -> DomainTensor:
    """As in torch, on CPUs it is computed in float64; without a positive divisor it is infinite or NaN."""
    if isinstance(dim, bool):  # the first argument may be `unbiased`
        dim, unbiased = None, dim
    correction, dims = (unbiased is not False) if correction is None else correction, _dims(x, dim)
    exact = torch.promote_types(x.dtype, torch.float64 if x.is_cpu else torch.float32)
    found = moments(x.local, x.domain, dims, exact)
    var = (found.squares / max(found.number - correction, 0)).to(wide(x.dtype))
    if function.__name__ == "std":  # without a gradient where it is 0
        var = torch.where(var == 0, 0.0, torch.where(var == 0, 1.0, var).sqrt())
    return _reduced(var.to(x.dtype), x, dims, keepdim)


@rule("prod")
def product(function, x, dim=None, keepdim=False, dtype=None) -> DomainTensor:
    dims, exact = _dims(x, dim), dtype or (x.dtype if x.is_floating_point() else torch.int64)
    result = x.local.to(exact)
    for d in dims:
        result = result.prod(d, keepdim=True)
        for axis in _axes(x.domain, [d]):
            result = gathered(result, axis).prod(0)
    return _reduced(result, x, dims, keepdim)


@rule("norm", "linalg_vector_norm")
def vector_norm(function, x, p=2.0, dim=None, keepdim=False, dtype=None, **named) -> DomainTensor:
    p = named.pop("ord", p)
    refuse_unless(p in (None, "fro") or (not isinstance(p, str) and p > 0), function, x, f"order {p!r}")
    order, dims = 2.0 if p in (None, "fro") else p, _dims(x, dim)
    local = x.local if dtype is None else x.local.to(dtype)
    if order == torch.inf:
        return extreme(torch.amax, DomainTensor(local.abs(), x.domain), dims, keepdim)
    norm = torch.linalg.vector_norm(local, order, dims, keepdim=True, dtype=wide(local.dtype))
    for axis in _axes(x.domain, dims):
        norm = torch.linalg.vector_norm(gathered(norm, axis), order, 0)
    return _reduced(norm if local.is_complex() else norm.to(local.dtype), x, dims, keepdim)


def _dims(x: DomainTensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the dimensions in order, counted from 0; None or an empty list: all."""
    asked = (dim,) if isinstance(dim, int) else dim or range(x.ndim)
    return tuple(sorted({d % x.ndim for d in asked}))


def _axes(domain: Domain, dims: Iterable[int]) -> list[Axis]:
    return [domain.axes[dim] for dim in dims if dim in domain.axes]


def _reduced(result: torch.Tensor, x: DomainTensor, dims: tuple[int, ...], keepdim: bool) -> DomainTensor:
    """Return a result of size 1 in the dimensions as that of a reduction of x."""
    return DomainTensor(result if keepdim else result.squeeze(dims), x.domain.reduced(dims, keepdim=keepdim))


# ---- norms


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
    with torch.no_grad():
        for running, new in ((running_mean, found.mean), (running_var, found.squares / (found.number - 1))):
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
    """A norm's result, with the halo of it, mean and sum of squares of the input, and how many elements these have."""

    y: torch.Tensor
    halo: torch.Tensor | None
    mean: torch.Tensor
    squares: torch.Tensor
    number: int


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
    if reach is None or torch.compiler.is_compiling():
        found = moments(x, domain, dims, wide(x.dtype))
        y = _scaled(x, found.mean, found.squares / found.number, weight, bias, eps, channel)
        return Normed(y, None, *found)
    return Normed(*_Norm.apply(x, weight, bias, domain, tuple(dims), reach, eps, channel))


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
    weight, bias = (_beside(parameter, mean, channel) for parameter in (weight, bias))
    scale = (var + eps).rsqrt()
    shift = -mean * scale
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    return torch.addcmul(shift, x.to(scale.dtype), scale).to(x.dtype)


def _beside(parameter: torch.Tensor | None, mean: torch.Tensor, channel: int) -> torch.Tensor | None:
    """Return the parameter of channels in a shape that broadcasts with x."""
    if parameter is None:
        return None
    return parameter.view(*[1] * (channel > 0), *mean.shape[1:channel], -1, *[1] * (mean.ndim - channel - 1))


class _Norm(torch.autograd.Function):
    """A norm whose statistics take along rows for other ranks: one message forward, and one backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, domain, dims, reach, eps, channel):
        axis = domain.axes[reach.dim]
        plan = plan_halo(axis.layout.ranges, axis.layout.length, reach.wanted, reach.periodic, axis.rank)
        dtype, halo = wide(x.dtype), None

        def send(statistics: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
            nonlocal halo
            if dim != reach.dim:
                return gathered(statistics, axis)
            theirs, halo = send_with(statistics, x.to(dtype), plan, axis, dim)
            return theirs

        found = moments(x, domain, dims, dtype, send)
        var = found.squares / found.number
        y, of_halo = (_scaled(rows, found.mean, var, weight, bias, eps, channel).to(x.dtype) for rows in (x, halo))
        ctx.save_for_backward(x, halo, weight, bias, found.mean, (var + eps).rsqrt())
        ctx.options = domain, dims, reach, eps, channel, plan, found.number
        ctx.mark_non_differentiable(found.mean, found.squares)
        return y, of_halo, *found

    @staticmethod
    def backward(ctx, gradient, halo_gradient, *_):
        if torch.is_grad_enabled():
            return _Norm.differentiable(ctx, gradient, halo_gradient)
        x, halo, weight, bias, mean, scale = ctx.saved_tensors
        domain, dims, reach, _, channel, plan, number = ctx.options
        dtype, within = mean.dtype, tuple(range(channel + 1, x.ndim))
        both = [(g.to(dtype), rows.to(dtype)) for g, rows in ((gradient, x), (halo_gradient, halo))]
        sums = sum(g.sum(within, keepdim=True) for g, _ in both)
        products = (sum((g * rows).sum(within, keepdim=True) for g, rows in both) - mean * sums) * scale
        entries = _beside(weight, mean, channel)
        slopes = scale if entries is None else scale * entries
        statistics = torch.stack([sums, products])
        if entries is not None:
            statistics = statistics * entries
        statistics = statistics.sum([dim + 1 for dim in dims], keepdim=True)
        returned = None
        for dim in dims:
            if dim == reach.dim:
                rows = both[1][0] * slopes
                theirs, returned = send_with(statistics, rows, plan.reversed, domain.axes[dim], dim)
                statistics = theirs.sum(0)
            elif dim in domain.axes:
                statistics = gathered(statistics, domain.axes[dim]).sum(0)
        of_sums, of_products = statistics / number * scale
        slope = -of_products * scale
        result = torch.addcmul(-of_sums - slope * mean, both[0][1], slope).addcmul_(both[0][0], slopes)
        put_rows(result.movedim(reach.dim, 0), sum(plan.sent, ()), returned.movedim(reach.dim, 0), add=True)
        of_weight, of_bias = (
            None if like is None else total.sum_to_size(_beside(like, mean, channel).shape).view_as(like).to(like.dtype)
            for like, total in ((weight, products), (bias, sums))
        )
        return result.to(x.dtype), of_weight, of_bias, *[None] * 5

    @staticmethod
    def differentiable(ctx, *gradients):
        """Return gradients that have derivatives: those of a norm, and of a halo that is fetched behind it."""
        x, _, weight, bias, *_ = ctx.saved_tensors
        domain, dims, reach, eps, channel, plan, _ = ctx.options
        axis, inputs = domain.axes[reach.dim], [p for p in (x, weight, bias) if p is not None and p.requires_grad]
        y = _normed(x, domain, dims, None, weight, bias, eps, channel=channel).y
        halo = exchange(y, axis.layout, plan.foreign, dim=reach.dim, group=axis.group)
        found = iter(torch.autograd.grad([y, halo], inputs, gradients, create_graph=True))
        return *(next(found) if p is not None and p.requires_grad else None for p in (x, weight, bias)), *[None] * 5


def _with_halo(y: DomainTensor, halo: torch.Tensor | None, reach: Reach | None, x: DomainTensor) -> DomainTensor:
    """Return the norm y of x with the rows of it that came with the statistics."""
    y.asked = x.asked
    if halo is not None:
        y.halo = Halo(halo, reach, version_of(y.local), Use())
    return y


# ---- statistics


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the floating type in which sums are kept."""
    return torch.promote_types(dtype, torch.float32)


class Moments(NamedTuple):
    """Mean and sum of squares about it, of size 1 in some dimensions, and the number of elements."""

    mean: torch.Tensor
    squares: torch.Tensor
    number: int


def moments(
    x: torch.Tensor,
    domain: Domain,
    dims: Sequence[int],
    dtype: torch.dtype,
    send: Callable[[torch.Tensor, Axis, int], torch.Tensor] | None = None,
) -> Moments:
    """Return the moments over `dims`, of a dtype.

    Each axis gathers the ranks' means and squares, which are combined as in Chan, Golub and LeVeque (1983). One
    collective for each sharded axis. send: how, if not by `gathered`: (the rank's, axis, dimension) -> all ranks'.
    """
    dims = tuple(dims)
    sizes = {dim: x.shape[dim] for dim in dims}
    number = math.prod([*sizes.values()])
    mean, squares = _Moments.apply(x, dims, max(number, 1), dtype)
    for dim in dims:
        if dim not in domain.axes:
            continue
        axis = domain.axes[dim]
        sizes[dim] = axis.layout.length
        number = math.prod([*sizes.values()])
        both = torch.stack([mean, squares])
        means, parts = (gathered(both, axis) if send is None else send(both, axis, dim)).unbind(1)
        rows = torch.tensor([axis.layout.local_length(rank) for rank in range(axis.degree)], dtype=means.dtype)
        weights = to_device(rows / max(axis.layout.length, 1), means.device).view(-1, *[1] * mean.ndim)
        mean = (means * weights).sum(0)
        squares = parts.sum(0) + ((means - mean).square() * weights).sum(0) * number
    return Moments(mean, squares, number)


def gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the x of all ranks of an axis, small and of one shape: (ranks, *x.shape); a collective, differentiable."""
    sizes = [x.numel()] * axis.degree

    def swap(parts: torch.Tensor) -> torch.Tensor:
        return send_rows(parts, sizes, sizes, axis.group, kind="statistics")

    return with_adjoint(torch.cat([x.reshape(-1)] * axis.degree), swap, swap).view(axis.degree, *x.shape)


class _Moments(torch.autograd.Function):
    """Mean and sum of squares about it of local elements: two passes, in CPUs' kernels many times var_mean's speed."""

    @staticmethod
    def forward(ctx, x, dims, number, dtype):
        ctx.number = number
        mean = x.sum(dims, keepdim=True, dtype=dtype) / number  # of no elements 0
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
            both = torch.stack([top.nan_to_num(-torch.inf, torch.inf, -torch.inf), top.isnan().to(top.dtype)])
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
            ties, gradient = summed(ties, group), added_up(gradient, group)
        return equal * (gradient / ties), None, None

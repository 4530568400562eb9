"""Rules of functions that compute each element from the elements at the same index, broadcast as in torch.

A function that changes its tensor in place (`x += y`, `relu_`, `inplace=True`) changes the shard, and returns x.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longshard.domain.dispatch import (
    VIEW,
    AnyTensor,
    DomainTensor,
    is_sharded,
    refuse_unless,
    rule,
    unwrapped,
    wrapped,
)
from longshard.domain.domain import Axis, Domain, shares_ranks
from longshard.domain.transfer import gather, move, reshard
from longshard.sharding.placement import shard

_NAMES = """
bool int long short abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bfloat16 bitwise_and
bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip clone complex conj conj_physical copysign
cos cosh deg2rad detach digamma div divide double elu empty_like eq erf erfc erfinv exp exp2 expm1 float float_power
floor floor_divide fmax fmin fmod frac full_like ge gelu gt half hardshrink hardsigmoid hardswish hardtanh heaviside
hypot imag isclose isfinite isinf isnan isneginf isposinf le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul
multiply nan_to_num ne neg negative ones_like polar positive pow rad2deg real reciprocal relu relu6 remainder
resolve_conj resolve_neg round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc where xlogy zeros_like
__add__ __sub__ __mul__ __truediv__ __floordiv__ __mod__ __pow__ __and__ __or__ __xor__ __radd__ __rsub__ __rmul__
__rdiv__ __rfloordiv__ __rmod__ __rpow__ __neg__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
_FORMS = [
    form for name in _NAMES.split() for form in (f"{name}_", name.replace("__", "__i", 1))
]
_IN_PLACE = frozenset(
    form
    for form in (*_FORMS, "copy_", "fill_", "zero_", "__idiv__")
    if form not in _NAMES.split() and (hasattr(Tensor, form) or hasattr(F, form))
)
"""Functions that change their first argument, such as `add_` and `__iadd__`."""


@rule(*_NAMES.split(), *_IN_PLACE, by_element=True)
def elementwise(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function on this rank's parts of the operands, sharded as `common_domain` says.

    Operands of other layouts are moved first, as in `own_part`: a collective. A function that changes its first
    operand in place returns this operand.

    Args:
        function: The function.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Raises:
        Unhandled: The result has another shape than the operands. Or the function changes a tensor in place that lacks
            the result's axes, or that may be a copy.
    """
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, AnyTensor)]
    x = operands[0]
    is_alone = len(operands) == 1 and isinstance(x, DomainTensor)
    shape = x.shape if is_alone else torch.broadcast_shapes(*(x.shape for x in operands))
    domain = x.domain if is_alone else common_domain(operands, shape)
    is_in_place = function.__name__ in _IN_PLACE or kwargs.get("inplace", False)
    if is_in_place:
        has_axes = isinstance(x, DomainTensor) and x.domain.axes.keys() == domain.axes.keys()
        why = "it changes a tensor that has not the result's axes"
        refuse_unless(has_axes and x.shape == shape, why)
        refuse_unless(x.base is None, f"{VIEW}; change a `clone` of it")

    def own(x: Any) -> Any:
        return own_part(x, domain, shape) if isinstance(x, AnyTensor) else x

    result = function(*map(own, args), **{name: own(x) for name, x in kwargs.items()})
    fits = getattr(result, "shape", None) == domain.local_shape(shape)
    refuse_unless(fits, "its result has another shape than its operands")
    return x if is_in_place else wrapped(result, domain)


@rule("prelu", first_only=True)
def _prelu(function, x, weight) -> DomainTensor:
    """Apply F.prelu. weight: one number, or one for each channel, dimension 1, which is whole."""
    refuse_unless(weight.numel() == 1 or 1 not in x.domain.axes, "sharded channels")
    return DomainTensor(function(x.local, weight), x.domain)


@rule("view_as_real", "view_as_complex")
def _complex_view(function, x) -> DomainTensor:
    is_real = function.__name__ == "view_as_real"
    is_whole = x.ndim - 1 not in x.domain.axes
    refuse_unless(is_real or is_whole, "sharded parts")
    # torch refuses the backward of an empty tensor
    if is_real and not x.local.numel():
        return DomainTensor(torch.stack([x.local.real, x.local.imag], -1), x.domain)
    return DomainTensor(function(x.local), x.domain)


@rule("contiguous")
def _contiguous(function, x, *args, **kwargs) -> DomainTensor:
    return DomainTensor(x.local.contiguous(*args, **kwargs), x.domain)


@rule("to", "type", "type_as", by_element=True)
def _converted(function, x, *args, **kwargs) -> Any:
    """Convert the shard; another tensor among the arguments gives only its type."""
    result = function(unwrapped(x), *unwrapped(args), **unwrapped(kwargs))
    return wrapped(result, x.domain) if isinstance(x, DomainTensor) else result


def common_domain(
    operands: Sequence, shape: Sequence[int], *, except_dim: int | None = None
) -> Domain:
    """Return the domain of a result: each dimension has the layout of the first operand that is sharded there.

    Args:
        operands: The operands, which broadcast to the shape.
        shape: The global shape of the result.
        except_dim: The dimension in which operands are put together and may have other sizes; None if absent.
    """
    domains = [x.domain.moved(len(shape) - x.ndim) for x in operands if is_sharded(x)]
    return merged(
        {d: a for d, a in each.axes.items() if d == except_dim or a.layout.length == shape[d]}
        for each in domains
    )


def merged(parts: Iterable[Mapping[int, Axis]]) -> Domain:
    """Return the domain with the axes of all parts.

    If a dimension, or a group of ranks, has several axes, the first one is kept, and the others are left out.

    Args:
        parts: Dimension to its axis, for each part.
    """
    axes = {}
    for part in parts:
        for dim, axis in part.items():
            if dim not in axes and not shares_ranks(axis, axes.values()):
                axes[dim] = axis
    return Domain(axes)


def own_part(x: AnyTensor, domain: Domain, shape: Sequence[int]) -> Tensor:
    """Return the part of an operand that belongs to this rank's part of a result; a collective unless it fits already.

    Rows of other layouts move to their owners; if a tensor is whole, each rank takes its own rows. A dimension that is
    sharded over the same ranks as another dimension of the result moves by one all-to-all. Any other sharded dimension
    is gathered, such as a row of one rank that is broadcast.

    Args:
        x: The operand, of any shape that broadcasts to the result's.
        domain: The domain of the result.
        shape: The global shape of the result.
    """
    x = wrapped(x)
    if x.shape == shape and x.domain == domain:
        return x.local
    before = len(shape) - x.ndim
    own_axes = {
        dim - before: axis
        for dim, axis in domain.axes.items()
        if dim >= before and x.shape[dim - before] == shape[dim]
    }
    for dim, axis in x.domain.axes.items():
        if dim in own_axes and own_axes[dim].group is axis.group:
            continue
        there = [
            d for d, a in own_axes.items() if a.group is axis.group and d not in x.domain.axes
        ]
        x = move(x, dim, there[0], own_axes[there[0]].layout) if there else gather(x, [dim])
    local = reshard(x, {dim: own_axes[dim].layout for dim in x.domain.axes}).local
    for dim, axis in own_axes.items():
        if dim not in x.domain.axes:
            local = shard(local, axis.layout, dim, group=axis.group)
    return local

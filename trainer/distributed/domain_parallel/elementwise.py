"""Rules of functions that compute each element from the elements at its place, broadcast as torch does."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.distributed.domain_parallel.dispatch import DomainTensor, refused, rule, unwrapped, wrapped
from trainer.distributed.domain_parallel.domain import Axis, Domain
from trainer.distributed.domain_parallel.transfer import reshard
from trainer.distributed.sharding.placement import shard

_NAMES = """
abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip
clone contiguous cos cosh deg2rad detach div divide double elu eq erf erfc exp exp2 expm1 float floor floor_divide
fmod ge gelu gt half hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log10 log1p log2
logical_and logical_not logical_or logical_xor logsigmoid lt masked_fill maximum minimum mish mul multiply ne neg
negative ones_like pow positive reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin sinh
softplus softsign sqrt square sub subtract tan tanh threshold true_divide trunc where zeros_like full_like
empty_like bfloat16
__add__ __sub__ __mul__ __truediv__ __floordiv__ __mod__ __pow__ __and__ __or__ __xor__ __radd__ __rsub__ __rmul__
__rtruediv__ __rpow__ __neg__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __rdiv__ __div__
"""


@rule(*_NAMES.split())
def elementwise(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Apply the function to the shards, after they are brought to one layout."""
    if kwargs.get("inplace"):
        kwargs["inplace"] = False  # the result is what the caller uses
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, DomainTensor | torch.Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    domain = common_domain(function.__name__, operands, shape)

    def own(x: Any) -> Any:
        return own_part(x, domain, shape) if isinstance(x, DomainTensor | torch.Tensor) else x

    result = function(*map(own, args), **{name: own(x) for name, x in kwargs.items()})
    return wrapped(result, domain)


@rule("to", "type", "type_as")
def converted(function: Callable, x: DomainTensor, *args: Any, **kwargs: Any) -> DomainTensor:
    """Convert the shard; another tensor among the arguments gives only its type."""
    return wrapped(function(x.local, *unwrapped(args), **unwrapped(kwargs)), x.domain)


def common_domain(name: str, operands: Sequence, shape: torch.Size, *, but_for: int | None = None) -> Domain:
    """Return the domain of a result of that shape: of each dimension the layout of the first operand sharded there.

    but_for: the dimension in which sizes differ, because operands are put together there.

    Raises:
        DomainOperatorError: operands are sharded over other ranks in one dimension, or one rank's row is broadcast.
    """
    axes: dict[int, Axis] = {}
    for x in operands:
        if not isinstance(x, DomainTensor):
            continue
        for dim, axis in x.domain.moved(len(shape) - x.ndim).axes.items():
            if axis.layout.length != shape[dim] and dim != but_for:
                raise refused(name, x, "a sharded dimension of size 1 is broadcast")
            if axes.setdefault(dim, axis).group is not axis.group:
                raise refused(name, x, f"another operand has dimension {dim} on other ranks")
    groups = [axis.group for axis in axes.values()]
    if len({id(group) for group in groups}) < len(groups):
        raise refused(name, operands[0], "its operands are sharded in different dimensions over the same ranks")
    return Domain(axes)


def own_part(x: DomainTensor | torch.Tensor, domain: Domain, shape: torch.Size) -> torch.Tensor:
    """Return the part of an operand that belongs to this rank's part of a result of that shape and domain.

    Rows of other layouts move to their owners; of a tensor that is whole each rank takes its rows.
    """
    before = len(shape) - x.ndim
    mine = {dim - before: axis for dim, axis in domain.axes.items() if dim >= before}
    if isinstance(x, DomainTensor):
        other = {d: mine[d].layout for d, a in x.domain.axes.items() if a.layout.ranges != mine[d].layout.ranges}
        local, has = reshard(x.local, x.domain, other)[0] if other else x.local, x.domain.axes
    else:
        local, has = x, {}
    for dim, axis in mine.items():
        if dim not in has and x.shape[dim] != 1:
            local = shard(local, axis.layout, dim, group=axis.group)
    return local

"""Rules of functions that only arrange elements: shapes, order of dimensions, slices, concatenation."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.distributed.domain_parallel import whole
from trainer.distributed.domain_parallel.dispatch import DomainTensor, is_sharded, refused, rule, wrapped
from trainer.distributed.domain_parallel.domain import Axis, Domain
from trainer.distributed.domain_parallel.elementwise import common_domain, own_part
from trainer.distributed.domain_parallel.transfer import gather
from trainer.distributed.sharding.layout import AxisLayout, sized
from trainer.distributed.sharding.ranges import Range, intersection, union

_PRIMES = (10007, 20011, 30011, 40009, 50021, 60013, 70001, 80021)  # each the stride of one dimension
# name -> place and default of the argument that names the dimension along which the function works
_ALONG = {
    "argmax": (1, None),
    "argmin": (1, None),
    "chunk": (2, 0),
    "glu": (1, -1),
    "index_select": (1, None),
    "log_softmax": (1, None),
    "logsumexp": (1, None),
    "narrow": (1, None),
    "normalize": (2, 1),
    "select": (1, None),
    "softmax": (1, None),
    "split": (2, 0),
    "tensor_split": (2, 0),
    "unbind": (1, 0),
}


@rule("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint", "t")
def arranged(function: Callable, x: DomainTensor, *args: Any, **kwargs: Any) -> DomainTensor:
    """Bring the dimensions of the shard into another order, which the strides of an empty tensor show."""
    marks = _PRIMES[: x.ndim]
    order = function(torch.empty_strided(x.shape, marks, device="meta"), *args, **kwargs).stride()
    axes = {order.index(marks[dim]): axis for dim, axis in x.domain.axes.items()}
    return wrapped(function(x.local, *args, **kwargs), Domain(axes))


@rule("unsqueeze")
def unsqueezed(function: Callable, x: DomainTensor, dim: int) -> DomainTensor:
    """Put in a dimension of size 1."""
    return wrapped(x.local.unsqueeze(dim), x.domain.moved(1, first=dim % (x.ndim + 1)))


@rule("unflatten")
def unflattened(function: Callable, x: DomainTensor, dim: int, sizes: Sequence[int]) -> Any:
    """Split a dimension; torch does so in Python, which the compiler does not trace."""
    return reshaped(torch.Tensor.view, x, (*x.shape[:dim], *sizes, *x.shape[dim % x.ndim + 1 :]))


@rule("view", "reshape", "flatten", "squeeze", "view_as", "reshape_as")
def reshaped(function: Callable, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_sharded(x):  # the other tensor is
        return x.reshape(tuple(args[0].shape))
    if isinstance(args[0] if args else None, torch.dtype):
        raise refused(function.__name__, x, "a view as another data type")
    empty = whole.mapped(lambda x: torch.empty(x.shape, device="meta") if hasattr(x, "shape") else x, (x, args, kwargs))
    return _reshaped(function.__name__, x, function(empty[0], *empty[1], **empty[2]).shape)


def _reshaped(name: str, x: DomainTensor, sizes: torch.Size) -> DomainTensor:
    """Merge or split dimensions. A sharded one may be the first of those that are merged, or that come of it.

    If it is merged behind another sharded one, as width behind height, it is gathered: the result is sharded as the
    first one alone.
    """
    axes: dict[int, Axis] = {}
    for dim, axis in x.domain.axes.items():
        after = math.prod(x.shape[dim:])
        if axes and math.prod(sizes[max(axes) + 1 :]) <= math.prod(x.shape[dim + 1 :]):
            return _reshaped(name, gather(x, [dim]), sizes)
        places = [place for place in range(len(sizes)) if math.prod(sizes[place:]) == after]
        if not places or places[-1] in axes or not x.numel():
            raise refused(name, x, f"dimension {dim} is not the first of those that are merged")
        place = places[-1]  # those before it have size 1
        old, new = after // axis.layout.length, after // sizes[place]  # elements of a row
        if any(end * old % new for ranges in axis.layout.ranges for part in ranges for end in part):
            raise refused(name, x, f"the shards {axis.layout.ranges} do not end at rows of {new // old}")
        ranges = tuple(tuple((a * old // new, b * old // new) for a, b in ranges) for ranges in axis.layout.ranges)
        axes[place] = Axis(AxisLayout(axis.layout.name, sizes[place], ranges), axis.group)
    result = Domain(axes)
    return wrapped(x.local.reshape(result.local_shape(sizes)), result)


@rule("expand", "expand_as")
def expanded(function: Callable, x: Any, *sizes: Any) -> Any:
    """Expand dimensions of size 1 that are whole."""
    if function.__name__ == "expand_as":
        sizes = sizes[0].shape
    if not is_sharded(x):
        return x.expand(*sizes)
    sizes = [*(sizes[0] if isinstance(sizes[0], Sequence) else sizes)]
    result = x.domain.moved(len(sizes) - x.ndim)
    for dim, axis in result.axes.items():
        if sizes[dim] not in (-1, axis.layout.length):
            raise refused("expand", x, f"dimension {dim} is sharded")
        sizes[dim] = axis.rows
    return wrapped(x.local.expand(sizes), result)


@rule("cat", "concat", "concatenate", "stack")
def concatenated(function: Callable, tensors: Sequence[Any], dim: int = 0) -> DomainTensor:
    """Put tensors together; the dimensions beside take the layout of the first sharded one.

    Along a sharded dimension nothing is sent: a rank keeps its rows of each tensor, one after another. Of a tensor that
    is whole there, such as a class token, the first rank has all rows.
    """
    is_new, first = function.__name__ == "stack", next(x for x in tensors if isinstance(x, DomainTensor))
    dim %= first.ndim + is_new
    domain = common_domain(function.__name__, tensors, first.shape, but_for=None if is_new else dim)
    axis = None if is_new else domain.axes.get(dim)
    if axis is None:
        parts = [own_part(x, domain, first.shape) for x in tensors]
        return wrapped(function(parts, dim), domain.moved(1, first=dim) if is_new else domain)
    parts, ranges, length = [], [()] * axis.degree, 0
    for x in tensors:
        here = x.domain.axes.get(dim) if isinstance(x, DomainTensor) else None
        here = here or Axis(sized([x.shape[dim] * (rank == 0) for rank in range(axis.degree)]), axis.group)
        parts.append(own_part(x, Domain(domain.axes | {dim: here}), torch.Size(x.shape)))
        behind = [[(start + length, stop + length) for start, stop in own] for own in here.layout.ranges]
        ranges = [union([*before, *own]) for before, own in zip(ranges, behind, strict=True)]
        length += x.shape[dim]
    layout = AxisLayout(axis.layout.name, length, tuple(ranges))
    return wrapped(function(parts, dim), Domain(domain.axes | {dim: Axis(layout, axis.group)}))


@rule(*_ALONG, first_only=True)
def along(function: Callable, x: DomainTensor, *args: Any, **kwargs: Any) -> Any:
    """Work along one dimension, which must be whole."""
    name = function.__name__
    place, default = _ALONG[name]
    dim = kwargs.get("dim", args[place - 1] if len(args) >= place else default)
    if not isinstance(dim, int) or dim % x.ndim in x.domain.axes:
        raise refused(name, x, f"it works along dimension {dim}")
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    drops = name in ("select", "unbind") or (name in ("argmax", "argmin", "logsumexp") and not keepdim)
    result = x.domain.reduced([dim % x.ndim], keepdim=False) if drops else x.domain
    return wrapped(function(x.local, *args, **kwargs), result)


@rule("__getitem__", first_only=True)
def sliced(function: Callable, x: DomainTensor, index: Any) -> DomainTensor:
    """Index by slices, numbers, None and an ellipsis. Rows stay where they are; of one row every rank gets a copy."""
    index = index if isinstance(index, tuple) else (index,)
    if any(not (i is None or i is Ellipsis or type(i) in (slice, int)) for i in index):
        raise refused("indexing", x, "an index is neither a slice nor a number")
    rest = x.ndim - sum(i is not None and i is not Ellipsis for i in index)
    place = index.index(Ellipsis) if Ellipsis in index else len(index)
    index = (*index[:place], *[slice(None)] * rest, *index[place + 1 :])
    local_index, axes, dim, place, single = [], {}, 0, 0, []
    for i in index:
        if (axis := x.domain.axes.get(dim)) is not None and i is not None:
            if isinstance(i, int):
                single.append(place)
                i = slice(i % axis.layout.length, i % axis.layout.length + 1)
            start, stop, step = i.indices(axis.layout.length)
            axes[place], i = _cut(axis, (start, max(start, stop))) if step == 1 else _every(axis, start, stop, step)
        local_index.append(i)
        dim, place = dim + (i is not None), place + (not isinstance(i, int))
    result = wrapped(x.local[tuple(local_index)], Domain(axes))
    if not single:
        return result
    rows = gather(result, single)
    return DomainTensor(rows.local.squeeze(single), rows.domain.reduced(single, keepdim=False))


def _cut(axis: Axis, part: Range) -> tuple[Axis, slice]:
    """Return the axis of the rows [start, stop), which stay at their owners, and this rank's slice of its shard."""
    (start, stop), chosen = part, union([part])
    ranges = tuple(tuple((a - start, b - start) for a, b in intersection(own, chosen)) for own in axis.layout.ranges)
    before = sum(min(b, start) - min(a, start) for a, b in axis.layout.ranges[axis.rank])
    cut = Axis(AxisLayout(axis.layout.name, stop - start, ranges), axis.group)
    return cut, slice(before, before + cut.rows)


def _every(axis: Axis, start: int, stop: int, step: int) -> tuple[Axis, list[int]]:
    """Return the axis of the rows start, start + step, ... below stop, and which rows of its shard this rank gives."""
    number = max(-(-(stop - start) // step), 0)

    def places(part: Range) -> Range:
        first, last = (min(max(-(-(end - start) // step), 0), number) for end in part)
        return first, last

    ranges = tuple(union(map(places, own)) for own in axis.layout.ranges)
    rows, before = [], 0
    for part in axis.layout.ranges[axis.rank]:
        rows += [before + start + place * step - part[0] for place in range(*places(part))]
        before += part[1] - part[0]
    return Axis(AxisLayout(axis.layout.name, number, ranges), axis.group), rows

"""Rules of functions that only arrange elements: shapes, order of dimensions, slices, concatenation."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longshard.domain import whole
from longshard.domain.dispatch import (
    VIEW,
    AnyTensor,
    DomainTensor,
    Unhandled,
    is_sharded,
    refuse_unless,
    refused,
    rule,
    unwrapped,
    wrapped,
)
from longshard.domain.domain import Axis, Domain
from longshard.domain.elementwise import common_domain, own_part
from longshard.domain.indexing import by_tensors
from longshard.domain.masking import assign_by_mask
from longshard.domain.transfer import gather, reshard
from longshard.sharding.layout import AxisLayout, sized
from longshard.sharding.ranges import Range, Shards, intersection, size, union
from longshard.sharding.tensors import planned

_MANY = 2**16
"""The most ranges of a rank, if a sharded dimension is merged after others."""
# each is the stride of one dimension
_PRIMES = (10007, 20011, 30011, 40009, 50021, 60013, 70001, 80021)


@rule("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint", "t")
def _arranged(function, x, *args, **kwargs) -> DomainTensor:
    """Bring the dimensions of the shard into another order, which the strides of an empty tensor show."""
    marks = _PRIMES[: x.ndim]
    order = function(
        torch.empty_strided(x.shape, marks, device="meta"), *args, **kwargs
    ).stride()
    axes = {order.index(marks[dim]): axis for dim, axis in x.domain.axes.items()}
    return wrapped(function(x.local, *args, **kwargs), Domain(axes))


@rule("unsqueeze")
def _unsqueezed(function, x, dim) -> DomainTensor:
    """Insert a dimension of size 1."""
    return wrapped(x.local.unsqueeze(dim), x.domain.moved(1, first=dim % (x.ndim + 1)))


@rule("unflatten")
def _unflattened(function, x, dim, sizes) -> Any:
    """Split a dimension. torch does it in Python, which the compiler does not trace."""
    return x.view(*x.shape[:dim], *sizes, *x.shape[dim % x.ndim + 1 :])


@rule("view", "reshape", "flatten", "squeeze", "view_as", "reshape_as")
def _reshape_rule(function, x, *args, **kwargs) -> Any:
    if not is_sharded(x):  # the other tensor is
        return x.reshape(tuple(args[0].shape))
    is_type = bool(args) and isinstance(args[0], torch.dtype)
    refuse_unless(not is_type, "a view as another data type")
    empty = whole.mapped(
        lambda x: torch.empty(x.shape, device="meta") if hasattr(x, "shape") else x,
        (x, args, kwargs),
    )
    return _reshaped(x, function(empty[0], *empty[1], **empty[2]).shape)


def _reshaped(x: DomainTensor, sizes: Sequence[int]) -> DomainTensor:
    """Return x with merged or split dimensions.

    If a sharded dimension is split, the result is sharded in the first new dimension at whose rows all shards end. If
    none fits, rows are sent, so that the shards end at rows of the first new dimension.

    If a sharded dimension is merged after whole dimensions, a shard has a range for each of their rows. If it is merged
    after another sharded dimension, as width after height, it is gathered.
    """
    refuse_unless(x.numel() > 0, "it has no elements")
    axes = {}
    for old, new in _groups(x.shape, sizes):
        sharded = [dim for dim in old if dim in x.domain.axes]
        if len(sharded) > 1:
            return _reshaped(gather(x, sharded[1:]), sizes)
        if not sharded:
            continue
        (dim,) = sharded
        before = math.prod(x.shape[old[0] : dim])
        after = math.prod(x.shape[dim + 1 : old[-1] + 1])
        axis = x.domain.axes[dim]
        if before > _MANY:
            raise Unhandled(
                f"dimension {dim} is merged behind {before} rows, more than {_MANY}"
            )
        shards = axis.layout.ranges
        shape = tuple(int(sizes[d]) for d in new)
        position, length, ranges = _refitted(axis.layout.length, shards, before, after, shape)
        layout = AxisLayout(axis.layout.name, length, ranges)
        # `layout` covers all rows of the group, and its ends are where it can be cut
        if position is None:
            flat = [*x.shape[: old[0]], layout.length, *x.shape[old[-1] + 1 :]]
            x = reshard(_reshaped(x, flat), {old[0]: layout})
            return _reshaped(x, sizes)
        axes[new[position]] = Axis(layout, axis.group)
    result = Domain(axes)
    return wrapped(x.local.reshape(result.local_shape(sizes)), result)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield groups of dimensions that become others; a group is as small as possible."""
    a = b = 0
    while a < len(old) or b < len(new):
        i = a
        j = b
        sizes = [1, 1]
        while i == a or j == b or sizes[0] != sizes[1] or (i == len(old)) != (j == len(new)):
            if j == len(new) or (i < len(old) and sizes[0] <= sizes[1]):
                sizes[0] *= old[i]
                i += 1
            else:
                sizes[1] *= new[j]
                j += 1
        yield range(a, i), range(b, j)
        a, b = i, j


@planned
def _refitted(
    length: int, ranges: Shards, before: int, after: int, sizes: tuple[int, ...]
) -> tuple[int | None, int, Shards]:
    """Return which of the new dimensions of a group is sharded, and length and ranges of its layout.

    If none fits: None, and the layout of the flattened group, cut at rows of its first new dimension.

    length, ranges: the layout of a dimension. before: number of rows of the dimensions before it. after: number of
    elements of each of its rows.
    """
    own = AxisLayout("rows", length, ranges).repeated(before)
    rows = [union((a * after, b * after) for a, b in shard) for shard in own.ranges]
    first = None
    for place, n in enumerate(sizes):
        blocks = math.prod(sizes[:place])
        unit = math.prod(sizes[place + 1 :])
        if n == 1 and max(sizes) > 1:
            continue
        first = unit if first is None else first
        inside = [intersection(shard, ((0, n * unit),)) for shard in rows]
        if any(end % unit for shard in inside for part in shard for end in part):
            continue
        fitting = AxisLayout(
            "rows", n, tuple(tuple((a // unit, b // unit) for a, b in r) for r in inside)
        )
        repeated = fitting.repeated(blocks).ranges
        if all(
            r == union((a * unit, b * unit) for a, b in s)
            for r, s in zip(rows, repeated, strict=True)
        ):
            return place, n, fitting.ranges
    flat = AxisLayout("rows", length * before * after, tuple(rows)).rounded(first)
    return None, flat.length, flat.ranges


@rule("expand", "expand_as")
def _expanded(function, x, *sizes) -> Any:
    """Expand dimensions of size 1. One that is sharded is gathered before."""
    if function.__name__ == "expand_as":
        sizes = sizes[0].shape
    if not is_sharded(x):
        return x.expand(*sizes)
    sizes = [*(sizes[0] if isinstance(sizes[0], Sequence) else sizes)]
    before = len(sizes) - x.ndim
    x = gather(
        x,
        [
            dim
            for dim, axis in x.domain.axes.items()
            if sizes[before + dim] not in (-1, axis.layout.length)
        ],
    )
    result = x.domain.moved(before)
    for dim, axis in result.axes.items():
        sizes[dim] = axis.rows
    return wrapped(x.local.expand(sizes), result)


@rule("repeat", "tile")
def _repeated(function, x, *sizes) -> DomainTensor:
    sizes = [*(sizes[0] if sizes and isinstance(sizes[0], Sequence) else sizes)]
    sizes = [1] * (x.ndim - len(sizes)) + sizes
    x = x.reshape(*[1] * (len(sizes) - x.ndim), *x.shape)
    own = [1 if dim in x.domain.axes else times for dim, times in enumerate(sizes)]
    result = wrapped(x.local.repeat(*own), x.domain)
    for dim in x.domain.axes:
        if sizes[dim] != 1:
            result = _concatenated(torch.cat, [result] * sizes[dim], dim)
    return result


@rule("repeat_interleave", first_only=True)
def _each_repeated(function, x, repeats, dim=None) -> DomainTensor:
    refuse_unless(
        isinstance(repeats, int) and dim is not None,
        "repeats by a tensor, or of all elements",
    )
    dim %= x.ndim
    wide = x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
    return wide.flatten(dim, dim + 1)


@rule("pixel_shuffle", first_only=True)
def _pixel_shuffle(function, x, factor) -> DomainTensor:
    *before, _, h, w = x.shape
    x = x.reshape(*before, -1, factor, factor, h, w).movedim((-4, -3), (-3, -1))
    return x.reshape(*before, -1, h * factor, w * factor)


@rule("pixel_unshuffle", first_only=True)
def _pixel_unshuffle(function, x, factor) -> DomainTensor:
    *before, _, h, w = x.shape
    x = x.reshape(*before, -1, h // factor, factor, w // factor, factor).movedim(
        (-3, -1), (-4, -3)
    )
    return x.reshape(*before, -1, h // factor, w // factor)


@rule("channel_shuffle", first_only=True)
def _channel_shuffle(function, x, groups) -> DomainTensor:
    return x.unflatten(1, (groups, -1)).transpose(1, 2).reshape(x.shape)


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def _created(function, x, *size, **kwargs) -> DomainTensor:
    """Create a tensor.

    If it has as many dimensions as x, and the same size in each dimension in which x is sharded, it is sharded as x.
    Otherwise it is whole on every rank.
    """
    made = function(torch.empty((), device="meta"), *size, **{**kwargs, "device": "meta"})
    same = made.ndim == x.ndim and all(made.shape[dim] == x.shape[dim] for dim in x.domain.axes)
    domain = x.domain if same else Domain({})
    value = size[1:] if function.__name__ == "new_full" else ()
    kwargs.pop("size", None)  # the size of the shard replaces it
    return wrapped(function(x.local, domain.local_shape(made.shape), *value, **kwargs), domain)


@rule("cat", "concat", "concatenate", "stack")
def _concatenated(function, tensors, dim=0) -> DomainTensor:
    """Concatenate tensors; the other dimensions have the layout of the first tensor that is sharded there.

    Along a sharded dimension nothing is sent: a rank keeps its rows of each tensor, one after another. If a tensor is
    whole there, such as a class token, the first rank has all its rows.
    """
    is_new = function.__name__ == "stack"
    first = next(x for x in tensors if isinstance(x, DomainTensor))
    dim %= first.ndim + is_new
    domain = common_domain(tensors, first.shape, except_dim=None if is_new else dim)
    axis = None if is_new else domain.axes.get(dim)
    if axis is None:
        parts = [own_part(x, domain, first.shape) for x in tensors]
        return wrapped(function(parts, dim), domain.moved(1, first=dim) if is_new else domain)
    parts = []
    ranges = [()] * axis.degree
    length = 0
    for x in tensors:
        here = wrapped(x).domain.axes.get(dim)
        if here is None or here.group is not axis.group:
            on_first = sized([x.shape[dim], *[0] * (axis.degree - 1)])
            here = Axis(on_first, axis.group)
        parts.append(own_part(x, Domain(domain.axes | {dim: here}), x.shape))
        shifted = [
            [(start + length, stop + length) for start, stop in own]
            for own in here.layout.ranges
        ]
        ranges = [union([*before, *own]) for before, own in zip(ranges, shifted, strict=True)]
        length += x.shape[dim]
    layout = AxisLayout(axis.layout.name, length, tuple(ranges))
    return wrapped(function(parts, dim), Domain(domain.axes | {dim: Axis(layout, axis.group)}))


@rule("__getitem__")
def _sliced(function, x, index) -> DomainTensor:
    """Index by slices, numbers, None, an ellipsis and tensors of numbers.

    Rows of slices stay on their rank. A number that indexes a sharded dimension is a collective: every rank gets a copy
    of the row.
    """
    index = index if isinstance(index, tuple) else (index,)
    index = tuple(torch.tensor(i, device=x.device) if isinstance(i, list) else i for i in index)
    tensors = [place for place, i in enumerate(index) if isinstance(i, AnyTensor)]
    if tensors:
        return by_tensors(wrapped(x), index, tensors)
    local_index, domain, single = _own_index(x, index)
    result = wrapped(x.local[local_index], domain)
    if not single:
        return result
    rows = gather(result, single)
    return DomainTensor(rows.local.squeeze(single), rows.domain.reduced(single, keepdim=False))


@rule("__setitem__")
def _assigned(function, x, index, value) -> None:
    """Change rows on their rank, in place. A sharded value for a whole tensor is gathered.

    If x may be a copy where torch has a view, or a tensor of numbers indexes x, the call is refused.
    """
    if not is_sharded(x):
        refuse_unless(isinstance(value, DomainTensor), "rows that are changed by number")
        unwrapped(x)[index] = gather(value).local
        return
    refuse_unless(x.base is None, f"{VIEW}; change a `clone` of it")
    if isinstance(index, AnyTensor) and index.dtype == torch.bool:
        assign_by_mask(x, index, value)
        return
    local_index, domain, single = _own_index(x, index)
    part = wrapped(x.local.detach()[local_index], domain)
    if isinstance(value, AnyTensor):
        for dim in single:  # a number removes a dimension
            value = value.unsqueeze(dim - part.ndim) if value.ndim >= part.ndim - dim else value
        value = own_part(value, part.domain, part.shape)
    x.local[local_index] = value


def _own_index(x: DomainTensor, index: Any) -> tuple[tuple, Domain, list[int]]:
    """Return the index of the shard, the domain of its result, and the result's dimensions that a number indexes.

    Such a dimension has size 1 on the rank that has the row, and size 0 on others. Tensors as indices are refused.
    """
    index = index if isinstance(index, tuple) else (index,)
    if any(not (i is None or i is Ellipsis or type(i) in (slice, int)) for i in index):
        raise refused(
            "indexing",
            x,
            "indices other than slices and numbers; tensors of numbers can only be read",
        )
    free = x.ndim - sum(i is not None and i is not Ellipsis for i in index)
    place = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
    index = (*index[:place], *[slice(None)] * free, *index[place + 1 :])
    local_index = []
    axes = {}
    dim = 0
    place = 0
    single = []
    for i in index:
        if (axis := x.domain.axes.get(dim)) is not None and i is not None:
            if isinstance(i, int):
                single.append(place)
                i = slice(i % axis.layout.length, i % axis.layout.length + 1)
            axes[place], i = _cut(axis, i.indices(axis.layout.length))
        local_index.append(i)
        dim += i is not None
        place += not isinstance(i, int)
    return tuple(local_index), Domain(axes), single


def _cut(axis: Axis, part: tuple[int, int, int]) -> tuple[Axis, slice | list[int]]:
    """Return the axis of the rows start, start + step, ..., which stay at their owners, and this rank's part of them.

    part: start, stop and step. The part of a rank is the index of its shard: a slice if the step is 1.
    """
    number, ranges, rows = _chosen(axis.layout.ranges, axis.rank, part)
    cut = Axis(AxisLayout(axis.layout.name, number, ranges), axis.group)
    return cut, slice(*rows) if part[2] == 1 else list(rows)


@planned
def _chosen(
    owned: Shards, rank: int, part: tuple[int, int, int]
) -> tuple[int, Shards, tuple[int, ...]]:
    """Return the number of chosen rows, each rank's ranges of the result, and this rank's chosen rows as places.

    The places count in the rank's shard. With step 1 they are only the first one and the end.

    part: start, stop and step of the rows that are chosen.
    """
    start, stop, step = part
    number = max(-(-(stop - start) // step), 0)

    def places(part: Range) -> Range:
        first, last = (min(max(-(-(end - start) // step), 0), number) for end in part)
        return first, last

    ranges = tuple(union(map(places, own)) for own in owned)
    if step == 1:
        before = sum(min(b, start) - min(a, start) for a, b in owned[rank])
        return number, ranges, (before, before + size(ranges[rank]))
    rows = []
    before = 0
    for part in owned[rank]:
        rows += [before + start + place * step - part[0] for place in range(*places(part))]
        before += part[1] - part[0]
    return number, ranges, tuple(rows)

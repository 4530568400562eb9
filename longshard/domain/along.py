"""Rules of functions that work along a sharded dimension.

softmax, logsumexp, normalize      statistics of the ranks are combined
max, argmax, topk                  each rank's best rows are gathered, and the best of them chosen
chunk, select, narrow, diff        rows stay at their owners
sort, fft, median, cumprod         another dimension is sharded instead, by one all-to-all, and then again this one
"""

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from longshard.domain.dispatch import AnyTensor, DomainTensor, Unhandled, rule, wrapped
from longshard.domain.domain import balanced, sized
from longshard.domain.elementwise import elementwise
from longshard.domain.reductions import extreme, vector_norm
from longshard.domain.transfer import gather, move
from longshard.domain.whole import flat, mapped
from longshard.sharding.placement import rows_on, shard
from longshard.sharding.rows import connected
from longshard.sharding.tensors import wide_type

Rule = Callable[..., Any]


def along(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for calls whose argument `dim` is a sharded dimension.

    If `dim` is not sharded, the rule is not called: each rank applies the function to its shard. If `dim` is None, the
    call raises Unhandled.

    Args:
        *names: Names of the functions of torch.
    """

    def register(sharded: Rule) -> Rule:
        bind = signature(sharded).bind

        @rule(*names, first_only=True)
        @wraps(sharded)
        def applied(function: Callable, x: DomainTensor, *args: Any, **kwargs: Any) -> Any:
            bound = bind(function, x, *args, **kwargs)
            bound.apply_defaults()
            asked = bound.arguments["dim"]
            dims = [asked] if isinstance(asked, int) else asked
            if dims is None or not all(isinstance(d, int) for d in dims):
                raise Unhandled(f"it works along dimension {asked}")
            dims = [d % x.ndim for d in dims]
            if any(d in x.domain.axes for d in dims):
                return sharded(function, x, *args, **kwargs)
            result = function(x.local, *args, **kwargs)
            is_dropped = next(flat(result)).ndim < x.ndim
            return wrapped(
                result, x.domain.reduced(dims, keepdim=False) if is_dropped else x.domain
            )

        return applied

    return register


# ---- Statistics


@along("softmax", "log_softmax")
def _softmax(function, x, dim=None, dtype=None, _stacklevel=3) -> DomainTensor:
    exact = x.to(wide_type(dtype or x.dtype))
    exact = exact - exact.detach().amax(dim, keepdim=True)
    total = exact.exp().sum(dim, keepdim=True)
    result = exact.exp() / total if function.__name__ == "softmax" else exact - total.log()
    return result.to(dtype or x.dtype)


@along("logsumexp")
def _logsumexp(function, x, dim, keepdim=False) -> DomainTensor:
    top = x.detach().amax(dim, keepdim=True)
    top = top.masked_fill(top.isinf(), 0)
    result = (x.to(wide_type(x.dtype)) - top).exp().sum(dim, keepdim=True).log() + top
    return (result if keepdim else result.squeeze(dim)).to(x.dtype)


@rule("normalize", first_only=True)
def _normalize(function, x, p=2.0, dim=1, eps=1e-12, out=None) -> DomainTensor:
    return x / vector_norm(torch.linalg.vector_norm, x, p, dim, keepdim=True).clamp_min(eps)


# ---- The best rows of each rank


@along("max", "min")
def _extreme_of_rows(function, x, dim, keepdim=False) -> Any:
    """Return the extremes and their indices in the whole tensor, as torch does.

    Of equal extremes, the first one of the first rank that has it is taken.
    """
    chosen = _best(x, dim, 1, lambda part, dim: function(part, dim, keepdim=True))
    return getattr(torch.return_types, function.__name__)(
        chosen if keepdim else [t.squeeze(dim) for t in chosen]
    )


@rule("max", "min")
def _extreme(function, x, dim=None, keepdim=False) -> Any:
    if isinstance(dim, AnyTensor):  # of two tensors
        return elementwise(
            torch.maximum if function.__name__ == "max" else torch.minimum, x, dim
        )
    return extreme(function, x) if dim is None else _extreme_of_rows(function, x, dim, keepdim)


@along("argmax", "argmin")
def _place_of_extreme(function, x, dim=None, keepdim=False) -> DomainTensor:
    return getattr(x, function.__name__[3:])(dim, keepdim).indices


@along("topk")
def _topk(function, x, k, dim=-1, largest=True, sorted=True) -> Any:
    best = _best(
        x, dim, k, lambda part, dim: part.topk(min(k, part.shape[dim]), dim, largest, sorted)
    )
    return torch.return_types.topk(best)


def _best(x: DomainTensor, dim: int, number: int, choose: Callable) -> list[DomainTensor]:
    """Return [values, indices] of the best rows along a sharded dimension, whole on every rank.

    Indices count in the whole tensor.

    choose: takes a tensor and the dimension; returns values and places of the `number` best rows, or of all if fewer.
    """
    dim %= x.ndim
    axis = x.domain.axes[dim]
    few = sized([min(number, rows) for rows in axis.layout.lengths])
    domain = x.domain.layouts({dim: few})
    values, places = (
        choose(x.local, dim)
        if x.local.shape[dim]
        else (x.local, torch.zeros_like(x.local).long())
    )
    rows = rows_on(axis.layout, axis.rank, x.device)[places]
    values, rows = (gather(DomainTensor(part, domain), [dim]) for part in (values, rows))
    best, places = choose(values.local, dim)
    return [
        DomainTensor(part, values.domain) for part in (best, rows.local.gather(dim, places))
    ]


# ---- Rows that stay


@along("chunk", "split", "split_with_sizes", "tensor_split")
def _pieces(function, x, sizes=None, dim=0, **named) -> tuple[DomainTensor, ...]:
    optional = [] if sizes is None else [sizes]
    parts = function(torch.empty(x.shape, device="meta"), *optional, dim=dim, **named)
    ends = accumulate((part.shape[dim] for part in parts), initial=0)
    return tuple(_rows(x, dim, slice(*part)) for part in pairwise(ends))


@along("unbind")
def _unbind(function, x, dim=0) -> tuple[DomainTensor, ...]:
    return tuple(_rows(x, dim, row) for row in range(x.shape[dim]))


@along("select")
def _select(function, x, dim, index) -> DomainTensor:
    return _rows(x, dim, index)


@along("narrow")
def _narrow(function, x, dim, start, length) -> DomainTensor:
    first = start + x.shape[dim] * (start < 0)
    return _rows(x, dim, slice(first, first + length))


@rule("diff", first_only=True)
def _diff(function, x, n=1, dim=-1) -> DomainTensor:
    for _ in range(n):
        x = _rows(x, dim, slice(1, None)) - _rows(x, dim, slice(-1))
    return x


@rule("glu", first_only=True)
def _glu(function, x, dim=-1) -> DomainTensor:
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


def _rows(x: DomainTensor, dim: int, rows: slice | int) -> DomainTensor:
    return x[(slice(None),) * (dim % x.ndim) + (rows,)]


# ---- Another dimension is sharded


@along("sort", "argsort", "mode")
def _by_move(function, x, dim=-1, *args, **named) -> Any:
    return whole_along(lambda part: function(part, dim, *args, **named), x, dim)


@along("cumprod", "cummax", "cummin", "logcumsumexp", "median", "nanmedian")
def _by_move_without_default(function, x, dim, *args, **named) -> Any:
    return _by_move(function, x, dim, *args, **named)


@along("kthvalue")
def _kthvalue(function, x, k, dim=-1, keepdim=False) -> Any:
    return whole_along(lambda part: function(part, k, dim, keepdim), x, dim)


def whole_along(function: Callable[[Tensor], Any], x: DomainTensor, dim: int) -> Any:
    """Return function(x). The function gets tensors that have the dimension `dim` whole; another one may be sharded.

    A result that keeps the number of rows has the layout of x; with another number of rows, it is balanced. A result
    without the dimension, or with one row, is whole on every rank.

    Args:
        function: Takes a tensor of any shape.
        x: The tensor, any shape.
        dim: The dimension.
    """
    dim %= x.ndim
    axis = x.domain.axes.get(dim)
    if axis is None:
        return wrapped(_on_shard(function, x.local), x.domain)
    free = [other for other in range(x.ndim) if other not in x.domain.axes]
    target = max(free, key=x.size) if free else None  # None: every rank computes all
    y = (
        gather(x, [dim])
        if target is None
        else move(x, dim, target, balanced(x.shape[target], axis.degree))
    )

    def back(part: Tensor) -> DomainTensor:
        is_dropped = part.ndim < x.ndim
        rows = 0 if is_dropped else part.shape[dim]
        if is_dropped or rows == 1:
            part = DomainTensor(part, y.domain.reduced([dim], keepdim=not is_dropped))
            return (
                part
                if target is None
                else gather(part, [target - (is_dropped and target > dim)])
            )
        layout = axis.layout if rows == axis.layout.length else balanced(rows, axis.degree)
        if target is not None:
            return move(DomainTensor(part, y.domain), target, dim, layout)
        own = shard(part, layout, dim, group=axis.group)
        return DomainTensor(own, x.domain.layouts({dim: layout}))

    return mapped(back, _on_shard(function, y.local))


def _on_shard(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return what the function returns for a shard. A shard without elements, which some libraries refuse, gives zeros.

    The zeros have the shape that the function would return.
    """
    if x.numel() or x.is_meta:
        return function(x)
    shapes = function(torch.empty_like(x, device="meta"))
    return mapped(
        lambda part: connected(torch.zeros_like(part, device=x.device), x).to(part.dtype),
        shapes,
    )


@rule(
    *[
        f"fft_{name}{end}"
        for name in ("fft", "ifft", "rfft", "irfft")
        for end in ("", "2", "n")
    ],
    first_only=True,
)
def _fourier(function, x, s=None, dim=None, norm=None, n=None) -> DomainTensor:
    """Transform one dimension after another.

    The transform of real numbers begins with the last dimension; its inverse ends with it.
    """
    kind = function.__name__.removeprefix("fft_")
    one = kind.rstrip("2n")
    sizes = n if s is None else s
    if one == kind:
        dims = [-1 if dim is None else dim]
        sizes = [sizes]
    else:
        number = 2 if kind[-1] == "2" else x.ndim if sizes is None else len(sizes)
        dims = [*range(-number, 0)] if dim is None else [*dim]
        sizes = [None] * len(dims) if sizes is None else [*sizes]
    steps = [(one.replace("r", ""), *each) for each in zip(dims, sizes, strict=True)]
    steps[-1] = one, *steps[-1][1:]
    for name, along_dim, size in reversed(steps) if one == "rfft" else steps:
        size = None if size == -1 else size
        transform = partial(getattr(torch.fft, name), n=size, dim=along_dim, norm=norm)
        x = whole_along(transform, x, along_dim)
    return x


@rule("fft_fftshift", "fft_ifftshift", first_only=True)
def _shifted_frequencies(function, x, dim=None) -> DomainTensor:
    dims = [*range(x.ndim)] if dim is None else dim
    dims = [dims] if isinstance(dims, int) else dims
    sign = 1 if function.__name__ == "fft_fftshift" else -1
    return x.roll([sign * (x.shape[d] // 2) for d in dims], [*dims])

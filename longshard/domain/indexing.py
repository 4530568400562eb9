"""Rules of functions that take and add rows by their numbers in the whole tensor, as graphs and meshes do.

    x[numbers], index_select      each rank asks the owners for the rows that it lacks, each row once
    index_add, scatter_add        the adjoint: the ranks' contributions to a row are added up at its owner
    scatter_reduce                sums and means by it; products and extremes of each rank are combined at the owners

Numbers that are sharded, such as a rank's edges, give rows on the rank of the numbers. The rows that a rank asks for
depend on data: their numbers are sent first, and on a GPU the host waits for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshard.domain.dispatch import (
    AnyTensor,
    DomainTensor,
    is_sharded,
    refuse_unless,
    refused,
    rule,
    unwrapped,
    wrapped,
)
from longshard.domain.domain import Axis, Domain, balanced, shares_ranks
from longshard.domain.elementwise import common_domain, own_part
from longshard.domain.masking import by_mask
from longshard.domain.reductions import gathered
from longshard.domain.transfer import gather
from longshard.sharding.exchange import all_reduce, exchange_counts, send_rows
from longshard.sharding.placement import added_up, places_on
from longshard.sharding.rows import with_rows
from longshard.sharding.tensors import wide_type, with_adjoint

_KIND = "rows by number"
"""The kind under which calls and bytes are counted."""


@rule("index_select")
def _index_select(function, x, dim, index) -> DomainTensor:
    """Select rows. index: 1-D. If the index is sharded, the result is sharded alike.

    If the index is whole, and the rows of x are sharded, the ranks of x divide the index and the result evenly.
    """
    x = wrapped(x)
    dim %= x.ndim
    row_axis = x.domain.axes.get(dim)
    local_index, index_axis = _local_numbers(index, row_axis)
    domain = x.domain.without(dim)
    if index_axis is not None:
        taken = [d for d, axis in domain.axes.items() if axis.group is index_axis.group]
        x = gather(x, taken)
        domain = Domain(domain.without(*taken).axes | {dim: index_axis})
    if row_axis is None or x.local.is_meta:
        return DomainTensor(x.local.index_select(dim, local_index), domain)
    take, give = rows_by_number(row_axis, local_index, dim)
    return DomainTensor(with_adjoint(x.local, take, give), domain)


@rule("index_add", "index_add_")
def _index_add(function, x, dim, index, source, *, alpha=1) -> Any:
    """Add rows; `index_add_` in place. index: 1-D.

    If the rows of x are whole, the ranks' sums are added up. If they are sharded, each owner gets the sums of its rows.
    """
    dim %= x.ndim
    target_rows = wrapped(x)
    row_axis = target_rows.domain.axes.get(dim)
    source, local_index, index_axis = _own_sources(target_rows, dim, index, source)
    source = source * alpha
    if row_axis is None:
        sums = torch.zeros_like(target_rows.local, dtype=wide_type(source.dtype)).index_add(
            dim, local_index, source.to(wide_type(source.dtype))
        )
        if index_axis is not None:
            sums = added_up(sums, index_axis.group)
    elif source.is_meta:
        sums = torch.zeros_like(target_rows.local)
    else:
        take, give = rows_by_number(row_axis, local_index, dim)
        sums = with_adjoint(source, give, take)
    result = DomainTensor(sums.to(target_rows.dtype), target_rows.domain)
    return torch.add(x, result) if function.__name__ == "index_add" else x.add_(result)


@rule("scatter_add", "scatter_add_")
def _scatter_add(function, x, dim, index, src) -> Any:
    """Add rows. index: one number for each row, expanded over the other dimensions, as graph layers have it."""
    number = _row_numbers(x, dim, index, src)
    return getattr(x, function.__name__.replace("scatter", "index"))(dim, number, src)


@rule("scatter_reduce")
def _scatter_reduce(function, x, dim, index, src, reduce, *, include_self=True) -> DomainTensor:
    """Reduce rows. index: as for `scatter_add`. reduce: sum, mean, prod, amax, amin. Equal extremes share gradients."""
    dim %= x.ndim
    number = _row_numbers(x, dim, index, src)
    axis = wrapped(src).domain.axes.get(dim)
    if axis is not None and not is_sharded(number):
        number = _divided(number, axis)
    none = torch.zeros_like(x).detach()
    hits = none.index_add(dim, number, torch.ones_like(src).detach())
    combine = {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}.get(
        reduce, torch.add
    )

    def with_own(rows: DomainTensor, x: AnyTensor) -> DomainTensor:
        return combine(x, rows) if include_self else torch.where(hits > 0, rows, x)

    if reduce in ("sum", "mean"):
        total = with_own(torch.zeros_like(x).index_add(dim, number, src), x)
        counts = hits + 1 if include_self else hits.clamp(min=1)
        return total / counts if reduce == "mean" else total
    if reduce == "prod":
        return with_own(_reduced_rows(x, dim, number, src, reduce), x)
    extreme = _reduced_rows(x.detach(), dim, number, src.detach(), reduce)
    extreme = with_own(extreme, x.detach())
    is_own_extreme = (x.detach() == extreme) if include_self else hits == 0
    is_source_extreme = (src.detach() == extreme.index_select(dim, number)).to(src.dtype)
    ties = none.index_add(dim, number, is_source_extreme) + is_own_extreme
    share = is_source_extreme / ties.index_select(dim, number)
    mean = torch.zeros_like(x).index_add(dim, number, src * share) + x * (is_own_extreme / ties)
    return extreme + (mean - mean.detach())


def _row_numbers(x: Any, dim: int, index: AnyTensor, src: Any) -> AnyTensor:
    """Return one number per row, 1-D, of an index that is expanded over the other dimensions; refuse another index."""
    local = unwrapped(index)
    dim %= x.ndim
    others = [d for d in range(local.ndim) if d != dim]
    # decided by the domain, so that every rank decides alike
    is_whole = not is_sharded(index) or [*index.domain.axes] == [dim]
    same = is_whole and all(local.stride(d) == 0 or local.shape[d] == 1 for d in others)
    refuse_unless(
        same and src.shape == index.shape,
        "numbers that differ along other dimensions; expand them",
    )
    for d in reversed(others):
        index = index.select(d, 0)
    return index


def _reduced_rows(
    x: AnyTensor, dim: int, number: AnyTensor, src: Any, reduce: str
) -> DomainTensor:
    """Reduce the source rows that are scattered to each target row (prod, amax or amin).

    A target row without sources gets the identity of the reduction. number: the target row of each source row, 1-D.
    """
    target_rows = wrapped(x)
    row_axis = target_rows.domain.axes.get(dim)
    source, local_index, index_axis = _own_sources(target_rows, dim, number, src)
    identity = {"prod": 1.0, "amax": float("-inf"), "amin": float("inf")}[reduce]

    def reduced(like: Tensor, rows: int, places: Tensor, values: Tensor) -> Tensor:
        places = places.view(-1, *[1] * (like.ndim - dim - 1)).expand_as(values)
        start = with_rows(like, rows, dim).fill_(identity)
        return start.scatter_reduce(dim, places, values, reduce)

    local = target_rows.local
    if row_axis is None:
        result = reduced(local, local.shape[dim], local_index, source)
        if index_axis is not None and reduce == "prod":
            result = gathered(result, index_axis).prod(0)
        elif index_axis is not None:
            result = all_reduce(result, index_axis.group, reduce.removeprefix("a"))
    elif local.is_meta:
        result = local
    else:
        asked = _asked(row_axis, local_index)
        both = asked.arriving, asked.sent
        give, back = (
            lambda rows, sizes=sizes: send_rows(rows, *sizes, row_axis.group, kind=_KIND)
            for sizes in (both, both[::-1])
        )
        rows = reduced(local, sum(asked.arriving), asked.back, source).movedim(dim, 0)
        result = reduced(
            local, row_axis.rows, asked.places, with_adjoint(rows, give, back).movedim(0, dim)
        )
    return DomainTensor(result, target_rows.domain)


@rule("gather", "take_along_dim")
def _take_along(function, x, index, dim) -> DomainTensor:
    """Take elements. The result is sharded as `index`; along the dimension x is gathered."""
    if isinstance(index, int):  # torch.gather names the dimension first
        index, dim = dim, index
    x, index = (wrapped(t) for t in (x, index))
    dim %= x.ndim
    x = gather(x, [dim])
    shape = tuple(index.shape[d] if d == dim else n for d, n in enumerate(x.shape))
    refuse_unless(
        shape == index.shape,
        "numbers of some rows only",
    )
    domain = common_domain([index, x], shape, except_dim=dim)
    rows = own_part(x, domain.without(dim), x.shape)
    return DomainTensor(torch.gather(rows, dim, own_part(index, domain, shape)), domain)


@rule("embedding", "one_hot", first_only=True)
def _looked_up(function, x, *args, **kwargs) -> DomainTensor:
    """Look up sharded numbers. The table of an embedding is whole."""
    known = function.__name__ == "embedding" or (args or [kwargs.get("num_classes", -1)])[0] > 0
    refuse_unless(known, "a number of classes that depends on data")
    return DomainTensor(function(x.local, *args, **kwargs), x.domain)


def by_tensors(x: DomainTensor, index: tuple, places: Sequence[int]) -> DomainTensor:
    """Return x[index], with tensors of numbers among slices, numbers and None.

    Args:
        x: The tensor, any shape.
        index: The index.
        places: The positions of the tensors in the index.

    Raises:
        DomainOperatorError: A mask of truths, or a tensor of floats, is not the only index.
    """
    tensors = [index[place] for place in places]
    if len(tensors) == len(index) == 1 and tensors[0].dtype == torch.bool:
        return by_mask(x, tensors[0])
    if any(numbers.dtype == torch.bool or numbers.is_floating_point() for numbers in tensors):
        raise refused(
            "indexing",
            x,
            "a boolean mask must be the only index; index by it first, or use torch.where",
        )
    y = x[tuple(slice(None) if place in places else i for place, i in enumerate(index))]
    kept = [place for place, i in enumerate(index) if not isinstance(i, int)]
    ellipsis = next((place for place in kept if index[place] is Ellipsis), len(index))
    dims = [
        (n if place < ellipsis else n - len(kept)) % y.ndim
        for n, place in enumerate(kept)
        if place in places
    ]
    if dims[-1] - dims[0] >= len(
        dims
    ):  # the tensors are apart, and torch moves their dimensions to the front
        y = y.movedim(dims, [*range(len(dims))])
        dims = [0]
    dim = dims[0]
    places_of = x.local.new_zeros((), dtype=torch.int64)
    for size, numbers in zip(
        y.shape[dim:], tensors, strict=False
    ):  # numbers in the flattened dimensions
        places_of = places_of * size + torch.where(numbers < 0, numbers + size, numbers)
    flat = y.flatten(dim, dim + len(tensors) - 1)
    rows = torch.index_select(flat, dim, places_of.reshape(-1))
    return rows.reshape(*flat.shape[:dim], *places_of.shape, *flat.shape[dim + 1 :])


def _own_sources(
    x: DomainTensor, dim: int, index: AnyTensor, source: AnyTensor
) -> tuple[Tensor, Tensor, Axis | None]:
    """Return this rank's source rows, their target rows, 1-D, and the axis over which the ranks divide both.

    The axis is None if both are whole. index: the target row of each source row, 1-D.
    """
    source_axis = wrapped(source).domain.axes.get(dim)
    other_dims = x.domain.without(dim)
    taken = other_dims.axes.values()  # ranks that share another dimension
    if is_sharded(index) and shares_ranks(index.domain.axes[0], taken):
        index = gather(index)
    if not (is_sharded(index) or source_axis is None or shares_ranks(source_axis, taken)):
        index = _divided(index, source_axis)
    if isinstance(source, DomainTensor):
        source = gather(
            source, [d for d in source.domain.axes if d != dim and d not in x.domain.axes]
        )
    own, target = _local_numbers(index, x.domain.axes.get(dim))
    domain = other_dims if target is None else Domain(other_dims.axes | {dim: target})
    return own_part(source, domain, source.shape), own, target


def _local_numbers(index: AnyTensor, row_axis: Axis | None) -> tuple[Tensor, Axis | None]:
    """Return this rank's part of `index`, 1-D, and the axis over which ranks divide `index`; None if it is whole.

    If `index` is whole and there is a `row_axis`, its ranks divide `index` evenly.
    """
    if is_sharded(index):
        return index.local, index.domain.axes[0]
    index = unwrapped(index)
    if row_axis is None:
        return index, None
    axis = Axis(balanced(len(index), row_axis.degree), row_axis.group)
    return _divided(index, axis).local, axis


def _divided(index: AnyTensor, axis: Axis) -> DomainTensor:
    """Return `index`, 1-D, divided over an axis: each rank keeps its own part."""
    domain = Domain({0: axis})
    return DomainTensor(own_part(index, domain, index.shape), domain)


# ---- Rows from their owners, and back


@dataclass(frozen=True)
class _Asked:
    """Requests of ranks to each other.

    Attributes:
        places: The rows of this rank's shard that the ranks requested, for one rank after another, 1-D.
        sent: The number of rows for each rank.
        arriving: The number of rows from each rank.
        back: For each number that this rank requested, its place among the arriving rows, 1-D.
    """

    places: Tensor
    sent: list[int]
    arriving: list[int]
    back: Tensor


def rows_by_number(axis: Axis, numbers: Tensor, dim: int) -> tuple[Callable, Callable]:
    """Return a function that takes rows from their owners by number, and its adjoint.

    This call and the calls of both functions are collectives.

    Args:
        axis: The axis of the rows.
        numbers: The wanted rows, 1-D, int64.
        dim: The dimension of the rows.
    """
    asked = _asked(axis, numbers)

    def take(x: Tensor) -> Tensor:
        rows = x.movedim(dim, 0).index_select(0, asked.places)
        arrived = send_rows(rows, asked.sent, asked.arriving, axis.group, kind=_KIND)
        return arrived.index_select(0, asked.back).movedim(0, dim)

    def give(gradient: Tensor) -> Tensor:
        exact = gradient.movedim(dim, 0).to(
            wide_type(gradient.dtype) if gradient.is_floating_point() else gradient.dtype
        )
        sums = exact.new_zeros(sum(asked.arriving), *exact.shape[1:]).index_add(
            0, asked.back, exact
        )
        arrived = send_rows(sums, asked.arriving, asked.sent, axis.group, kind=_KIND)
        result = arrived.new_zeros(axis.rows, *arrived.shape[1:]).index_add(
            0, asked.places, arrived
        )
        return result.movedim(0, dim).to(gradient.dtype)

    return take, give


def _asked(axis: Axis, numbers: Tensor) -> _Asked:
    positions, back = places_on(axis.layout, numbers.device)[numbers].unique(
        return_inverse=True
    )
    lengths = torch.tensor(axis.layout.lengths, device=numbers.device)
    ends = lengths.cumsum(0)
    owners = torch.searchsorted(ends, positions, right=True)
    arriving, sent = exchange_counts(
        owners.bincount(minlength=axis.degree), axis.group, kind=_KIND
    )
    places = positions - (ends - lengths)[owners]
    places = send_rows(places, arriving, sent, axis.group, kind=_KIND)
    return _Asked(places, sent, arriving, back)

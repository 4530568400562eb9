"""Rules of functions that take and add rows by their numbers in the whole tensor, as graphs and meshes do.

    x[numbers], index_select      each rank asks the owners for the rows that it lacks, each row once
    index_add, scatter_add        the adjoint: what several ranks have for a row is added up at its owner
    scatter_reduce                sums and means by it; products and extremes of each rank's are found at the owners

Numbers that are sharded, such as those of a rank's edges, give rows where they are. Which rows a rank asks for depends
on data: their numbers are sent first, and on a GPU the host waits for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
from longshard.sharding.tensors import wide_type, with_adjoint

_KIND = "rows by number"
"""Under which what is sent is counted."""


@rule("index_select")
def index_select(function, x, dim, index) -> DomainTensor:
    """index: 1-D. Sharded, the result has its rows; whole, the rows of a sharded dimension are dealt evenly."""
    x = wrapped(x)
    dim %= x.ndim
    of_rows = x.domain.axes.get(dim)
    own, target = _own_numbers(index, of_rows)
    domain = x.domain.without(dim)
    if target is not None:
        taken = [d for d, axis in domain.axes.items() if axis.group is target.group]
        x = gather(x, taken)
        domain = Domain(domain.without(*taken).axes | {dim: target})
    if of_rows is None:
        return DomainTensor(x.local.index_select(dim, own), domain)
    if x.local.is_meta:
        return DomainTensor(
            x.local.new_empty(
                domain.local_shape([*x.shape[:dim], len(index), *x.shape[dim + 1 :]])
            ),
            domain,
        )
    take, give = rows_by_number(of_rows, own, dim)
    return DomainTensor(with_adjoint(x.local, take, give), domain)


@rule("index_add", "index_add_")
def index_add(function, x, dim, index, source, *, alpha=1) -> Any:
    """index: 1-D. x is whole: the ranks' sums are added up; x is sharded: each row's owner gets what is added to it."""
    dim %= x.ndim
    mine = wrapped(x)
    of_rows = mine.domain.axes.get(dim)
    source, own, target = _own_sources(mine, dim, index, source)
    source = source * alpha
    if of_rows is None:
        sums = torch.zeros_like(mine.local, dtype=wide_type(source.dtype)).index_add(
            dim, own, source.to(wide_type(source.dtype))
        )
        if target is not None:
            sums = added_up(sums, target.group)
    elif source.is_meta:
        sums = torch.zeros_like(mine.local)
    else:
        take, give = rows_by_number(of_rows, own, dim)
        sums = with_adjoint(source, give, take)
    result = DomainTensor(sums.to(mine.dtype), mine.domain)
    return torch.add(x, result) if function.__name__ == "index_add" else x.add_(result)


@rule("scatter_add", "scatter_add_")
def scatter_add(function, x, dim, index, src) -> Any:
    """index: one number for each row, expanded over the other dimensions, as graph layers have it."""
    number = _number_of_rows(function, x, dim, index, src)
    return getattr(x, function.__name__.replace("scatter", "index"))(dim, number, src)


@rule("scatter_reduce")
def scatter_reduce(function, x, dim, index, src, reduce, *, include_self=True) -> DomainTensor:
    """index: as of `scatter_add`; reduce: sum, mean, prod, amax or amin. Equal extremes share a gradient."""
    dim %= x.ndim
    number = _number_of_rows(function, x, dim, index, src)
    axis = wrapped(src).domain.axes.get(dim)
    if axis is not None and not is_sharded(number):
        number = _dealt(number, axis)
    none = torch.zeros_like(x).detach()
    hits = none.index_add(dim, number, torch.ones_like(src).detach())
    if reduce in ("sum", "mean"):
        total = torch.zeros_like(x).index_add(dim, number, src)
        own, counts = (
            (x + total, hits + 1)
            if include_self
            else (torch.where(hits > 0, total, x), hits.clamp(min=1))
        )
        return own / counts if reduce == "mean" else own
    if reduce == "prod":
        product = _reduced_rows(x, dim, number, src, reduce)
        return x * product if include_self else torch.where(hits > 0, product, x)
    extreme = _reduced_rows(x.detach(), dim, number, src.detach(), reduce)
    better = torch.maximum if reduce == "amax" else torch.minimum
    extreme = (
        better(extreme, x.detach())
        if include_self
        else torch.where(hits > 0, extreme, x.detach())
    )
    of_self = (x.detach() == extreme) if include_self else hits == 0
    of_src = (src.detach() == extreme.index_select(dim, number)).to(src.dtype)
    ties = none.index_add(dim, number, of_src) + of_self
    share = of_src / ties.index_select(dim, number)
    mean = torch.zeros_like(x).index_add(dim, number, src * share) + x * (of_self / ties)
    return extreme + (mean - mean.detach())


def _number_of_rows(function, x: Any, dim: int, index: AnyTensor, src: Any) -> AnyTensor:
    """Return the number of each row, 1-D, of which `index` has one for each element."""
    local = unwrapped(index)
    dim %= x.ndim
    others = [d for d in range(local.ndim) if d != dim]
    # so that every rank finds the same
    is_whole = not is_sharded(index) or [*index.domain.axes] == [dim]
    same = is_whole and all(local.stride(d) == 0 or local.shape[d] == 1 for d in others)
    shown = next(t for t in (x, index, src) if is_sharded(t))
    refuse_unless(
        same and src.shape == index.shape,
        function,
        shown,
        "numbers that differ beside the dimension; expand them",
    )
    for d in reversed(others):
        index = index.select(d, 0)
    return index


def _reduced_rows(
    x: AnyTensor, dim: int, number: AnyTensor, src: Any, reduce: str
) -> DomainTensor:
    """Return the products or extremes of what is scattered to each row of x, and where nothing is, of nothing."""
    mine = wrapped(x)
    of_rows = mine.domain.axes.get(dim)
    source, own, target = _own_sources(mine, dim, number, src)
    of_nothing = {"prod": 1.0, "amax": float("-inf"), "amin": float("inf")}[reduce]

    def found(
        like: torch.Tensor, rows: int, places: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        shape = [*like.shape[:dim], rows, *like.shape[dim + 1 :]]
        places = places.view(-1, *[1] * (like.ndim - dim - 1)).expand_as(given)
        return like.new_full(shape, of_nothing).scatter_reduce(dim, places, given, reduce)

    local = mine.local
    if of_rows is None:
        result = found(local, local.shape[dim], own, source)
        if target is not None and reduce == "prod":
            result = gathered(result, target).prod(0)
        elif target is not None:
            result = all_reduce(result, target.group, reduce.removeprefix("a"))
    elif local.is_meta:
        result = local
    else:
        asked = _asked(of_rows, own)
        both = asked.arriving, asked.sent
        give, back = (
            lambda rows, sizes=sizes: send_rows(rows, *sizes, of_rows.group, kind=_KIND)
            for sizes in (both, both[::-1])
        )
        rows = found(local, sum(asked.arriving), asked.back, source).movedim(dim, 0)
        result = found(
            local, of_rows.rows, asked.places, with_adjoint(rows, give, back).movedim(0, dim)
        )
    return DomainTensor(result, mine.domain)


@rule("gather", "take_along_dim")
def take_along(function, x, index, dim) -> DomainTensor:
    """The result is sharded as `index`; along the dimension x is gathered."""
    if isinstance(index, int):  # torch.gather names the dimension first
        index, dim = dim, index
    x, index = (wrapped(t) for t in (x, index))
    dim %= x.ndim
    x = gather(x, [dim])
    shape = torch.Size(index.shape[d] if d == dim else n for d, n in enumerate(x.shape))
    refuse_unless(
        shape == index.shape,
        function,
        x if is_sharded(x) else index,
        "numbers of some rows only",
    )
    domain = common_domain([index, x], shape, but_for=dim)
    rows = own_part(x, domain.without(dim), torch.Size(x.shape))
    return DomainTensor(torch.gather(rows, dim, own_part(index, domain, shape)), domain)


@rule("embedding", "one_hot", first_only=True)
def of_numbers(function, x, *args: Any, **kwargs: Any) -> DomainTensor:
    """x: sharded numbers; the table of an embedding is whole."""
    known = function.__name__ == "embedding" or (args or [kwargs.get("num_classes", -1)])[0] > 0
    refuse_unless(known, function, x, "a number of classes that depends on data")
    return DomainTensor(function(x.local, *args, **kwargs), x.domain)


def by_tensors(x: DomainTensor, index: tuple, places: Sequence[int]) -> DomainTensor:
    """Return x[index], in which tensors of numbers stand at `places` among slices, numbers and None."""
    given = [index[place] for place in places]
    if len(given) == len(index) == 1 and given[0].dtype == torch.bool:
        return by_mask(x, given[0])
    if any(numbers.dtype == torch.bool or numbers.is_floating_point() for numbers in given):
        raise refused(
            "indexing",
            x,
            "a mask of truths stands alone; index by it first, or use torch.where",
        )
    y = x[tuple(slice(None) if place in places else i for place, i in enumerate(index))]
    kept = [place for place, i in enumerate(index) if not isinstance(i, int)]
    ellipsis = next((place for place in kept if index[place] is Ellipsis), len(index))
    dims = [
        n if place < ellipsis else n - len(kept)
        for n, place in enumerate(kept)
        if place in places
    ]
    dims = [dim % y.ndim for dim in dims]
    if dims[-1] - dims[0] >= len(dims):  # they are apart, and torch puts them first
        y = y.movedim(dims, [*range(len(dims))])
        dims = [0]
    dim = dims[0]
    places_of = torch.zeros((), dtype=torch.int64, device=x.device)
    for size, numbers in zip(y.shape[dim:], given, strict=False):  # of the flattened dimensions
        places_of = places_of * size + torch.where(numbers < 0, numbers + size, numbers)
    flat = y.flatten(dim, dim + len(given) - 1)
    rows = torch.index_select(flat, dim, places_of.reshape(-1))
    return rows.reshape(*flat.shape[:dim], *places_of.shape, *flat.shape[dim + 1 :])


def _own_sources(
    x: DomainTensor, dim: int, index: AnyTensor, source: AnyTensor
) -> tuple[torch.Tensor, torch.Tensor, Axis | None]:
    """Return what this rank gives to rows of x, their numbers, and over which ranks both are dealt."""
    of_source = wrapped(source).domain.axes.get(dim)
    rest = x.domain.without(dim)
    taken = rest.axes.values()  # ranks that share another dimension
    if is_sharded(index) and shares_ranks(index.domain.axes[0], taken):
        index = gather(index)
    if not (is_sharded(index) or of_source is None or shares_ranks(of_source, taken)):
        index = _dealt(index, of_source)
    if isinstance(source, DomainTensor):
        source = gather(
            source, [d for d in source.domain.axes if d != dim and d not in x.domain.axes]
        )
    own, target = _own_numbers(index, x.domain.axes.get(dim))
    domain = rest if target is None else Domain(rest.axes | {dim: target})
    return own_part(source, domain, source.shape), own, target


def _own_numbers(index: AnyTensor, of_rows: Axis | None) -> tuple[torch.Tensor, Axis | None]:
    """Return this rank's numbers, and over which ranks they are dealt."""
    if is_sharded(index):
        return index.local, index.domain.axes[0]
    index = unwrapped(index)
    if of_rows is None:
        return index, None
    axis = Axis(balanced(len(index), of_rows.degree), of_rows.group)
    return _dealt(index, axis).local, axis


def _dealt(index: AnyTensor, axis: Axis) -> DomainTensor:
    """Return whole numbers, 1-D, of which each rank keeps its own."""
    domain = Domain({0: axis})
    return DomainTensor(own_part(index, domain, index.shape), domain)


# ---- rows from their owners, and back


@dataclass(frozen=True)
class _Asked:
    """What ranks ask of each other. places: in this rank's shard, for one rank after another; sent: how many for each.

    arriving: how many rows of each rank; back: which of those each of the numbers asked for is.
    """

    places: torch.Tensor
    sent: list[int]
    arriving: list[int]
    back: torch.Tensor


def rows_by_number(axis: Axis, numbers: torch.Tensor, dim: int) -> tuple[Callable, Callable]:
    """Return a function that takes rows of a shard's owners by number, and its adjoint; a collective."""
    asked = _asked(axis, numbers)

    def take(x: torch.Tensor) -> torch.Tensor:
        rows = x.movedim(dim, 0).index_select(0, asked.places)
        arrived = send_rows(rows, asked.sent, asked.arriving, axis.group, kind=_KIND)
        return arrived.index_select(0, asked.back).movedim(0, dim)

    def give(gradient: torch.Tensor) -> torch.Tensor:
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


def _asked(axis: Axis, numbers: torch.Tensor) -> _Asked:
    positions, back = places_on(axis.layout, numbers.device)[numbers].unique(
        return_inverse=True
    )
    ends = torch.tensor(axis.layout.lengths, device=numbers.device).cumsum(0)
    owners = torch.searchsorted(ends, positions, right=True)
    arriving, sent = exchange_counts(
        owners.bincount(minlength=axis.degree), axis.group, kind=_KIND
    )
    firsts = torch.cat([ends.new_zeros(1), ends[:-1]])
    places = send_rows(positions - firsts[owners], arriving, sent, axis.group, kind=_KIND)
    return _Asked(places, sent, arriving, back)

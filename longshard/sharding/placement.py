"""Shard a whole tensor and unshard it again, with typed gradients.

If every rank has a tensor whole, its gradient has one of two placements, which the caller names:

    partial      The ranks' gradients add up to the whole gradient. Use it if gradients are summed over the ranks anyway
                 (FSDP over `dp_shard_cp`, as in the trainer) and each rank's loss is its part of the sum.
    replicated   Every rank has the whole gradient. Use it if nothing is summed afterwards.

                shard(x)                      unshard(y)                     replicate(w)
    forward     own rows                      all rows, on every rank        w
    partial     own rows' gradient,           own rows of the sum of all     (not needed)
                zeros elsewhere               ranks' gradients
    replicated  own rows' gradients of all    own rows of the gradient       sum of all ranks' gradients
                ranks, put together
"""

from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshard.sharding.exchange import all_reduce
from longshard.sharding.layout import AxisLayout
from longshard.sharding.rows import Axis, exchange
from longshard.sharding.tensors import TensorFunction, to_device, wide_type, with_adjoint

PLACEMENTS = ("partial", "replicated")


def shard(
    x: Tensor,
    layout: AxisLayout,
    dim: int,
    *,
    group: ProcessGroup,
    grad: str = "partial",
) -> Tensor:
    """Return this rank's rows of a tensor that every rank has whole.

    Args:
        x: The whole tensor, any shape with `layout.length` rows in `dim`.
        layout: Which rank owns which rows.
        dim: The dimension to shard.
        group: The group of the ranks.
        grad: The placement of the gradient of x: `partial`, or `replicated` (a collective in the backward).

    Raises:
        ValueError: The placement is unknown, or x has another number of rows.
    """
    _check(x, dim, layout.length, grad)
    own_rows, all_rows = _rows(layout, dim, group)
    return own_rows(x) if grad == "partial" else with_adjoint(x, own_rows, all_rows)


def unshard(
    x: Tensor,
    layout: AxisLayout,
    dim: int,
    *,
    group: ProcessGroup,
    grad: str = "partial",
) -> Tensor:
    """Return all rows in their global order; a collective.

    Args:
        x: The shard of this rank, any shape with `layout.local_length(rank)` rows in `dim`.
        layout: Which rank owns which rows.
        dim: The sharded dimension.
        group: The group of the ranks.
        grad: The placement of the result's gradient. `partial`: the backward sums it over the ranks, a collective.
            `replicated`: the backward takes this rank's rows.

    Raises:
        ValueError: The placement is unknown, or x has another number of rows.
    """
    _check(x, dim, layout.local_length(group.rank()), grad)
    own_rows, all_rows = _rows(layout, dim, group)
    return all_rows(x) if grad == "partial" else with_adjoint(x, all_rows, own_rows)


def replicate(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return x; its gradient is the sum of all ranks' gradients, on every rank. The backward is a collective.

    Args:
        x: A tensor of any shape, which every rank has whole.
        group: The group of the ranks.
    """
    return with_adjoint(x, lambda x: x.view_as(x), lambda gradient: summed(gradient, group))


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks. Not differentiable. Floats are summed in float32 at least.

    Args:
        x: A tensor of one shape on all ranks, any shape.
        group: The group of the ranks.
    """
    dtype = wide_type(x.dtype) if x.is_floating_point() else x.dtype
    return all_reduce(x.to(dtype, copy=True, memory_format=torch.contiguous_format), group).to(
        x.dtype
    )


def added_up(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks, as `summed`. Its gradient is the sum of the ranks' gradients.

    Args:
        x: A tensor of one shape on all ranks, any shape.
        group: The group of the ranks.
    """
    add = partial(summed, group=group)
    return with_adjoint(x, add, add)


def _check(x: Tensor, dim: int, rows: int, grad: str) -> None:
    if x.shape[dim] != rows:
        raise ValueError(
            f"a tensor with {x.shape[dim]} rows in dimension {dim} does not fit a layout with {rows}; give the "
            "dimension that is sharded, or the layout of the tensor"
        )
    if grad not in PLACEMENTS:
        raise ValueError(f"grad = {grad!r} is none of {', '.join(map(repr, PLACEMENTS))}")


@lru_cache(maxsize=64)
def rows_on(layout: AxisLayout, rank: int, device: torch.device) -> Tensor:
    """Return the global positions of a rank's rows, (local length,) int64, on a device; cached, so do not write to it.

    Args:
        layout: Which rank owns which rows.
        rank: The rank.
        device: The device of the result.
    """
    return to_device(torch.from_numpy(layout.indices(rank)), device)


@lru_cache(maxsize=64)
def places_on(layout: AxisLayout, device: torch.device) -> Tensor:
    """Return the place of each row in the shards laid one after another: (length,) int64; cached, do not write to it.

    Args:
        layout: Which rank owns which rows.
        device: The device of the result.
    """
    return to_device(torch.from_numpy(layout.order().argsort()), device)


def _rows(
    layout: AxisLayout, dim: int, group: ProcessGroup
) -> tuple[TensorFunction, TensorFunction]:
    """Return two functions: take this rank's rows of a whole tensor, and gather all rows from shards (a collective)."""

    def own_rows(x: Tensor) -> Tensor:
        return x.index_select(dim, rows_on(layout, group.rank(), x.device))

    def all_rows(x: Tensor) -> Tensor:
        wanted = (((0, layout.length),),) * layout.degree
        return exchange(x, Axis(layout, group), wanted, dim)

    return own_rows, all_rows

"""How a tensor gets into a domain, from one domain to another, and out: read, reshard, gather.

Axes are treated one after another, each by one exchange of the rows that change their owner.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.distributed.domain_parallel.dispatch import DomainTensor
from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.placement import unshard
from trainer.distributed.sharding.rows import fetch


def reshard(x: DomainTensor, layouts: Mapping[int, AxisLayout]) -> DomainTensor:
    """Return x with other layouts of some of its sharded dimensions, over the same ranks; only moved rows are sent.

    Raises:
        ValueError: a layout of another length or number of ranks.
    """
    local = x.local
    for dim, layout in layouts.items():
        axis = x.domain.axes.get(dim)
        rows, degree = x.shape[dim], 1 if axis is None else axis.degree
        if (rows, degree) != (layout.length, layout.degree):
            raise ValueError(
                f"dimension {dim} has {rows} rows on {degree} rank(s); a layout of {layout.length} rows on "
                f"{layout.degree} rank(s) does not fit it"
            )
        local = fetch(local, axis, layout.ranges, dim)
    return DomainTensor(local, x.domain.layouts(layouts))


def gather(x: DomainTensor, dims: Sequence[int] | None = None) -> DomainTensor:
    """Return x with dimensions (None: all) whole on every rank; the ranks' gradients of it are summed."""
    dims, local = tuple(x.domain.axes) if dims is None else dims, x.local
    for dim, axis in x.domain.axes.items():
        if dim in dims:
            local = unshard(local, axis.layout, dim, group=axis.group)
    return DomainTensor(local, x.domain.reduced(dims, keepdim=True))


def read(source: Any, domain: Domain, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return this rank's shard of an array on disk, such as of zarr, HDF5 or numpy.memmap; only its part is read.

    source: has a `shape` and takes a tuple of slices. An axis of which the rank has several ranges is read range by
    range.
    """
    shape = tuple(source.shape)

    def part(dim: int, chosen: tuple[slice, ...]) -> torch.Tensor:
        if dim == len(shape):
            return torch.as_tensor(source[chosen], dtype=dtype)
        ranges = domain.ranges(dim, shape[dim]) or ((0, 0),)
        parts = [part(dim + 1, (*chosen, slice(start, stop))) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return part(0, ())

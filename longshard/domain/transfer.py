"""Move a tensor into a domain, from one domain to another, and out: scatter, read, reshard, move, gather, DTensors.

Axes are treated one after another, each by one exchange of the rows that change their owner.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from longshard.domain.dispatch import DomainTensor
from longshard.domain.domain import Axis, Domain
from longshard.sharding.exchange import send_rows
from longshard.sharding.layout import AxisLayout, sized
from longshard.sharding.placement import places_on, rows_on, unshard
from longshard.sharding.rows import fetch, layout_of
from longshard.sharding.tensors import joined, with_adjoint


def reshard(x: DomainTensor, layouts: Mapping[int, AxisLayout]) -> DomainTensor:
    """Return x with other layouts of some of its sharded dimensions, over the same ranks; only moved rows are sent.

    Args:
        x: The tensor, any shape.
        layouts: Dimension to its new layout.

    Raises:
        ValueError: A layout has another length or number of ranks.
    """
    local = x.local
    for dim, layout in layouts.items():
        axis = x.domain.axes.get(dim)
        own, _ = layout_of(axis, x.shape[dim])
        if (own.length, own.degree) != (layout.length, layout.degree):
            raise ValueError(
                f"dimension {dim} has {own.length} rows on {own.degree} rank(s); a layout of {layout.length} "
                f"rows on {layout.degree} rank(s) does not fit it"
            )
        local = fetch(local, axis, layout.ranges, dim)
    return DomainTensor(local, x.domain.layouts(layouts))


def move(x: DomainTensor, source_dim: int, target_dim: int, layout: AxisLayout) -> DomainTensor:
    """Return x sharded in another dimension over the same ranks, such as columns instead of rows; one all-to-all.

    Each element is sent from the rank that has it to the one rank that gets it, and its gradient back.

    Args:
        x: The tensor, any shape.
        source_dim: The sharded dimension, which is whole in the result.
        target_dim: The whole dimension, which is sharded in the result.
        layout: The layout of the target dimension.

    Raises:
        ValueError: The target is sharded, or the layout has another length or number of ranks.
    """
    axes = dict(x.domain.axes)
    axis = axes.pop(source_dim, None)
    is_whole = target_dim not in x.domain.axes and 0 <= target_dim < x.ndim
    if not is_whole or (layout.length, layout.degree) != (
        x.shape[target_dim],
        1 if axis is None else axis.degree,
    ):
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)}, sharded in dimensions {[*x.domain.axes]}, cannot "
            f"move from dimension {source_dim} to dimension {target_dim} with a layout of "
            f"{layout.length} rows on {layout.degree} ranks. The source must be sharded, the target "
            "whole, and the layout must have the target's length and the source's ranks"
        )
    if axis is None:
        return x
    source = (axis, source_dim)
    target = (Axis(layout, axis.group), target_dim)
    local = with_adjoint(
        x.local, lambda x: _moved(x, *source, *target), lambda x: _moved(x, *target, *source)
    )
    return DomainTensor(local, Domain(axes | {target_dim: target[0]}))


def _moved(x: Tensor, source: Axis, source_dim: int, target: Axis, target_dim: int) -> Tensor:
    """Send each rank its rows of the target dimension; put arriving rows in order in the source dimension."""
    shape = list(x.shape)
    parts = []
    shapes = []
    shape[target_dim] = target.rows
    for rank, rows in enumerate(source.layout.lengths):
        parts.append(x.index_select(target_dim, rows_on(target.layout, rank, x.device)))
        shape[source_dim] = rows
        shapes.append([*shape])
    sent = [part.numel() for part in parts]
    counts = [math.prod(arriving) for arriving in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    arrived = send_rows(flat, sent, counts, source.group, kind="move")
    pieces = [piece.view(s) for piece, s in zip(arrived.split(counts), shapes, strict=True)]
    return torch.cat(pieces, source_dim).index_select(
        source_dim, places_on(source.layout, x.device)
    )


def gather(x: DomainTensor, dims: Sequence[int] | None = None) -> DomainTensor:
    """Return x with some dimensions whole on every rank, a collective; the ranks' gradients are summed.

    Args:
        x: The tensor, any shape.
        dims: The dimensions, not negative; whole ones are ignored. None means all.
    """
    dims = tuple(x.domain.axes) if dims is None else dims
    local = x.local
    for dim, axis in x.domain.axes.items():
        if dim in dims:
            local = unshard(local, axis.layout, dim, group=axis.group)
    return DomainTensor(local, x.domain.without(*dims))


def to_dtensor(x: DomainTensor, mesh: DeviceMesh) -> DTensor:
    """Return x as a DTensor on the mesh of its domain, in the shards of torch.chunk; rows move to them. Differentiable.

    So sharded fields are saved: torch.distributed.checkpoint takes DTensors, and reads them in any other division.

    Args:
        x: The tensor, any shape.
        mesh: The mesh of its domain.

    Raises:
        ValueError: x is sharded over ranks that are not a dimension of the mesh.
    """
    groups = mesh.get_all_groups()
    dims = [
        next((d for d, axis in x.domain.axes.items() if axis.group is group), None)
        for group in groups
    ]
    if len(dims) - dims.count(None) < len(x.domain.axes):
        raise ValueError(
            f"the mesh {mesh} has not all ranks of dimensions {[*x.domain.axes]}; give the domain's mesh"
        )
    shards = {d: _chunks(x.shape[d], axis.degree) for d, axis in x.domain.axes.items()}
    copies = math.prod(
        group.size() for group, dim in zip(groups, dims, strict=True) if dim is None
    )
    # If ranks have the same rows, each has the whole gradient of a DTensor, but a share of a domain tensor's gradient.
    local = with_adjoint(
        reshard(x, shards).local, lambda x: x.view_as(x), lambda gradient: gradient / copies
    )
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    stride = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.shape, stride=stride
    )


def from_dtensor(x: DTensor) -> DomainTensor:
    """Return a DTensor as a domain tensor. Partial placements are summed first, by a collective.

    Args:
        x: The DTensor, any shape; each of its dimensions is sharded over at most one dimension of its mesh.

    Raises:
        ValueError: One dimension is sharded over several dimensions of the mesh.
    """
    mesh = x.device_mesh
    x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    dims = [p.dim % x.ndim if isinstance(p, Shard) else None for p in x.placements]
    # a strided shard is no `Shard`
    if len({*dims} - {None}) < sum(not p.is_replicate() for p in x.placements):
        raise ValueError(
            f"the placements {x.placements} shard one tensor dimension over several mesh dimensions; "
            "redistribute the DTensor to one mesh dimension first"
        )
    axes = {
        dim: Axis(_chunks(x.shape[dim], group.size()), group)
        for dim, group in zip(dims, mesh.get_all_groups(), strict=True)
        if dim is not None
    }
    local = x.to_local(
        grad_placements=[Partial() if p.is_replicate() else p for p in x.placements]
    )
    return DomainTensor(local, Domain(axes))


def _chunks(length: int, degree: int) -> AxisLayout:
    """Return the layout of torch.chunk: all pieces are as long as the first, except the last ones."""
    piece = -(-length // degree)
    return sized([min(max(length - rank * piece, 0), piece) for rank in range(degree)])


def scatter(
    x: Tensor | None,
    domain: Domain,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    source: Mapping[int, int] | None = None,
) -> Tensor:
    """Return this rank's shard of a tensor that only one rank ever has whole; a collective, not differentiable.

    With several axes the source cuts the first axis, and the ranks that get its slabs cut the next one.

    Args:
        x: The tensor on the source, any shape; None elsewhere.
        domain: The domain of the shards.
        shape: The global shape.
        dtype: The type of the elements.
        device: The device of the shards.
        source: For each sharded dimension, the rank in the axis's group of the process that has the tensor. The first
            rank if absent.

    Raises:
        ValueError: x has another shape or dtype, or another rank than the source has a tensor.
    """
    owners = {dim: (source or {}).get(dim, 0) for dim in domain.axes}
    is_source = [axis.rank == owners[dim] for dim, axis in domain.axes.items()]
    if all(is_source) != (x is not None) or (
        x is not None and (tuple(x.shape), x.dtype) != (tuple(shape), dtype)
    ):
        description = (
            "nothing" if x is None else f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
        )
        raise ValueError(
            f"scatter of shape {tuple(shape)} and {dtype} from ranks {owners} got {description} "
            "on this rank; pass the tensor on the source, and None elsewhere"
        )
    rows = list(shape)
    with torch.no_grad():
        for number, (dim, axis) in enumerate(domain.axes.items()):
            if all(is_source[number + 1 :]):  # other ranks follow with the next axis
                if x is None:
                    x = torch.empty(
                        [*rows[:dim], 0, *rows[dim + 1 :]], dtype=dtype, device=device
                    )
                on_owner = sized(
                    [axis.layout.length * (rank == owners[dim]) for rank in range(axis.degree)]
                )
                x = fetch(x, Axis(on_owner, axis.group), axis.layout.ranges, dim)
            rows[dim] = axis.rows
    return x.contiguous()


def read(source: Any, domain: Domain, dtype: torch.dtype | None = None) -> Tensor:
    """Return this rank's shard of an array on disk, such as of zarr, HDF5 or numpy.memmap, on the CPU.

    Only its part is read, and nothing is sent. If the rank has several ranges of an axis, they are read one by one.

    Args:
        source: The array; has a `shape` and takes a tuple of slices.
        domain: The domain of the shards.
        dtype: The type of the elements; None means the type of the array.
    """
    shape = tuple(source.shape)

    def part(dim: int, chosen: tuple[slice, ...]) -> Tensor:
        if dim == len(shape):
            return torch.as_tensor(source[chosen], dtype=dtype)
        ranges = domain.ranges(dim, shape[dim]) or ((0, 0),)
        return joined(
            [part(dim + 1, (*chosen, slice(start, stop))) for start, stop in ranges], dim
        )

    return part(0, ())

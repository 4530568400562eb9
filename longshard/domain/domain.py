"""Domains: which axes of a tensor are sharded, over which ranks, and which rank has which rows.

A `DomainTensor` is a local shard with its domain, and so is the result of each function of it. So shards of any sizes
stay described:

    x: (2, 16, 9, 12) on a 2x2 mesh (h, w)    h: 9 rows as 5 + 4        w: 12 columns as 7 + 5
    Domain.on(mesh, {2: ("h", sized([5, 4])), 3: ("w", sized([7, 5]))})

    rank (0, 0) has (2, 16, 5, 7)    rank (0, 1) has (2, 16, 5, 5)
    rank (1, 0) has (2, 16, 4, 7)    rank (1, 1) has (2, 16, 4, 5)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from longshard.sharding.exchange import all_gather
from longshard.sharding.layout import AxisLayout, sized
from longshard.sharding.layout import contiguous as balanced
from longshard.sharding.ranges import Ranges, union
from longshard.sharding.rows import Axis

__all__ = ["Axis", "Domain", "balanced", "gathered", "sized"]


def gathered(rows: int, group: ProcessGroup, device: torch.device | str = "cpu") -> AxisLayout:
    """Return the layout in which each rank owns the next `rows` rows; a collective.

    Args:
        rows: Number of rows of this rank.
        group: The group of the ranks.
        device: The device for the collective.
    """
    return sized(all_gather(torch.tensor([rows], device=device), group).view(-1).tolist())


@dataclass(frozen=True)
class Domain:
    """The sharded axes of a tensor; the tensor's other dimensions are whole.

    Attributes:
        axes: Dimension, counted from 0, to its axis.

    Raises:
        ValueError: A dimension is negative, or two dimensions are sharded over the same ranks.
    """

    axes: Mapping[int, Axis]

    def __post_init__(self) -> None:
        if any(dim < 0 for dim in self.axes):
            raise ValueError(
                f"the dimensions {[*self.axes]} of a domain must not be negative; write 3 for -1 of (N, C, H, W)"
            )
        if len(self.axes) > 1 and not torch.compiler.is_compiling():
            groups = [id(axis.group) for axis in self.axes.values() if axis.degree > 1]
            if len({*groups}) < len(groups):
                raise ValueError(
                    f"the dimensions {[*self.axes]} of a domain share their ranks; give each dimension ranks of its own"
                )
        object.__setattr__(self, "axes", {dim: self.axes[dim] for dim in sorted(self.axes)})

    @classmethod
    def on(cls, mesh: DeviceMesh, axes: Mapping[int, tuple[str, AxisLayout]]) -> "Domain":
        """Return a domain on a mesh.

        Args:
            mesh: The mesh.
            axes: Dimension of the tensor to (dimension of the mesh, layout).
        """
        return cls(
            {dim: Axis(layout, mesh[name].get_group()) for dim, (name, layout) in axes.items()}
        )

    def layouts(self, layouts: Mapping[int, AxisLayout]) -> "Domain":
        """Return the domain with other layouts of some of its dimensions.

        Args:
            layouts: Dimension to its new layout.
        """
        return Domain(
            {d: Axis(layouts.get(d, axis.layout), axis.group) for d, axis in self.axes.items()}
        )

    def ranges(self, dim: int, length: int) -> Ranges:
        """Return the rows of a dimension that this rank has.

        Args:
            dim: The dimension.
            length: The global length of the dimension.
        """
        axis = self.axes.get(dim)
        return union([(0, length)]) if axis is None else axis.layout.ranges[axis.rank]

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return the global shape of a tensor.

        Args:
            x: This rank's shard, any shape.

        Raises:
            ValueError: x has other sizes than the domain says.
        """
        for dim, axis in self.axes.items():
            if dim >= x.ndim or x.shape[dim] != axis.rows:
                raise ValueError(
                    f"a tensor of shape {tuple(x.shape)} does not fit its domain, which has {axis.rows} rows for this "
                    f"rank in dimension {dim}; pass the domain that belongs to it"
                )
        return tuple(
            self.axes[dim].layout.length if dim in self.axes else n
            for dim, n in enumerate(x.shape)
        )

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this rank's shard.

        Args:
            shape: The global shape.
        """
        return tuple(
            self.axes[dim].rows if dim in self.axes else n for dim, n in enumerate(shape)
        )

    def reduced(self, dims: Sequence[int], *, keepdim: bool) -> "Domain":
        """Return the domain of a result that every rank has whole in some dimensions.

        Args:
            dims: These dimensions, not negative.
            keepdim: Whether the dimensions stay, with size 1; else they are dropped.
        """
        kept = {dim: axis for dim, axis in self.axes.items() if dim not in dims}
        if keepdim:
            return Domain(kept)
        return Domain({dim - sum(d < dim for d in dims): axis for dim, axis in kept.items()})

    def without(self, *dims: int) -> "Domain":
        """Return the domain of the tensor with these dimensions whole on every rank."""
        return self.reduced(dims, keepdim=True)

    def moved(self, by: int, *, first: int = 0) -> "Domain":
        """Return the domain after dimensions were inserted or removed.

        Args:
            by: Number of inserted dimensions; negative for removed ones.
            first: They are inserted or removed before this dimension.
        """
        return Domain(
            {dim + by if dim >= first else dim: axis for dim, axis in self.axes.items()}
        )


WHOLE = Domain({})
"""The domain of a tensor that every rank has whole."""


def shares_ranks(axis: Axis, others: Iterable[Axis]) -> bool:
    """Return whether another axis is sharded over the ranks of this one.

    Args:
        axis: The axis.
        others: The other axes.
    """
    return any(axis.group is other.group for other in others)

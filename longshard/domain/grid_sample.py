"""`grid_sample` over an image and a grid that are sharded: a rank fetches the rows that its points read."""

import torch
from torch import Tensor

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule, wrapped
from longshard.domain.domain import Axis, Domain, balanced, shares_ranks
from longshard.domain.elementwise import merged, own_part
from longshard.domain.indexing import rows_by_number
from longshard.sharding.rows import connected
from longshard.sharding.tensors import with_adjoint


@rule("grid_sample")
def _grid_sample(
    function, x, grid, mode="bilinear", padding_mode="zeros", align_corners=None
) -> DomainTensor:
    """Sample x, (N, C, H, W), at the points of grid, (N, rows, columns, 2). The result is sharded as the grid.

    If the rows of x are sharded, and the grid is not sharded over these ranks, they divide the rows of the grid evenly.
    A rank asks for the rows of x from the first to the last row that its part of the grid reads; columns are gathered.
    """
    x, grid = (wrapped(t) for t in (x, grid))
    refuse_unless(
        x.ndim == 4 and padding_mode != "reflection",
        "volumes, and padding by reflection",
    )
    # dimension of the grid -> dimension of the result
    row_axis = x.domain.axes.get(2)
    places = {0: 0, 1: 2, 2: 3}
    targets = {places[dim]: axis for dim, axis in grid.domain.axes.items() if dim in places}
    if row_axis is not None and not shares_ranks(row_axis, targets.values()):
        targets[2] = Axis(balanced(grid.shape[1], row_axis.degree), row_axis.group)
    domain = merged([targets, x.domain.without(2, 3).axes])
    points = own_part(
        grid,
        Domain({d: domain.axes[n] for d, n in places.items() if n in domain.axes}),
        grid.shape,
    )
    other_axes = domain.without(2, 3).axes
    if row_axis is not None and shares_ranks(row_axis, other_axes.values()):
        row_axis = None  # ranks with other samples need all rows of them
    local = own_part(
        x, Domain(other_axes | ({} if row_axis is None else {2: row_axis})), x.shape
    )
    if row_axis is not None:
        local, points = _rows_of_points(
            local, points, row_axis, align_corners=bool(align_corners)
        )
    if points.numel():
        return DomainTensor(function(local, points, mode, padding_mode, align_corners), domain)
    return DomainTensor(
        connected(local.new_zeros(*local.shape[:2], *points.shape[1:3]), local, points), domain
    )


def _rows_of_points(
    x: Tensor, points: Tensor, axis: Axis, *, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows, dimension 2, that are read at the points, and the points relative to these rows."""
    height = axis.layout.length
    y = points[..., 1]
    places = (y + 1) / 2 * (height - 1) if align_corners else ((y + 1) * height - 1) / 2
    first = 0
    last = height
    if x.is_meta:
        x = x.new_empty(*x.shape[:2], height, x.shape[3])
    else:
        read = places.detach().clamp(-2, height + 1)
        # bicubic interpolation reads two rows more
        ends = (int(read.min()) - 3, int(read.max()) + 4) if read.numel() else (0, 2)
        first = max(min(ends[0], height - 2), 0)
        last = min(max(ends[1], 2), height)
        x = with_adjoint(
            x, *rows_by_number(axis, torch.arange(first, last, device=x.device), 2)
        )
    rows = last - first
    own = places - first
    y = own * 2 / max(rows - 1, 1) - 1 if align_corners else (own * 2 + 1) / rows - 1
    return x, torch.stack([points[..., 0], y], -1)

"""What convolutions, pools and interpolation have in common: outputs that read windows of rows along each dimension.

The owner of some rows computes the outputs that belong to them (trainer/distributed/sharding/windows.py). It fetches
the rows that these read, one exchange for each sharded dimension, and computes one tile of outputs after another.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.rows import connected, fetch
from trainer.distributed.sharding.windows import Tile, WindowPlan

Way = Callable[[AxisLayout], WindowPlan] | int
"""How a dimension is computed: by the plan for a layout; or it is whole, and the function itself makes n outputs."""

Tiles = Mapping[int, Tile]
"""For each dimension with a plan the outputs that a call computes, and the rows that it gets."""


def slide(
    x: torch.Tensor,
    domain: Domain,
    ways: Mapping[int, Way],
    function: Callable[[torch.Tensor, Tiles], torch.Tensor],
    *,
    channels: int | None = None,
    parameters: Sequence[torch.Tensor | None] = (),
    periodic: bool = False,
) -> tuple[torch.Tensor, Domain]:
    """Return the function of the windows of x, put together from tiles, and its domain.

    channels: of the result, in the dimension before the first of `ways`; None: as x. parameters: of the function, which
    must have gradients on every rank. periodic: rows beyond the ends are those of the other end, else zeros.
    """
    tiles, layouts, shape = {}, {}, list(x.shape)
    for dim, way in ways.items():
        axis = domain.axes.get(dim)
        if isinstance(way, int):
            layouts |= {} if way == shape[dim] else {dim: whole(way)}
            shape[dim] = way
            continue
        plan = way(whole(x.shape[dim]) if axis is None else axis.layout)
        x, layouts[dim] = fetch(x, axis, plan.wanted, dim, periodic=periodic), plan.layout
        tiles[dim] = plan.tiles[0 if axis is None else axis.rank]
        shape[dim] = sum(tile.outputs[1] - tile.outputs[0] for tile in tiles[dim])
    shape[min(ways) - 1] = shape[min(ways) - 1] if channels is None else channels
    result = domain.layouts(layouts)
    if 0 in shape:
        return connected(x.new_zeros(shape), x, *parameters), result
    return _tile_by_tile(x, [*tiles.items()], function, {}), result


def _tile_by_tile(x: torch.Tensor, tiles: list, function: Callable, chosen: dict[int, Tile]) -> torch.Tensor:
    if not tiles:
        return function(x, chosen)
    (dim, parts), *others = tiles
    results, place = [], 0
    for tile in parts:
        rows = tile.inputs[1] - tile.inputs[0]
        part = x if len(parts) == 1 else x.narrow(dim, place, rows)
        results.append(_tile_by_tile(part, others, function, chosen | {dim: tile}))
        place += rows
    return results[0] if len(results) == 1 else torch.cat(results, dim)


def whole(length: int) -> AxisLayout:
    """Return the layout of a dimension that one rank has."""
    return AxisLayout("whole", length, (((0, length),) if length else (),))


def spatial_dims(x: torch.Tensor, domain: Domain, number: int) -> range:
    """Return the last `number` dimensions of x.

    Raises:
        ValueError: x has too few dimensions, or its channels, the dimension before, are sharded.
    """
    first = x.ndim - number
    if first < 1 or (first - 1 in domain.axes and domain.axes[first - 1].degree > 1):
        raise ValueError(
            f"x of shape {tuple(x.shape)} must have its channels, whole on every rank, before {number} spatial "
            "dimensions; shard batch or spatial dimensions"
        )
    return range(first, x.ndim)


def per_axis(value: object, dims: Sequence[int]) -> tuple:
    """Return one value for each spatial dimension, given for all of them or one by one.

    Raises:
        ValueError: another number of values.
    """
    if isinstance(value, int | str):
        return (value,) * len(dims)
    values = tuple(value)
    if len(values) != len(dims):
        raise ValueError(f"{values} has {len(values)} entries for {len(dims)} spatial dimensions; give one for each")
    return values

"""The rule of interpolation. Its outputs mix the rows around their positions."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule
from longshard.domain.windows import Tiles, on_samples, per_axis, slide, spatial_dims
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Range
from longshard.sharding.tensors import planned, to_device
from longshard.sharding.windows import Tile, WindowPlan, plan_outputs


@rule("interpolate")
def _interpolate(
    function,
    x,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
) -> DomainTensor:
    """Interpolate as torch does. The owner of input rows [a, b) of n computes outputs from ceil(a * m / n) on.

    size or scale_factor: for all m outputs, or one value for each spatial dimension.
    """
    if all(dim < 2 for dim in x.domain.axes):  # the spatial dimensions are whole
        options = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return on_samples(function, x, *options)
    is_known = (
        mode in ("nearest", "linear", "bilinear", "trilinear")
        and not recompute_scale_factor
        and not antialias
    )
    refuse_unless(is_known, f"mode {mode!r}, or an option")
    dims = spatial_dims(x, x.ndim - 2)
    factors = [None] * len(dims)
    if scale_factor is not None:
        factors = [float(factor) for factor in per_axis(scale_factor, dims)]
        size = [int(x.shape[dim] * factor) for dim, factor in zip(dims, factors, strict=True)]
    targets = zip(dims, per_axis(size, dims), factors, strict=True)
    sources = {
        dim: _sources(x.shape[dim], n, f, mode, bool(align_corners)) for dim, n, f in targets
    }

    def compute(part: Tensor, tiles: Tiles) -> Tensor:
        if mode == "nearest" and all(
            _is_whole(tile, sources[dim]) for dim, tile in tiles.items()
        ):
            return F.interpolate(
                part, [tiles[dim].outputs[1] - tiles[dim].outputs[0] for dim in dims]
            )
        for dim, tile in tiles.items():
            part = _mixed(part, dim, tile, sources[dim])
        return part

    return slide(x, _plan, sources, compute)


Sources = tuple[tuple[int, int, float], ...]
"""For each output, the two rows that it mixes, and the share of the second row."""


@planned
def _sources(
    length: int, outputs: int, factor: float | None, mode: str, align_corners: bool
) -> Sources:
    if mode == "nearest":  # ask PyTorch for the rows, because of its rounding
        rows = torch.arange(length, dtype=torch.float64).view(1, 1, -1)
        chosen = (
            F.interpolate(rows, scale_factor=factor) if factor else F.interpolate(rows, outputs)
        )
        return tuple((int(row), int(row), 0.0) for row in chosen.flatten().tolist())
    scale = length / outputs if factor is None else 1 / factor
    if align_corners:
        scale = (length - 1) / (outputs - 1) if outputs > 1 else 0.0
    sources = []
    for output in range(outputs):
        place = output * scale if align_corners else max((output + 0.5) * scale - 0.5, 0.0)
        first = min(int(place), length - 1)
        sources.append((first, min(first + 1, length - 1), place - first))
    return tuple(sources)


@lru_cache(maxsize=1024)
def _plan(layout: AxisLayout, sources: Sources) -> WindowPlan:
    outputs = len(sources)

    def inputs(start: int, stop: int) -> Range:
        return sources[start][0], sources[stop - 1][1] + 1

    return plan_outputs(layout, outputs, lambda row: -(-row * outputs // layout.length), inputs)


@lru_cache(maxsize=1024)
def _is_whole(tile: Tile, sources: Sources) -> bool:
    """Return whether interpolation of the tile alone picks the same nearest rows as interpolation of the whole axis."""
    (start, stop), (first, last) = tile
    rows = tuple(row - first for row, *_ in sources[start:stop])
    return rows == tuple(
        row for row, *_ in _sources(last - first, stop - start, None, "nearest", False)
    )


def _mixed(part: Tensor, dim: int, tile: Tile, sources: Sources) -> Tensor:
    """Return the outputs of a tile: each mixes two rows."""
    chosen = sources[slice(*tile.outputs)]
    *places, share = zip(*chosen, strict=True)
    low, high = (to_device(torch.tensor(rows), part.device) - tile.inputs[0] for rows in places)
    low = part.index_select(dim, low)
    if not any(share):
        return low
    high = part.index_select(dim, high)
    weights = to_device(torch.tensor(share, dtype=part.dtype), part.device).view(
        -1, *[1] * (part.ndim - 1 - dim)
    )
    return torch.lerp(low, high, weights)

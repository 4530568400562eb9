"""Convolutions and transposed convolutions over sharded axes: only the halo travels, one exchange for each axis.

The functions follow torch.nn.functional, for one to three spatial dimensions as the weight has. Each rank's gradients
of weight and bias are its outputs' part; summed over the ranks of the domain they are the whole gradient.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from trainer.distributed.domain_parallel.domain import Domain, sized
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.rows import connected, fetch, local_rows, padded
from trainer.distributed.sharding.windows import (
    Tile,
    Window,
    WindowPlan,
    outputs_of,
    transposed_outputs,
    transposed_plan,
    window_plan,
)

AxisPadding = int | str | tuple[int, int]
"""Of one axis: rows on both sides, (before, after), or `valid`, `same`, `causal`."""

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv(
    x: torch.Tensor,
    domain: Domain,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: AxisPadding | Sequence[AxisPadding] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> tuple[torch.Tensor, Domain]:
    """Return the convolution of x: (N, C, *spatial) or (C, *spatial), and its domain.

    weight: (C_out, C / groups, *kernel), whole on every rank. padding: of all axes, or a tuple with one for each.
    `same` pads the odd row behind, as PyTorch does; `causal` pads before only. padding_mode: `zeros` or `circular`.
    With stride 1 and as many outputs as inputs the layout stays; else it is that of rows at multiples of the stride.

    Raises:
        ValueError: channels that are sharded, an unknown padding, or a kernel that does not fit.
    """
    dims = spatial_dims(x, domain, weight.ndim - 2)
    shape = domain.shape(x)
    steps, gaps = per_axis(stride, dims), per_axis(dilation, dims)
    pads = per_axis(padding, dims)
    options = zip(dims, weight.shape[2:], steps, pads, gaps, strict=True)
    windows = {d: Window(k, step, *_padding(pad, gap * (k - 1), step), gap) for d, k, step, pad, gap in options}
    if padding_mode not in ("zeros", "circular"):
        raise ValueError(f"padding_mode = {padding_mode!r} is neither 'zeros' nor 'circular'")
    periodic = padding_mode == "circular"
    split, native, tiles = domain.split(dims), dict.fromkeys(dims, 0), {}
    for dim, window in windows.items():
        if dim in split:
            plan = window_plan(split[dim].layout, window)
            x = fetch(x, split[dim], plan.wanted, dim, periodic=periodic)
            tiles[dim] = plan.tiles[split[dim].rank]
        elif window.before == window.after and not periodic:
            native[dim] = window.before
        else:
            x = padded(x, dim, window.before, window.after, periodic=periodic)
    result = _result(domain, windows, window_plan)
    function, around = _CONVOLUTIONS[len(dims)], tuple(native.values())

    def one_tile(part: torch.Tensor, _: Sequence[Tile]) -> torch.Tensor:
        return function(part, weight, bias, steps, around, gaps, groups)

    sizes = {d: outputs_of(shape[d], w) for d, w in windows.items()} | {dims[0] - 1: weight.shape[0]}
    local = result.local_shape([sizes.get(d, n) for d, n in enumerate(shape)])
    return over_tiles(x, tiles, one_tile, local, (weight, bias)), result


def conv_transpose(
    x: torch.Tensor,
    domain: Domain,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | tuple[int, int] | Sequence[int | tuple[int, int]] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> tuple[torch.Tensor, Domain]:
    """Return the transposed convolution of x: (N, C, *spatial) or (C, *spatial), and its domain.

    weight: (C, C_out / groups, *kernel), whole on every rank. padding: rows cut on both sides, or (before, after). The
    owner of input row i computes the outputs [i * stride, (i + 1) * stride).

    Raises:
        ValueError: channels that are sharded, or no outputs.
    """
    dims = spatial_dims(x, domain, weight.ndim - 2)
    shape = domain.shape(x)
    steps, gaps, pads, extras = (per_axis(option, dims) for option in (stride, dilation, padding, output_padding))
    options = zip(dims, weight.shape[2:], steps, pads, gaps, extras, strict=True)
    windows = {d: Window(k, step, *_padding(pad, 0, 1), gap, extra) for d, k, step, pad, gap, extra in options}
    split, tiles = domain.split(dims), {}
    for dim, window in windows.items():
        if dim in split:
            plan = transposed_plan(split[dim].layout, window)
            x = fetch(x, split[dim], plan.wanted, dim)
            tiles[dim] = plan.tiles[split[dim].rank]
        elif window.before != window.after:
            tiles[dim] = transposed_plan(sized([shape[dim]]), window).tiles[0]
            x = local_rows(x, ((0, shape[dim]),), (tiles[dim][0].inputs,), dim)
    result = _result(domain, windows, transposed_plan)

    def one_tile(part: torch.Tensor, parts: Sequence[Tile]) -> torch.Tensor:
        around = {dim: (w.before, w.extra) for dim, w in windows.items()}
        cuts = {}
        for dim, tile in zip(tiles, parts, strict=True):
            start, rows, missing = _cut(tile, windows[dim])
            around[dim], cuts[dim] = (0, missing), (start, rows)
        y = _TRANSPOSED[len(dims)](part, weight, bias, steps, *zip(*around.values(), strict=True), groups, gaps)
        for dim, (start, rows) in cuts.items():
            y = y.narrow(dim, start, rows)
        return y

    sizes = {d: transposed_outputs(shape[d], w) for d, w in windows.items()} | {dims[0] - 1: weight.shape[1] * groups}
    local = result.local_shape([sizes.get(d, n) for d, n in enumerate(shape)])
    return over_tiles(x, tiles, one_tile, local, (weight, bias)), result


def _result(domain: Domain, windows: dict[int, Window], plan: Callable[[AxisLayout, Window], WindowPlan]) -> Domain:
    layouts = {d: plan(domain.axes[d].layout, w).layout for d, w in windows.items() if d in domain.axes}
    return domain.layouts(layouts)


def _cut(tile: Tile, window: Window) -> tuple[int, int, int]:
    """Return of the transposed convolution of a tile's inputs: first output wanted, how many, how many are missing."""
    (start, stop), (first, last) = tile
    offset = first * window.stride - window.before
    computed = (last - first - 1) * window.stride + window.reach + 1
    return start - offset, stop - start, max(stop - offset - computed, 0)


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


def _padding(value: AxisPadding, reach: int, stride: int) -> tuple[int, int]:
    if value == "same" and stride != 1:
        raise ValueError(f"padding 'same' with stride {stride} is not defined; give the numbers of rows")
    words = {"valid": (0, 0), "same": (reach // 2, reach - reach // 2), "causal": (reach, 0)}
    if isinstance(value, str) and value not in words:
        raise ValueError(f"padding = {value!r} is none of {', '.join(map(repr, words))}, and no number")
    if isinstance(value, str):
        return words[value]
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def over_tiles(
    x: torch.Tensor,
    tiles: dict[int, tuple[Tile, ...]],
    function: Callable[[torch.Tensor, Sequence[Tile]], torch.Tensor],
    shape: Sequence[int],
    parameters: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:
    """Apply a function to each tile of the fetched rows, and put the results together.

    tiles: of each cut dimension; shape: of this rank's result, which may have no elements and still joins the backward.
    """
    if 0 in shape:
        return connected(x.new_zeros(shape), x, *parameters)
    return _apply(x, [*tiles.items()], function, ())


def _apply(x: torch.Tensor, tiles: list, function: Callable, chosen: tuple[Tile, ...]) -> torch.Tensor:
    if not tiles:
        return function(x, chosen)
    (dim, parts), *others = tiles
    results, place = [], 0
    for tile in parts:
        rows = tile.inputs[1] - tile.inputs[0]
        part = x if len(parts) == 1 else x.narrow(dim, place, rows)
        results.append(_apply(part, others, function, (*chosen, tile)))
        place += rows
    return results[0] if len(results) == 1 else torch.cat(results, dim)

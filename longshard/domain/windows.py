"""Rules of functions whose outputs read windows of rows: convolutions, pools, and windows themselves.

The owner of some rows computes the outputs that belong to them (longshard/sharding/windows.py). It fetches the rows
that these outputs read, one exchange for each sharded dimension, and computes one tile of outputs after another. Each
rank's gradients of weight and bias are the part of its outputs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule, wrapped
from longshard.sharding.layout import AxisLayout
from longshard.sharding.rows import connected, fetch, layout_of
from longshard.sharding.tensors import joined, to_device, wide_type
from longshard.sharding.windows import Tile, Window, WindowPlan, transposed_plan, window_plan

Tiles = Mapping[int, Tile]
"""For each dimension that is cut, the outputs that a call computes, and its input rows."""


def slide(
    x: DomainTensor,
    plan_of: Callable[[AxisLayout, Any], WindowPlan],
    windows: Mapping[int, Any],
    function: Callable[[Tensor, Tiles], Tensor],
    *,
    whole: Collection[int] = (),
    learned: tuple[int, Tensor, Tensor | None] | None = None,
    periodic: bool = False,
) -> DomainTensor:
    """Return the results of `function` on the windows of x, computed tile by tile and put together.

    A collective if a dimension with windows is divided: rows of other ranks are fetched first, then local dimensions
    are padded.

    Args:
        x: The tensor, any shape.
        plan_of: Returns the plan of a dimension, from its layout and its window.
        windows: Dimension to its window.
        function: Computes a tile from its rows.
        whole: Dimensions that are whole, and that the function computes without tiles.
        learned: Channels of the result, in the dimension before the first window, and weight and bias, which must have
            gradients on every rank; None means the channels of x.
        periodic: Whether rows beyond one end are the rows of the other end; else zeros.
    """
    local = x.local
    tiles = {}
    layouts = {}
    shape = list(local.shape)
    for dim in sorted(windows, key=lambda dim: dim not in x.domain.axes):
        axis = x.domain.axes.get(dim)
        layout, rank = layout_of(axis, shape[dim])
        plan = plan_of(layout, windows[dim])
        shape[dim] = plan.layout.local_length(rank)
        if dim not in whole:
            local = fetch(local, axis, plan.wanted, dim, periodic=periodic)
            layouts[dim] = plan.layout
            tiles[dim] = plan.tiles[rank]
    shape[min(windows) - 1], weight, bias = learned or (shape[min(windows) - 1], None, None)
    if 0 in shape:
        result = connected(connected(local.new_zeros(shape), local, weight), bias)
    else:
        result = _tile_by_tile(local, [*tiles.items()], function, {})
    return DomainTensor(result, x.domain.layouts(layouts))


def _tile_by_tile(
    x: Tensor, tiles: list, function: Callable, chosen: dict[int, Tile]
) -> Tensor:
    if not tiles:
        return function(x, chosen)
    (dim, parts), *others = tiles
    results = []
    place = 0
    for tile in parts:
        rows = tile.inputs[1] - tile.inputs[0]
        part = x if len(parts) == 1 else x.narrow(dim, place, rows)
        results.append(_tile_by_tile(part, others, function, chosen | {dim: tile}))
        place += rows
    return joined(results, dim)


def _numbers(name: str) -> list[str]:
    """Return the names of a function of torch for one to three dimensions."""
    return [f"{name}{n}d" for n in (1, 2, 3)]


def spatial_dims(x: DomainTensor, number: int) -> range:
    """Return the last `number` dimensions of x.

    Args:
        x: The tensor, any shape.
        number: Number of spatial dimensions.

    Raises:
        Unhandled: The dimension before them, the channels, is sharded.
    """
    first = x.ndim - number
    refuse_unless(first - 1 not in x.domain.axes, "sharded channels")
    return range(first, x.ndim)


def per_axis(value: float | str | Sequence, dims: Sequence[int]) -> tuple:
    """Return one value for each spatial dimension.

    Args:
        value: One value for all dimensions, or one for each.
        dims: The dimensions.

    Raises:
        ValueError: There is another number of values.
    """
    values = (value,) * len(dims) if isinstance(value, int | float | str) else tuple(value)
    values *= len(dims) if len(values) == 1 else 1
    if len(values) != len(dims):
        raise ValueError(
            f"{values} has {len(values)} entries for {len(dims)} spatial dimensions; give one for each"
        )
    return values


def _windows(
    function: Callable, x: DomainTensor, *options: int | str | Sequence, ceil: bool = False
) -> dict[int, Window]:
    """Return the window of each spatial dimension. `same` pads the odd row at the end, as in PyTorch.

    options: kernel size, stride, padding, and perhaps dilation and output padding, as in PyTorch's functions.
    """
    dims = spatial_dims(x, int(function.__name__[-2]))
    columns = (per_axis(x, dims) for x in (*options, *(1, 0)[len(options) - 3 :]))
    windows = {}
    for dim, kernel, step, pad, gap, extra in zip(dims, *columns, strict=True):
        reach = gap * (kernel - 1) * (pad == "same")
        before, after = (reach // 2, reach - reach // 2) if isinstance(pad, str) else (pad, pad)
        windows[dim] = Window(kernel, step, before, after, gap, extra, ceil)
    return windows


# ---- Convolutions


@rule(*_numbers("conv"), first_only=True)
def conv(
    function,
    x,
    weight,
    bias=None,
    stride=1,
    padding=0,
    dilation=1,
    groups=1,
    *,
    periodic: bool = False,
) -> DomainTensor:
    """Return the convolution of a sharded tensor. With stride 1 and equally many outputs and inputs the layout stays.

    Otherwise the owner of a row at a multiple of the stride owns the output.

    Args:
        function: F.conv1d, F.conv2d or F.conv3d.
        x: (N, C, *spatial).
        weight: (C_out, C / groups, *kernel), whole on every rank.
        bias: (C_out,); None if absent.
        stride: As in PyTorch.
        padding: As in PyTorch.
        dilation: As in PyTorch.
        groups: As in PyTorch.
        periodic: Whether the padding is rows of the other end.
    """
    windows = _windows(function, x, weight.shape[2:], stride, padding, dilation)
    whole = {
        dim: window.before
        for dim, window in windows.items()
        if dim not in x.domain.axes and window.before == window.after and not periodic
    }
    around = tuple(whole.get(dim, 0) for dim in windows)

    def compute(part: Tensor, _: Tiles) -> Tensor:
        return function(part, weight, bias, stride, around, dilation, groups)

    learned = weight.shape[0], weight, bias
    return slide(
        x, window_plan, windows, compute, whole=whole, learned=learned, periodic=periodic
    )


@rule(*_numbers("conv_transpose"), first_only=True)
def _conv_transpose(
    function, x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
) -> DomainTensor:
    """Compute a transposed convolution: the owner of input row i computes the outputs [i * stride, (i + 1) * stride).

    weight: (C, C_out / groups, *kernel), whole on every rank.
    """
    windows = _windows(function, x, weight.shape[2:], stride, padding, dilation, output_padding)
    whole = windows.keys() - x.domain.axes.keys()

    def compute(part: Tensor, tiles: Tiles) -> Tensor:
        cuts = {dim: _cut(tile, windows[dim]) for dim, tile in tiles.items()}
        around = (
            (0, cuts[dim][2]) if dim in cuts else (w.before, w.extra)
            for dim, w in windows.items()
        )
        y = function(part, weight, bias, stride, *zip(*around, strict=True), groups, dilation)
        for dim, (start, rows, _) in cuts.items():
            y = y.narrow(dim, start, rows)
        return y

    learned = weight.shape[1] * groups, weight, bias
    return slide(x, transposed_plan, windows, compute, whole=whole, learned=learned)


def _cut(tile: Tile, window: Window) -> tuple[int, int, int]:
    """Return the first wanted output of a tile's transposed convolution, and the numbers of wanted and missing ones.

    Missing outputs are wanted ones beyond the end of the computed outputs.
    """
    (start, stop), (first, last) = tile
    offset = first * window.stride - window.before
    computed = (last - first - 1) * window.stride + window.reach + 1
    return start - offset, stop - start, max(stop - offset - computed, 0)


# ---- Pools


@rule(*_numbers("max_pool"), first_only=True)
def _max_pool(
    function,
    x,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    return_indices=False,
) -> DomainTensor:
    stride = stride or kernel_size
    windows = _windows(function, x, kernel_size, stride, padding, dilation, ceil=ceil_mode)
    whole = windows.keys() - x.domain.axes.keys()
    around = tuple(w.before * (dim in whole) for dim, w in windows.items())

    def compute(part: Tensor, tiles: Tiles) -> Tensor:
        for dim, tile in tiles.items():
            first, stop = windows[dim].rows(*tile.outputs)
            beyond = tile.inputs[0] - first, stop - tile.inputs[1]
            if any(beyond):  # minus infinity never is the maximum, as with PyTorch's padding
                part = F.pad(part, [0, 0] * (part.ndim - 1 - dim) + [*beyond], value=-torch.inf)
        return function(part, kernel_size, stride, around, dilation, ceil_mode)

    return slide(x, partial(window_plan, within=True), windows, compute, whole=whole)


@rule(*_numbers("avg_pool"), first_only=True)
def _avg_pool(
    function,
    x,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
) -> DomainTensor:
    windows = _windows(function, x, kernel_size, stride or kernel_size, padding, ceil=ceil_mode)
    kernels, steps = zip(*((w.kernel, w.stride) for w in windows.values()), strict=True)

    def compute(part: Tensor, tiles: Tiles) -> Tensor:
        total = part.to(wide_type(part.dtype))  # a sum may overflow in float16
        if len(windows) == 1:  # the function for one dimension has no divisor
            total = F.avg_pool2d(
                total.unsqueeze(-2), (1, *kernels), (1, *steps), divisor_override=1
            ).squeeze(-2)
        else:
            total = function(total, kernels, steps, divisor_override=1)
        if divisor_override is not None:
            return (total / divisor_override).to(part.dtype)
        for dim, tile in tiles.items():
            window = windows[dim]
            margin = window.before * count_include_pad
            ends = (window.rows(output, output + 1) for output in range(*tile.outputs))
            counts = [
                min(stop, x.shape[dim] + margin) - max(start, -margin) for start, stop in ends
            ]
            counts = to_device(torch.tensor(counts, dtype=total.dtype), total.device)
            total = total / counts.view(-1, *[1] * (total.ndim - 1 - dim))
        return total.to(part.dtype)

    return slide(x, window_plan, windows, compute)


@rule(*_numbers("adaptive_avg_pool"), *_numbers("adaptive_max_pool"))
def _adaptive_pool(function, x, output_size, return_indices=False) -> DomainTensor:
    """Pool. The result is whole in a sharded dimension, in which each output is a mean, or a maximum, over ranks.

    If the output size of a dimension is None, the dimension stays as it is. Indices are refused.
    """
    refuse_unless(not return_indices, "the indices of a pool")
    dims = range(x.ndim - int(function.__name__[-2]), x.ndim)
    reduction = torch.mean if function.__name__[:12] == "adaptive_avg" else torch.amax
    sizes = per_axis(output_size, dims)
    for dim, size in zip(dims, sizes, strict=True):
        if dim in x.domain.axes and size is not None:
            ends = [
                (i * x.shape[dim] // size, -(-(i + 1) * x.shape[dim] // size))
                for i in range(size)
            ]
            x = torch.cat(
                [reduction(x.narrow(dim, a, b - a), dim, keepdim=True) for a, b in ends], dim
            )
    return on_samples(function, x, sizes)


def on_samples(function: Callable, x: DomainTensor, *options: object) -> DomainTensor:
    """Return the function of a tensor whose spatial dimensions are whole, computed on its shard, which may be empty.

    Args:
        function: The function.
        x: The tensor, any shape.
        *options: Its further arguments.
    """
    if x.local.numel():
        return wrapped(function(x.local, *options), x.domain)
    shape = function(torch.empty(x.shape, device="meta"), *options).shape
    return wrapped(connected(x.local.new_zeros(x.domain.local_shape(shape)), x.local), x.domain)


# ---- The windows themselves


@rule("unfold", first_only=True)
def _unfold(function, x, *args, **kwargs) -> DomainTensor:
    """Return the windows of one dimension (Tensor.unfold), or the columns of an image (F.unfold)."""
    return (_unfolded if function is torch.Tensor.unfold else _columns)(x, *args, **kwargs)


def _unfolded(
    x: DomainTensor, dimension: int, size: int, step: int, dilation: int = 1
) -> DomainTensor:
    dim = dimension % x.ndim
    starts = x.shape[dim] - (size - 1) * dilation
    rows = (slice(row * dilation, row * dilation + starts, step) for row in range(size))
    return torch.stack([x[(*[slice(None)] * dim, each)] for each in rows], -1)


def _columns(x: DomainTensor, kernel_size, dilation=1, padding=0, stride=1) -> DomainTensor:
    dims = -2, -1
    options = (per_axis(option, dims) for option in (kernel_size, stride, dilation, padding))
    for dim, size, step, gap, around in zip(dims, *options, strict=True):
        x = F.pad(x, (*(0, 0) * (-dim - 1), around, around))
        x = _unfolded(x, dim, size, step, gap).movedim(-1, -3)
    # (N, C, kernel rows, kernel columns, rows, columns)
    return x.flatten(-5, -3).flatten(-2)

"""Convolutions and transposed convolutions over sharded axes: only the halo is sent, one exchange for each axis.

The functions follow torch.nn.functional, for one to three spatial dimensions as the weight has. Each rank's gradients
of weight and bias are its outputs' part; summed over the ranks of the domain they are the whole gradient.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.domain_parallel.sliding import Tiles, Way, per_axis, slide, spatial_dims
from trainer.distributed.sharding.windows import (
    Tile,
    Window,
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
    periodic, split = padding_mode == "circular", domain.split(dims)
    ways: dict[int, Way] = {d: partial(window_plan, window=w) for d, w in windows.items()}
    around = dict.fromkeys(dims, 0)
    for dim, window in windows.items():
        if dim not in split and window.before == window.after and not periodic:
            ways[dim], around[dim] = outputs_of(shape[dim], window), window.before

    def compute(part: torch.Tensor, _: Tiles) -> torch.Tensor:
        return _CONVOLUTIONS[len(dims)](part, weight, bias, steps, tuple(around.values()), gaps, groups)

    options = {"channels": weight.shape[0], "parameters": (weight, bias), "periodic": periodic}
    return slide(x, domain, ways, compute, **options)


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
    ways: dict[int, Way] = {d: partial(transposed_plan, window=w) for d, w in windows.items()}
    for dim, window in windows.items():
        if not domain.split([dim]) and window.before == window.after:
            ways[dim] = transposed_outputs(shape[dim], window)

    def compute(part: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        cuts = {dim: _cut(tile, windows[dim]) for dim, tile in tiles.items()}
        around = ((0, cuts[dim][2]) if dim in cuts else (w.before, w.extra) for dim, w in windows.items())
        y = _TRANSPOSED[len(dims)](part, weight, bias, steps, *zip(*around, strict=True), groups, gaps)
        for dim, (start, rows, _) in cuts.items():
            y = y.narrow(dim, start, rows)
        return y

    return slide(x, domain, ways, compute, channels=weight.shape[1] * groups, parameters=(weight, bias))


def _cut(tile: Tile, window: Window) -> tuple[int, int, int]:
    """Return of the transposed convolution of a tile's inputs: first output wanted, how many, how many are missing."""
    (start, stop), (first, last) = tile
    offset = first * window.stride - window.before
    computed = (last - first - 1) * window.stride + window.reach + 1
    return start - offset, stop - start, max(stop - offset - computed, 0)


def _padding(value: AxisPadding, reach: int, stride: int) -> tuple[int, int]:
    if value == "same" and stride != 1:
        raise ValueError(f"padding 'same' with stride {stride} is not defined; give the numbers of rows")
    words = {"valid": (0, 0), "same": (reach // 2, reach - reach // 2), "causal": (reach, 0)}
    if isinstance(value, str) and value not in words:
        raise ValueError(f"padding = {value!r} is none of {', '.join(map(repr, words))}, and no number")
    if isinstance(value, str):
        return words[value]
    return (value, value) if isinstance(value, int) else (value[0], value[1])

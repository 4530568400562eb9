"""Interpolation, padding, flips, rolls and cumulative sums along sharded axes. Each returns (result, domain)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.domain_parallel.reductions import gather_statistics, wide
from trainer.distributed.domain_parallel.sliding import Tiles, per_axis, slide, spatial_dims, whole
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.ranges import Range
from trainer.distributed.sharding.rows import Wanted, connected, fetch
from trainer.distributed.sharding.tensors import planned, to_device
from trainer.distributed.sharding.windows import Tile, WindowPlan, plan_outputs

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def interpolate(
    x: torch.Tensor,
    domain: Domain,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    *,
    mode: str = "nearest",
    align_corners: bool = False,
) -> tuple[torch.Tensor, Domain]:
    """Return x: (N, C, *spatial) at another resolution; mode: `nearest` or `linear` (bilinear, trilinear).

    size or scale_factor: of all spatial dimensions, or one for each. Rows are read where
    torch.nn.functional.interpolate reads them. The owner of input rows [a, b) of n computes the outputs from
    ceil(a * outputs / n) on.

    Raises:
        ValueError: sharded channels, another mode, or not exactly one of size and scale_factor.
    """
    dims = spatial_dims(x, domain, x.ndim - 2)
    if mode not in ("nearest", "linear") or (size is None) == (scale_factor is None):
        raise ValueError(
            f"interpolate got mode = {mode!r}, size = {size}, scale_factor = {scale_factor}; mode is 'nearest' or "
            "'linear', and one of size and scale_factor is given"
        )
    shape, split = list(domain.shape(x)), domain.split(dims)
    if isinstance(scale_factor, int | float):
        scale_factor = (scale_factor,) * len(dims)
    factors = [None] * len(dims) if scale_factor is None else [float(f) for f in scale_factor]
    sizes = [int(shape[d] * f) for d, f in zip(dims, factors, strict=True)] if size is None else per_axis(size, dims)
    if not split:
        changed = {d: whole(n) for d, n in zip(dims, sizes, strict=True) if d in domain.axes and n != shape[d]}
        return _whole(x, size, scale_factor, mode, align_corners), domain.layouts(changed)
    sources = {d: _sources(shape[d], n, f, mode, align_corners) for d, n, f in zip(dims, sizes, factors, strict=True)}

    def compute(part: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        for dim, tile in tiles.items():
            part = _mixed(part, dim, tile, sources[dim])
        return part

    return slide(x, domain, {d: partial(_plan, sources=each) for d, each in sources.items()}, compute)


def _whole(x: torch.Tensor, size: object, scale_factor: object, mode: str, align_corners: bool) -> torch.Tensor:
    size = tuple(size) if isinstance(size, Sequence) else size
    if mode == "nearest":
        return F.interpolate(x, size, scale_factor)
    return F.interpolate(x, size, scale_factor, _LINEAR[x.ndim - 2], align_corners)


Sources = tuple[tuple[int, int, float], ...]
"""For each output the two rows that it mixes, and the share of the second."""


@planned
def _sources(length: int, outputs: int, factor: float | None, mode: str, align_corners: bool) -> Sources:
    if mode == "nearest":  # PyTorch itself says which rows, in its rounding
        rows = torch.arange(length, dtype=torch.float64).view(1, 1, -1)
        chosen = F.interpolate(rows, scale_factor=factor) if factor else F.interpolate(rows, outputs)
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


def _mixed(part: torch.Tensor, dim: int, tile: Tile, sources: Sources) -> torch.Tensor:
    """Return the outputs of a tile: each mixes two rows."""
    chosen = sources[slice(*tile.outputs)]
    first, second, share = zip(*chosen, strict=True)
    low = part.index_select(dim, to_device(torch.tensor(first), part.device) - tile.inputs[0])
    if not any(share):
        return low
    high = part.index_select(dim, to_device(torch.tensor(second), part.device) - tile.inputs[0])
    weights = to_device(torch.tensor(share, dtype=part.dtype), part.device).view(-1, *[1] * (part.ndim - 1 - dim))
    return torch.lerp(low, high, weights)


_PAD_MODES = ("constant", "circular", "reflect", "replicate")


def pad(
    x: torch.Tensor,
    domain: Domain,
    rows: Mapping[int, tuple[int, int]],
    *,
    mode: str = "constant",
    value: float = 0.0,
) -> tuple[torch.Tensor, Domain]:
    """Return x with rows before and after; rows: dimension -> (before, after), negative to cut.

    mode: `constant`, `circular`, `reflect` or `replicate`. New rows belong to the owners of the first and the last row:
    the layout changes. A convolution's `padding` leaves it as it is.

    Raises:
        ValueError: another mode, or more rows than the mode or the axis has.
    """
    shape = domain.shape(x)
    layouts = {}
    for dim, (before, after) in rows.items():
        length, axis = shape[dim], domain.axes.get(dim)
        total, is_wide = length + before + after, mode == "reflect" and max(before, after) >= length
        if mode not in _PAD_MODES or not length or total < 1 or is_wide:
            raise ValueError(
                f"padding of {before} and {after} rows, mode {mode!r}, does not fit an axis of {length} rows; one row "
                f"must stay, 'reflect' adds fewer rows than there are, and modes are {', '.join(map(repr, _PAD_MODES))}"
            )
        layout, wanted = _padded(axis.layout if axis else whole(length), before, total, mode)
        mine = wanted[axis.rank if axis else 0]
        x, layouts[dim] = fetch(x, axis, wanted, dim), layout
        if value and mode == "constant":
            for start, stop in _beyond(mine, length):
                x = x.slice_scatter(torch.full_like(x.narrow(dim, start, stop - start), value), dim, start, stop)
    return x, domain.layouts(layouts)


@lru_cache(maxsize=256)
def _padded(layout: AxisLayout, before: int, total: int, mode: str) -> tuple[AxisLayout, Wanted]:
    """Return the layout of the padded axis, and the rows that each rank wants of it."""
    plan = plan_outputs(
        layout,
        total,
        lambda row: max(row + before, 0) if row else 0,
        lambda start, stop: (start - before, stop - before),
    )
    if mode == "constant":
        return plan.layout, plan.wanted
    length, wanted = layout.length, []
    for parts in plan.wanted:
        rows = (row for part in parts for row in range(*part))
        wanted.append(_as_ranges(_source_row(row, length, mode) for row in rows))
    return plan.layout, tuple(wanted)


def _source_row(row: int, length: int, mode: str) -> int:
    if mode == "circular":
        return row % length
    if mode == "replicate":
        return min(max(row, 0), length - 1)
    return abs(row) if row < length else 2 * (length - 1) - row


def _as_ranges(rows: Iterable[int]) -> tuple[Range, ...]:
    """Return rows in order as ranges."""
    ranges: list[Range] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


def _beyond(parts: Sequence[Range], length: int) -> Iterator[Range]:
    """Yield the places of rows outside [0, length) in the rows of `parts`."""
    place = 0
    for start, stop in parts:
        if start < 0:
            yield place, place + min(stop, 0) - start
        if stop > length:
            yield place + max(length - start, 0), place + stop - start
        place += stop - start


def flip(x: torch.Tensor, domain: Domain, dims: Sequence[int]) -> tuple[torch.Tensor, Domain]:
    """Return x with the order of rows reversed in some dimensions; the layouts stay."""
    domain.shape(x)
    for dim, axis in domain.split(dims).items():
        length = axis.layout.length
        wanted = tuple(tuple((length - b, length - a) for a, b in reversed(own)) for own in axis.layout.ranges)
        x = fetch(x, axis, wanted, dim)
    return x.flip(*dims), domain


def roll(x: torch.Tensor, domain: Domain, shifts: Mapping[int, int]) -> tuple[torch.Tensor, Domain]:
    """Return x with rows moved to higher indices, and from the end to the start; shifts: dimension -> rows."""
    domain.shape(x)
    for dim, shift in shifts.items():
        axis = domain.axes.get(dim)
        if axis is None or axis.degree == 1:
            x = x.roll(shift, dim)
        else:
            wanted = tuple(tuple((a - shift, b - shift) for a, b in own) for own in axis.layout.ranges)
            x = fetch(x, axis, wanted, dim, periodic=True)
    return x, domain


def cumsum(x: torch.Tensor, domain: Domain, dim: int) -> tuple[torch.Tensor, Domain]:
    """Return the cumulative sum along a dimension; only the totals of the ranks' ranges are sent."""
    domain.shape(x)
    if not domain.split([dim]):
        return x.cumsum(dim), domain
    axis, dtype = domain.axes[dim], wide(x.dtype) if x.is_floating_point() else x.dtype
    ranges = axis.layout.ranges
    parts = x.split([stop - start for start, stop in ranges[axis.rank]], dim) if ranges[axis.rank] else ()
    sums = [part.sum(dim, keepdim=True, dtype=dtype) for part in parts]
    most = max(map(len, ranges))
    sums += [x.narrow(dim, 0, 0).sum(dim, keepdim=True, dtype=dtype)] * (most - len(sums))
    totals = gather_statistics(torch.stack(sums), axis)  # (ranks, most, ..., 1, ...)
    results = []
    for part, (start, _) in zip(parts, ranges[axis.rank], strict=True):
        before = [[n < len(own) and own[n][0] < start for n in range(most)] for own in ranges]
        chosen = to_device(torch.tensor(before), x.device).view(len(ranges), most, *[1] * x.ndim)
        offset = torch.where(chosen, totals, 0).sum((0, 1), dtype=dtype)  # a product would be cast by autocast
        results.append((part.cumsum(dim, dtype=dtype) + offset).to(x.dtype))
    return (torch.cat(results, dim) if results else connected(x, totals)), domain

"""Rules of functions that move rows along a sharded axis (flip, roll, pad), and of cumulative sums."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from longshard.domain.dispatch import DomainTensor, refuse_unless, rule
from longshard.domain.reductions import gathered
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Spans, Wanted
from longshard.sharding.rows import connected, fetch, layout_of
from longshard.sharding.tensors import to_device, wide_type
from longshard.sharding.windows import plan_outputs

_PAD_MODES = ("constant", "circular", "reflect", "replicate")


@rule("flip")
def _flip(function, x, *args, dims=None) -> DomainTensor:
    """Flip. The layouts stay: each rank gets the rows that mirror its own."""
    if dims is None:
        dims = args[0] if isinstance(args[0], Sequence) else args
    asked = [dim % x.ndim for dim in dims]
    local = x.local
    for dim in asked:
        if axis := x.domain.axes.get(dim):
            n = axis.layout.length
            ranges = axis.layout.ranges
            local = fetch(
                local,
                axis,
                tuple(tuple((n - b, n - a) for a, b in reversed(own)) for own in ranges),
                dim,
            )
    return DomainTensor(local.flip(asked), x.domain)


@rule("roll")
def _roll(function, x, shifts, dims=None) -> DomainTensor:
    """Roll. The layouts stay. A dimension may be named twice. A roll without `dims` is refused."""
    refuse_unless(dims is not None, "a roll of the flattened tensor; name the dimensions")
    local = x.local
    both = (value if isinstance(value, Sequence) else (value,) for value in (shifts, dims))
    for shift, dim in zip(*both, strict=True):
        dim %= x.ndim
        if (axis := x.domain.axes.get(dim)) is None:
            local = local.roll(shift, dim)
        else:
            wanted = tuple(
                tuple((a - shift, b - shift) for a, b in own) for own in axis.layout.ranges
            )
            local = fetch(local, axis, wanted, dim, periodic=True)
    # compiled code needs a new tensor
    return DomainTensor(local.clone() if local is x.local else local, x.domain)


@rule("pad")
def _pad(function, x, pad, mode="constant", value=None) -> DomainTensor:
    """Pad. New rows belong to the owners of the first and the last row, so that the layout changes.

    The `padding` of a convolution does not change the layout.
    """
    refuse_unless(
        mode in _PAD_MODES,
        f"mode {mode!r}; use one of {', '.join(map(repr, _PAD_MODES))}",
    )
    local = x.local
    layouts = {}
    for dim, before, after in zip(range(x.ndim - 1, -1, -1), pad[::2], pad[1::2], strict=False):
        if not (before or after):
            continue
        axis = x.domain.axes.get(dim)
        length = x.shape[dim]
        layout, rank = layout_of(axis, length)
        layouts[dim], wanted = _padded(layout, before, length + before + after, mode)
        local = fetch(local, axis, wanted, dim)
        if value:
            rows = torch.tensor([row for part in wanted[rank] for row in range(*part)])
            beyond = to_device((rows < 0) | (rows >= length), local.device)
            local = local.masked_fill(beyond.view(-1, *[1] * (x.ndim - 1 - dim)), value)
    return DomainTensor(
        local if any(n > 0 for n in pad) else local.clone(), x.domain.layouts(layouts)
    )


@lru_cache(maxsize=256)
def _padded(
    layout: AxisLayout, before: int, total: int, mode: str
) -> tuple[AxisLayout, Wanted]:
    """Return the layout of the padded axis, and the rows of the unpadded axis that each rank wants.

    They are in the order of the rank's padded rows. With "constant", new rows have numbers outside the unpadded axis.
    before: number of new rows before the axis. total: length of the padded axis. mode: as in F.pad.
    """
    plan = plan_outputs(
        layout,
        total,
        lambda row: max(row + before, 0) if row else 0,
        lambda start, stop: (start - before, stop - before),
    )
    if mode == "constant":
        return plan.layout, plan.wanted
    n = layout.length
    source = {
        "circular": lambda row: row % n,
        "replicate": lambda row: min(max(row, 0), n - 1),
        "reflect": lambda row: abs(row) if row < n else 2 * (n - 1) - row,
    }[mode]
    wanted = (
        _as_ranges(source(row) for part in parts for row in range(*part))
        for parts in plan.wanted
    )
    return plan.layout, tuple(wanted)


def _as_ranges(rows: Iterable[int]) -> Spans:
    """Return rows in order as ranges."""
    ranges = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return tuple(ranges)


@rule("cumsum")
def _cumsum(function, x, dim, dtype=None) -> DomainTensor:
    """Sum cumulatively. Only the totals of the ranks' ranges are sent."""
    local = x.local.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    if (axis := x.domain.axes.get(dim := dim % x.ndim)) is None:
        return DomainTensor(local.cumsum(dim), x.domain)
    exact = wide_type(local.dtype) if local.is_floating_point() else local.dtype
    ranges = axis.layout.ranges
    parts = local.split([stop - start for start, stop in ranges[axis.rank]], dim)
    sums = [part.sum(dim, keepdim=True, dtype=exact) for part in parts]
    most = max(map(len, ranges))
    sums += [local.narrow(dim, 0, 0).sum(dim, keepdim=True, dtype=exact)] * (most - len(sums))
    totals = gathered(torch.stack(sums), axis)  # (ranks, most, ..., 1, ...)
    results = []
    for part, (start, _) in zip(parts, ranges[axis.rank], strict=True):
        before = [[n < len(own) and own[n][0] < start for n in range(most)] for own in ranges]
        chosen = to_device(torch.tensor(before), x.device).view(
            len(ranges), most, *[1] * x.ndim
        )
        # `where`, because autocast would cast a product
        offset = torch.where(chosen, totals, 0).sum((0, 1), dtype=exact)
        results.append((part.cumsum(dim, dtype=exact) + offset).to(local.dtype))
    return DomainTensor(
        torch.cat(results, dim) if results else connected(local, totals), x.domain
    )

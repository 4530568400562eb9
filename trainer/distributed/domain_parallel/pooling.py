"""Max and average pooling over sharded axes, as torch.nn.functional does them, for one to three spatial dimensions.

The rank that owns input row o * stride computes output o; only the rows that its windows need beyond its own are sent.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.domain_parallel.reductions import domain_max, domain_mean, wide
from trainer.distributed.domain_parallel.sliding import Tiles, Way, per_axis, slide, spatial_dims
from trainer.distributed.sharding.tensors import to_device
from trainer.distributed.sharding.windows import Tile, Window, outputs_of, window_plan

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {2: F.avg_pool2d, 3: F.avg_pool3d}


def max_pool(
    x: torch.Tensor,
    domain: Domain,
    kernel_size: Sequence[int],
    stride: int | Sequence[int] | None = None,
    *,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, Domain]:
    """Return the maximum of each window, and its domain; kernel_size: one for each spatial dimension, the last of x.

    Raises:
        ValueError: sharded channels, a padding of more than half the window, or a window that does not fit.
    """
    dims, windows = _windows(x, domain, kernel_size, stride, padding, dilation, ceil_mode)
    shape, split = domain.shape(x), domain.split(dims)
    ways: dict[int, Way] = {
        d: partial(window_plan, window=w, within=True) if d in split else outputs_of(shape[d], w)
        for d, w in windows.items()
    }
    native = tuple(0 if dim in split else w.before for dim, w in windows.items())
    kernels, steps, gaps = zip(*((w.kernel, w.stride, w.dilation) for w in windows.values()), strict=True)

    def compute(part: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        for dim, tile in tiles.items():
            before, after = _outside(tile, windows[dim])
            if before or after:  # PyTorch's padding is no element, which minus infinity is too
                part = F.pad(part, [0, 0] * (part.ndim - 1 - dim) + [before, after], value=-torch.inf)
        return _MAX[len(dims)](part, kernels, steps, native, gaps, ceil_mode)

    return slide(x, domain, ways, compute)


def avg_pool(
    x: torch.Tensor,
    domain: Domain,
    kernel_size: Sequence[int],
    stride: int | Sequence[int] | None = None,
    *,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> tuple[torch.Tensor, Domain]:
    """Return the mean of each window, and its domain; kernel_size: one for each spatial dimension, the last of x.

    Raises:
        ValueError: sharded channels, a padding of more than half the window, or a window that does not fit.
    """
    dims, windows = _windows(x, domain, kernel_size, stride, padding, 1, ceil_mode)
    shape = domain.shape(x)

    def compute(part: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        total = _sums(part.to(wide(part.dtype)), len(dims), [*windows.values()])  # a sum may overflow in float16
        if divisor_override is not None:
            return (total / divisor_override).to(part.dtype)
        for dim, tile in tiles.items():
            margin = windows[dim].before * count_include_pad
            counts = _counts(tile.outputs, windows[dim], shape[dim] + margin, margin)
            if min(counts) == max(counts):
                total = total / counts[0]
            else:
                counts = to_device(torch.tensor(counts, dtype=total.dtype), total.device)
                total = total / counts.view(-1, *[1] * (total.ndim - 1 - dim))
        return total.to(part.dtype)

    return slide(x, domain, {d: partial(window_plan, window=w) for d, w in windows.items()}, compute)


def adaptive_avg_pool(
    x: torch.Tensor, domain: Domain, *, spatial: int | None = None, grad: str = "partial"
) -> tuple[torch.Tensor, Domain]:
    """Return the mean over all spatial dimensions of x: (N, C, *spatial), of size 1 each, whole on every rank.

    spatial: the number of spatial dimensions, which are the last ones; None: all but two. grad: placement of the
    gradient of the result, as of `domain_mean`.
    """
    first = 2 if spatial is None else x.ndim - spatial
    return domain_mean(x, domain, range(first, x.ndim), keepdim=True, grad=grad)


def adaptive_max_pool(
    x: torch.Tensor, domain: Domain, *, spatial: int | None = None, grad: str = "partial"
) -> tuple[torch.Tensor, Domain]:
    """Return the maximum over all spatial dimensions; as `adaptive_avg_pool`. Equal maxima share the gradient."""
    first = 2 if spatial is None else x.ndim - spatial
    return domain_max(x, domain, range(first, x.ndim), keepdim=True, grad=grad)


def _windows(
    x: torch.Tensor,
    domain: Domain,
    kernel_size: Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
) -> tuple[range, dict[int, Window]]:
    dims = spatial_dims(x, domain, len(kernel_size))
    options = (per_axis(option, dims) for option in (kernel_size if stride is None else stride, padding, dilation))
    windows = {}
    for dim, kernel, step, pad, gap in zip(dims, kernel_size, *options, strict=True):
        windows[dim] = Window(kernel, step, pad, pad, gap, ceil=ceil_mode)
        if 2 * pad > windows[dim].reach + 1:
            raise ValueError(f"a padding of {pad} is more than half of a window of {windows[dim].reach + 1} rows")
    return dims, windows


def _outside(tile: Tile, window: Window) -> tuple[int, int]:
    """Return how many rows before and after the rows of a tile its windows read, which are not in the axis."""
    first = tile.outputs[0] * window.stride - window.before
    last = (tile.outputs[1] - 1) * window.stride - window.before + window.reach + 1
    return tile.inputs[0] - first, last - tile.inputs[1]


def _counts(outputs: tuple[int, int], window: Window, end: int, margin: int) -> list[int]:
    """Return how many rows of [-margin, end) each window covers."""
    starts = (output * window.stride - window.before for output in range(*outputs))
    return [min(start + window.kernel, end) - max(start, -margin) for start in starts]


def _sums(x: torch.Tensor, spatial: int, windows: Sequence[Window]) -> torch.Tensor:
    kernels, steps = [w.kernel for w in windows], [w.stride for w in windows]
    if spatial == 1:  # the function for one dimension has no divisor
        return F.avg_pool2d(x.unsqueeze(-2), (1, *kernels), (1, *steps), divisor_override=1).squeeze(-2)
    return _AVERAGE[spatial](x, kernels, steps, divisor_override=1)

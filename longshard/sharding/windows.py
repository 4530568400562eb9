"""Sliding windows over a sharded axis, in integers: which rank computes which outputs, from which rows. Torch-free.

Output o of a convolution or a pooling reads the inputs o * stride - before + j * dilation for j in [0, kernel). The
rank that owns input row o * stride computes it, so that with stride 1 and n outputs of n inputs the layout stays. The
owner of the last row also computes the outputs behind the end:

    kernel 3, stride 2, padding 1; 9 rows as 5 + 4:   rank 0: rows 0 1 2 3 4      outputs 0 1 2, which read [-1, 6)
                                                      rank 1: rows 5 6 7 8        outputs 3 4, which read [5, 10)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Range, Wanted, union


class Window(NamedTuple):
    """A sliding window of one axis. extra: outputs beyond those that fit (output padding); ceil: as `ceil_mode`."""

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    extra: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """From the first row of a window to its last one."""
        return self.dilation * (self.kernel - 1)


class Tile(NamedTuple):
    """Outputs that are computed together, and the rows that they read; `inputs` may leave the axis."""

    outputs: Range
    inputs: Range


@dataclass(frozen=True)
class WindowPlan:
    """The layout of the outputs, and each rank's tiles, of which the wanted rows are the inputs."""

    layout: AxisLayout
    tiles: tuple[tuple[Tile, ...], ...]

    @property
    def wanted(self) -> Wanted:
        """The rows that each rank wants, tile after tile."""
        return tuple(tuple(tile.inputs for tile in tiles) for tiles in self.tiles)


def outputs_of(length: int, window: Window) -> int:
    """Return the number of outputs of a convolution or a pooling.

    Raises:
        ValueError: the window is longer than the padded axis.
    """
    free = length + window.before + window.after - window.reach - 1
    outputs = -(-free // window.stride) + 1 if window.ceil else free // window.stride + 1
    if window.ceil and (outputs - 1) * window.stride >= length + window.before:
        # as PyTorch: a window that starts in the padding behind the end is left out
        outputs -= 1
    if free < 0 or outputs < 1:
        raise ValueError(
            f"a window of {window.reach + 1} rows does not fit an axis of {length} rows with a padding of "
            f"{window.before} + {window.after}; use a smaller kernel or more padding"
        )
    return outputs


@lru_cache(maxsize=1024)
def window_plan(layout: AxisLayout, window: Window, *, within: bool = False) -> WindowPlan:
    """Return the plan of a convolution or a pooling; within: tiles read only rows of the axis, not its padding."""
    total = outputs_of(layout.length, window)
    step = window.stride

    def inputs(start: int, stop: int) -> Range:
        first = start * step - window.before
        last = (stop - 1) * step + window.reach + 1 - window.before
        return (max(first, 0), min(last, layout.length)) if within else (first, last)

    return plan_outputs(layout, total, lambda row: -(-row // step), inputs)


def transposed_outputs(length: int, window: Window) -> int:
    """Return the number of outputs of a transposed convolution.

    Raises:
        ValueError: no output is left.
    """
    outputs = (
        (length - 1) * window.stride
        - window.before
        - window.after
        + window.reach
        + window.extra
        + 1
    )
    if outputs < 1:
        raise ValueError(
            f"a transposed convolution of {length} rows leaves no output; use less padding"
        )
    return outputs


@lru_cache(maxsize=1024)
def transposed_plan(layout: AxisLayout, window: Window) -> WindowPlan:
    """Return the plan of a transposed convolution: input i adds to the outputs i * stride - before + j * dilation."""
    total = transposed_outputs(layout.length, window)
    step = window.stride

    def inputs(start: int, stop: int) -> Range:
        low = start + window.before
        # at most `low`, so that cutting needs no padding
        first = min(-(-(low - window.reach) // step), low // step)
        first = max(min(first, layout.length - 1), 0)
        last = min((stop - 1 + window.before) // step, layout.length - 1)
        return first, max(last, first) + 1

    return plan_outputs(layout, total, lambda row: row * step, inputs)


def plan_outputs(
    layout: AxisLayout,
    total: int,
    first_output: Callable[[int], int],
    inputs: Callable[[int, int], Range],
) -> WindowPlan:
    """Return the plan in which the owner of rows [a, b) computes outputs [first_output(a), first_output(b)).

    first_output: monotonic, 0 for row 0. inputs: the rows that outputs [start, stop) read.
    """
    tiles = []
    for ranges in layout.ranges:
        mine = []
        for a, b in ranges:
            start = min(first_output(a), total)
            stop = total if b == layout.length else min(first_output(b), total)
            if start < stop:
                mine.append(Tile((start, stop), inputs(start, stop)))
        tiles.append(tuple(mine))
    shards = tuple(union(tile.outputs for tile in mine) for mine in tiles)
    same = total == layout.length and shards == layout.ranges
    return WindowPlan(layout if same else AxisLayout(layout.name, total, shards), tuple(tiles))

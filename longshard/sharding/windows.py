"""Plan sliding windows over a sharded axis: which rank computes which outputs, from which rows. Torch-free.

Output o of a convolution or a pooling reads the inputs o * stride - before + j * dilation for j in [0, kernel). The
rank that owns input row o * stride computes it, so that with stride 1 and n outputs of n inputs the layout stays. The
owner of the last row also computes the outputs after the end:

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
    """A sliding window of one axis.

    Attributes:
        kernel: Number of rows that an output reads.
        stride: Distance of two windows, in rows.
        before: Rows of padding before the axis.
        after: Rows of padding after the axis.
        dilation: Distance of two rows of a window.
        extra: Outputs in addition to the ones that fit (output padding).
        ceil: Whether the number of outputs is rounded up, as with `ceil_mode`.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    extra: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """The distance from the first row of a window to its last row."""
        return self.dilation * (self.kernel - 1)

    def rows(self, start: int, stop: int) -> Range:
        """Return the rows that the outputs [start, stop) read; they may leave the axis.

        Args:
            start: The first output.
            stop: The end of the outputs.
        """
        first = start * self.stride - self.before
        return first, (stop - 1) * self.stride + self.reach + 1 - self.before


class Tile(NamedTuple):
    """Outputs that are computed together, and the rows that they read.

    Attributes:
        outputs: The outputs.
        inputs: The rows; they may leave the axis.
    """

    outputs: Range
    inputs: Range


@dataclass(frozen=True)
class WindowPlan:
    """The layout of the outputs, and the tiles of each rank.

    Attributes:
        layout: Which rank computes which outputs.
        tiles: For each rank, its tiles; the rank wants the rows of their `inputs`.
    """

    layout: AxisLayout
    tiles: tuple[tuple[Tile, ...], ...]

    @property
    def wanted(self) -> Wanted:
        """For each rank, the rows that it wants, tile after tile."""
        return tuple(tuple(tile.inputs for tile in tiles) for tiles in self.tiles)


@lru_cache(maxsize=1024)
def window_plan(layout: AxisLayout, window: Window, *, within: bool = False) -> WindowPlan:
    """Return the plan of a convolution or a pooling. The owner of row i * stride computes the output i.

    Args:
        layout: The layout of the inputs.
        window: The window.
        within: Whether to cut the inputs of each tile at the ends of the axis. The caller then adds the padding.

    Raises:
        ValueError: The window is longer than the padded axis.
    """
    length = layout.length
    step = window.stride
    free = length + window.before + window.after - window.reach - 1
    total = -(-free // step) + 1 if window.ceil else free // step + 1
    if window.ceil and (total - 1) * step >= length + window.before:
        # As PyTorch does: leave out a window that starts in the padding after the end.
        total -= 1
    if free < 0 or total < 1:
        raise ValueError(
            f"a window of {window.reach + 1} rows does not fit an axis of {length} rows with a padding "
            f"of {window.before} + {window.after}; use a smaller kernel or more padding"
        )

    def inputs(start: int, stop: int) -> Range:
        first, last = window.rows(start, stop)
        return (max(first, 0), min(last, length)) if within else (first, last)

    return plan_outputs(layout, total, lambda row: -(-row // step), inputs)


@lru_cache(maxsize=1024)
def transposed_plan(layout: AxisLayout, window: Window) -> WindowPlan:
    """Return the plan of a transposed convolution: input i adds to the outputs i * stride - before + j * dilation.

    The owner of input i computes the outputs [i * stride, (i + 1) * stride).

    Args:
        layout: The layout of the inputs.
        window: The window.

    Raises:
        ValueError: No output is left.
    """
    length = layout.length
    step = window.stride
    beyond = window.reach + window.extra - window.before - window.after
    total = (length - 1) * step + beyond + 1
    if total < 1:
        raise ValueError(
            f"a transposed convolution of {length} rows leaves no output; use less padding"
        )

    def inputs(start: int, stop: int) -> Range:
        low = start + window.before
        # at most `low`, so that cutting needs no padding
        first = min(-(-(low - window.reach) // step), low // step)
        first = max(min(first, length - 1), 0)
        last = min((stop - 1 + window.before) // step, length - 1)
        return first, max(last, first) + 1

    return plan_outputs(layout, total, lambda row: row * step, inputs)


def plan_outputs(
    layout: AxisLayout,
    total: int,
    first_output: Callable[[int], int],
    inputs: Callable[[int, int], Range],
) -> WindowPlan:
    """Return the plan in which the owner of the rows [a, b) computes the outputs [first_output(a), first_output(b)).

    The owner of the last row computes all outputs up to `total`, whatever `first_output` gives for the end.

    Args:
        layout: The layout of the inputs.
        total: Number of outputs.
        first_output: Function of a row; monotonic, 0 for row 0.
        inputs: Function of start and stop that returns the rows which the outputs [start, stop) read.
    """
    tiles = []
    for ranges in layout.ranges:
        rank_tiles = []
        for a, b in ranges:
            start = min(first_output(a), total)
            stop = total if b == layout.length else min(first_output(b), total)
            if start < stop:
                rank_tiles.append(Tile((start, stop), inputs(start, stop)))
        tiles.append(tuple(rank_tiles))
    shards = tuple(union(tile.outputs for tile in rank_tiles) for rank_tiles in tiles)
    # The same object, so that a comparison with the input's layout takes no time.
    is_same = total == layout.length and shards == layout.ranges
    return WindowPlan(
        layout if is_same else AxisLayout(layout.name, total, shards), tuple(tiles)
    )

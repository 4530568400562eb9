"""Short causal convolution over a sequence that many ranks share, as one operator, and the style that applies it.

Each range of tokens that a rank owns needs the kernel - 1 rows before it, from the ranks that own them:

    head_tail, 16 tokens on 2 ranks, kernel 4:   rank 0: [0, 4) [12, 16)   wants [9, 12) of rank 1, and zeros
                                                 rank 1: [4, 12)           wants [1, 4) of rank 0

In the backward each range needs the gradients of the kernel - 1 outputs after it. So nothing but the input is kept,
and forward and backward are one exchange each. As an operator it finds its plan by the handle (`live.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from longshard.context.live import resolve
from longshard.context.planning.options import ContextParallelError
from longshard.sharding.forward import replace_forward
from longshard.sharding.rows import Axis, fetch
from longshard.sharding.tensors import wide_type
from longshard.sharding.windows import Window, window_plan

Tiles = Sequence[tuple[int, int]]
"""(First row, number of outputs) of each tile, a run of outputs."""


@torch.library.custom_op("longshard::context_parallel_convolution", mutates_args=())
def context_parallel_convolution(
    x: Tensor,
    weight: Tensor,
    plan: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """Convolve each channel of this rank's rows with the rows before them; a collective over the plan's mesh.

    Rows before the sequence are zeros. The gradient of the weight is this rank's part.

    Args:
        x: (B, S, C), S this rank's rows.
        weight: (C, 1, kernel); the last tap multiplies the row itself.
        plan: The handle, (B,) int64.
        positions: (B, S), the position of each token in its document; taps before the document are zero. None if
            absent.

    Returns:
        (B, S, C).

    Raises:
        ContextParallelError: No context is open, or it did not cut the inputs.
    """
    kernel = weight.shape[2]
    rows, tiles = _fetched(x, x, plan, Window(kernel, before=kernel - 1))
    return convolved(rows, weight, positions, tiles)


@torch.library.custom_op("longshard::context_parallel_convolution_backward", mutates_args=())
def _context_parallel_convolution_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    plan: Tensor,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return dx, (B, S, C), and this rank's part of the gradient of the weight, not summed over ranks.

    A collective over the plan's mesh: gradients of other ranks' rows are fetched.
    """
    kernel = weight.shape[2]
    reach = None
    if positions is not None:
        # Positions of later rows are sent with their gradients, as one more channel; small numbers are exact.
        dout = torch.cat(
            (dout, positions.clamp(max=kernel - 1).unsqueeze(-1).to(dout.dtype)), -1
        )
    rows, tiles = _fetched(dout, x, plan, Window(kernel, after=kernel - 1))
    if positions is not None:
        rows, reach = rows[..., :-1], rows[..., -1]
    return gradients(rows, reach, x, weight, tiles)


def _fetched(rows: Tensor, x: Tensor, plan: Tensor, window: Window) -> tuple[Tensor, Tiles]:
    """Return the rows that this rank's windows read, tile after tile, and the tiles in them.

    A collective: rows of other ranks are fetched. Rows outside the sequence are zeros. A tile is (its first row among
    the returned rows, its number of outputs). If the sequence is empty, return `rows` and no tiles.

    rows: x, (B, S, C), or the gradient of the output, which may have one more channel.
    x: only its shape is checked; ContextParallelError if it is not the shape of this rank's rows.
    plan: the handle, (B,) int64.
    """
    live, _ = resolve(plan)
    axis = Axis(live.layout, live.mesh.get_group())
    if x.ndim != 3 or x.shape[1] != axis.rows:
        raise ContextParallelError(
            f"a context-parallel convolution got {tuple(x.shape)} and its plan has {axis.rows} rows for this rank; "
            "give (B, S, C), cut by naming the inputs in `context_parallel(buffers=...)`"
        )
    if not live.layout.length:
        return rows, []
    live.other_calls += 1
    windows = window_plan(live.layout, window)
    tiles = []
    first = 0
    for outputs, inputs in windows.tiles[axis.rank]:
        tiles.append((first, outputs[1] - outputs[0]))
        first += inputs[1] - inputs[0]
    return fetch(rows, axis, windows.wanted, 1), tiles


@context_parallel_convolution.register_fake
def _(x, weight, plan, positions=None):
    return x.new_empty(x.shape)


@_context_parallel_convolution_backward.register_fake
def _(dout, x, weight, plan, positions):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dout: Tensor):
    return *_context_parallel_convolution_backward(dout, *ctx.saved_tensors), None, None


context_parallel_convolution.register_autograd(_differentiate, setup_context=_save)


class ContextParallelConvolution(ParallelStyle):
    """Style that makes a short causal convolution read the rows of all ranks.

    The module's forward is `(x, weight, *, positions=None, plan=None)`, as for `context_parallel_convolution`. Inside
    `context_parallel(...)`, the model passes the context's `attention_plan` as `plan`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replace_forward(module, "context parallelism", _forward)
        return module


def _forward(
    x: Tensor,
    weight: Tensor,
    *,
    positions: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """Run as the forward of a parallelised module. If `plan` is None, raise ContextParallelError."""
    if plan is None:
        raise ContextParallelError(
            "this convolution is context parallel and got no plan; run the model inside `context_parallel(...)` and "
            "pass that context's `attention_plan` to its forward"
        )
    return context_parallel_convolution(x, weight, plan, positions)


# ---- Arithmetic


def convolved(rows: Tensor, weight: Tensor, reach: Tensor | None, tiles: Tiles) -> Tensor:
    """Return the convolution at the rows of all tiles, one after another: (B, S, C), in the type of `rows`.

    Sums are in float32 at least.

    Args:
        rows: (B, R, C); for one tile R is S + kernel - 1.
        weight: (C, 1, kernel).
        reach: (B, S), the number of earlier tokens in the document of each output; None if absent.
        tiles: The tiles.
    """
    last = weight.shape[2] - 1
    taps = weight.to(wide_type(rows.dtype)).squeeze(1).unbind(1)  # kernel x (C,)
    total = _tile_rows(rows, tiles, last) * taps[last]
    for tap in range(1, last + 1):
        total += _reached(_tile_rows(rows, tiles, last - tap), reach, tap) * taps[last - tap]
    return total.to(rows.dtype)


def gradients(
    rows: Tensor,
    reach: Tensor | None,
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, in its dtype, and the tiles' part of the gradient of the weight, in the weight's dtype.

    Sums are in float32 at least.

    Args:
        rows: The gradients of the outputs, (B, R, C).
        reach: (B, R), the number of earlier tokens in the document of each output, at most kernel - 1; None if absent.
        x: (B, S, C).
        weight: (C, 1, kernel).
        tiles: The tiles.
    """
    last = weight.shape[2] - 1
    dtype = wide_type(rows.dtype)
    dx = x.new_zeros(x.shape, dtype=dtype)
    taps = weight.to(dtype).squeeze(1).unbind(1)
    dweight = weight.new_zeros(weight.shape, dtype=dtype)
    for tap in range(last + 1):
        here = None if reach is None else _tile_rows(reach, tiles, tap)
        # the gradient of the output that read x with this tap
        dy = _reached(_tile_rows(rows, tiles, tap), here, tap)
        dx += dy * taps[last - tap]
        dweight[:, 0, last - tap] = (dy.to(dtype) * x).sum((0, 1))
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _tile_rows(rows: Tensor, tiles: Tiles, offset: int) -> Tensor:
    """Return the rows of all tiles, each from `offset` rows after its first row, one row for each of its outputs."""
    parts = [rows.narrow(1, first + offset, outputs) for first, outputs in tiles]
    if len(parts) > 1:
        return torch.cat(parts, 1)
    return parts[0] if parts else rows.narrow(1, 0, 0)


def _reached(rows: Tensor, reach: Tensor | None, tap: int) -> Tensor:
    """Return rows, (B, S, C), with zeros where a tap begins before its output's document."""
    return (
        rows if reach is None or tap == 0 else rows.masked_fill((reach < tap).unsqueeze(-1), 0)
    )

"""Arithmetic of a short depthwise convolution and of its gradients, on rows that are all here.

A tile is a run of outputs. The rows of a convolution hold for each tile its kernel - 1 rows before, then its own; the
rows of a gradient hold its own, then the kernel - 1 rows after. Tap j reads j rows before the output:

    y[t] = sum over j < kernel of weight[:, 0, kernel - 1 - j] * x[t - j], where reach[t] >= j

The last weight belongs to the row itself, as in a causal `F.conv1d`. reach: how many rows before a row count, at most
(the row's position in its document); None: all.
"""

from collections.abc import Sequence

import torch

Tiles = Sequence[tuple[int, int]]
"""(First row, number of outputs) of each tile."""


def convolved(rows: torch.Tensor, weight: torch.Tensor, reach: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
    """Return the convolution at the rows of all tiles, one after another: (B, S, C), as the rows.

    rows: (B, R, C), where R is S + kernel - 1 for one tile; weight: (C, 1, kernel); reach: (B, S). Sums are float32 at
    least.
    """
    last = weight.shape[2] - 1
    taps = weight.to(torch.promote_types(rows.dtype, torch.float32)).unbind(2)  # kernel x (C, 1)
    total = _of_tiles(rows, tiles, last) * taps[last].squeeze(1)
    for tap in range(1, last + 1):
        total += _reached(_of_tiles(rows, tiles, last - tap), reach, tap) * taps[last - tap].squeeze(1)
    return total.to(rows.dtype)


def gradients(
    rows: torch.Tensor, reach: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the tiles' own rows x (B, S, C), and their part of the gradient of the weight.

    rows: (B, R, C), gradients of the outputs; reach: (B, R), of these outputs.
    """
    last, dtype = weight.shape[2] - 1, torch.promote_types(rows.dtype, torch.float32)
    dx, taps = x.new_zeros(x.shape, dtype=dtype), weight.to(dtype).unbind(2)
    dweight = weight.new_zeros(weight.shape, dtype=dtype)
    for tap in range(last + 1):
        here = None if reach is None else _of_tiles(reach, tiles, tap)
        dy = _reached(_of_tiles(rows, tiles, tap), here, tap)  # of the output that read x by this tap
        dx += dy * taps[last - tap].squeeze(1)
        dweight[:, 0, last - tap] = (dy.to(dtype) * x).sum((0, 1))
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _of_tiles(rows: torch.Tensor, tiles: Tiles, offset: int) -> torch.Tensor:
    """Return as many rows as each tile has outputs, `offset` rows behind its first row."""
    parts = [rows.narrow(1, first + offset, outputs) for first, outputs in tiles]
    if len(parts) > 1:
        return torch.cat(parts, 1)
    return parts[0] if parts else rows.narrow(1, 0, 0)


def _reached(rows: torch.Tensor, reach: torch.Tensor | None, tap: int) -> torch.Tensor:
    """Return rows (B, S, C) with zeros where a tap begins before its output's document."""
    return rows if reach is None or tap == 0 else rows.masked_fill((reach < tap).unsqueeze(-1), 0)

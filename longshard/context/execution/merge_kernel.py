"""Merge a partial result into a running one by one kernel of Triton. It needs Triton, so import it late.

It reads both outputs and writes one: 10 bytes for each element of a bfloat16 part and a float32 total. Numbers of rows
and of heads, and the strides of log-sum-exps, are no part of the compiled code, so that other shapes do not recompile.
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32  # queries of one program of Triton
_ANY = (
    "total_lse",
    "lse",
    "heads",
    "rows",
    *(f"{name}_{axis}" for name in ("total_lse", "lse") for axis in "bhs"),
)


@triton.jit(do_not_specialize=_ANY)
def _merge(
    total_out, total_out_b, total_out_h, total_out_s,
    total_lse, total_lse_b, total_lse_h, total_lse_s,
    out, out_b, out_h, out_s,
    lse, lse_b, lse_h, lse_s,
    heads, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ROWS queries of one head of one sequence; `x_b`, `x_h` and `x_s` are the strides of x."""
    blocks = tl.cdiv(rows, ROWS)
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    # offsets can exceed 32 bits
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    s = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    real = s < rows
    total_lses = total_lse + b * total_lse_b + h * total_lse_h + s * total_lse_s
    old = tl.load(total_lses, mask=real, other=0.0)
    new = tl.load(lse + b * lse_b + h * lse_h + s * lse_s, mask=real, other=0.0)
    difference = new - old  # inf for a query that saw no key
    share = 1 / (1 + tl.exp(-difference))
    total_share = 1 / (1 + tl.exp(difference))
    real_2d = real[:, None] & (d < D)[None]
    totals = total_out + b * total_out_b + h * total_out_h + s[:, None] * total_out_s + d[None]
    parts = out + b * out_b + h * out_h + s[:, None] * out_s + d[None]
    total = tl.load(totals, mask=real_2d, other=0.0)
    part = tl.load(parts, mask=real_2d, other=0.0).to(total.dtype)
    tl.store(totals, total * total_share[:, None] + part * share[:, None], mask=real_2d)
    tl.debug_barrier()  # all warps have read the old log-sum-exps
    tl.store(
        total_lses, tl.maximum(old, new) + tl.log(1 + tl.exp(-tl.abs(difference))), mask=real
    )


def merge_by_triton(total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge as `merge_eagerly` does. The elements of a row of an output must lie one after another.

    Args:
        total_out: (B, H, S, D).
        total_lse: (B, H, S).
        out: (B, H, S, D).
        lse: (B, H, S).
    """
    b, heads, rows, d = out.shape
    strided = ((x, *x.stride()[:3]) for x in (total_out, total_lse, out, lse))
    arguments = [argument for pair in strided for argument in pair]
    _merge[(b * heads * triton.cdiv(rows, _ROWS),)](
        *arguments, heads, rows, D=d, BLOCK_D=triton.next_power_of_2(d), ROWS=_ROWS
    )

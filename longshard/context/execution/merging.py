"""Merge a partial result of attention into a running one, in place.

The weight of a part is its share of the sum of exponentials, sigmoid(lse - total_lse). Written out, there are two
operators over the output, which move 18 bytes for each element of a bfloat16 part and a float32 total, and six over
the log-sum-exp. On a GPU it is one kernel of Triton, which moves 10 bytes (`merge_kernel.py`).

State of the process: The types of devices on which the fused kernel failed. It is not tried there again.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger("longshard")
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], None]

_without_kernel: set[str] = set()  # types of devices on which the kernel failed


def merge(total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge the results of attention over other keys into a total, in place.

    If a query has seen no key yet, its total is output 0 and log-sum-exp -inf. `lse` must be finite: each query sees a
    key of the part. If the GPU kernel cannot be compiled, as without Triton, one warning says so. Then `merge_eagerly`
    is used.

    Args:
        total_out: The total output, (B, H, S, D), in float32 at least.
        total_lse: The total log-sum-exp, (B, H, S), in float32 at least.
        out: The output of the part, (B, H, S, D).
        lse: The log-sum-exp of the part, (B, H, S).
    """
    device = total_out.device.type
    if device == "cuda" and device not in _without_kernel:
        try:
            fused_merge()(total_out, total_lse, out, lse)
        except Exception as error:
            # A compiler may raise anything; nothing is written before the kernel runs.
            _without_kernel.add(device)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            logger.warning(
                f"partial results of attention are merged without a fused kernel ({reason})"
            )
        else:
            return
    merge_eagerly(total_out, total_lse, out, lse)


def merge_eagerly(total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge as `merge` does, by operators of PyTorch.

    Args:
        total_out: (B, H, S, D).
        total_lse: (B, H, S).
        out: (B, H, S, D).
        lse: (B, H, S).
    """
    difference = lse - total_lse
    total_out.mul_(torch.sigmoid(-difference).unsqueeze(-1)).addcmul_(
        out, torch.sigmoid(difference).unsqueeze(-1)
    )
    total_lse.copy_(torch.logaddexp(total_lse, lse))


def fused_merge() -> Merge:
    """Return the fused kernel.

    Raises:
        ImportError: Triton is not installed.
    """
    from longshard.context.execution.merge_kernel import merge_by_triton

    return merge_by_triton

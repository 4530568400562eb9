"""The merging of a partial result of attention into a running one, in place.

The weight of a part is its share of the sum of exponentials, sigmoid(lse - total_lse). Written out, there are two
operators over the output, which move 18 bytes for each element of a bfloat16 part and a float32 total, and six over
the log-sum-exp. On a GPU it is one kernel of Triton, which moves 10 bytes (`merge_kernel.py`).
"""

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger("longshard")
Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

_without_kernel: set[str] = set()  # types of devices on which the kernel failed


def merge(
    total_out: torch.Tensor, total_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge the results of attention over other keys into a total, in place.

    total_out, out: (B, H, S, D); total_lse, lse: (B, H, S). Totals are in float32 at least. The total of a query that
    saw no key yet is output 0 and log-sum-exp -inf; in the part every query sees a key. Where the kernel of GPUs cannot
    be compiled, as without Triton, one warning says so, and `merge_eagerly` does it from then on.
    """
    device = total_out.device.type
    if device == "cuda" and device not in _without_kernel:
        try:
            fused_merge()(total_out, total_lse, out, lse)
        except Exception as error:
            # whatever a compiler raises; nothing is written before the kernel runs
            _without_kernel.add(device)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            logger.warning(
                f"partial results of attention are merged without a fused kernel ({reason})"
            )
        else:
            return
    merge_eagerly(total_out, total_lse, out, lse)


def merge_eagerly(
    total_out: torch.Tensor, total_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Do what `merge` does by operators of PyTorch."""
    more = lse - total_lse
    total_out.mul_(torch.sigmoid(-more).unsqueeze(-1)).addcmul_(
        out, torch.sigmoid(more).unsqueeze(-1)
    )
    total_lse.copy_(torch.logaddexp(total_lse, lse))


def fused_merge() -> Merge:
    """Return the fused kernel.

    Raises:
        ImportError: Triton is not installed.
    """
    from longshard.context.execution.merge_kernel import merge_by_triton

    return merge_by_triton

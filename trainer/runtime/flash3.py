"""FlashAttention-3 in place of FlashAttention-2 behind PyTorch's flash operators, in the whole process.

PyTorch (`torch.nn.attention.activate_flash_attention_impl`, since 2.11) replaces the operators that the kernels
`cuda_flash` and `varlen` and `F.scaled_dot_product_attention` call. FlashAttention-3 (arXiv 2407.08608) takes the same
arguments, without dropout, which attention does not have here. It runs on compute capability 9.x only.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention import activate_flash_attention_impl

logger = logging.getLogger("trainer")
_PACKAGE = "flash_attn_interface"


@cache
def flash3() -> bool:
    """Return whether FlashAttention-3 is behind the flash operators of this process; the first call activates it."""
    return activated(gpu_capability(), deterministic=torch.are_deterministic_algorithms_enabled())


def gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of the current GPU of NVIDIA; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() and torch.version.cuda else None


def activated(
    capability: tuple[int, int] | None,
    *,
    deterministic: bool,
    installed: Callable[[], bool] = lambda: importlib.util.find_spec(_PACKAGE) is not None,
    activate: Callable[[str], None] = activate_flash_attention_impl,
) -> bool:
    """Activate FlashAttention-3 if the GPU is a Hopper and the package is installed; return whether it is active.

    deterministic: then it stays off, because its determinism is untested. A package that is installed and cannot be
    used is one warning.
    """
    if capability is None or capability[0] != 9 or deterministic or not installed():
        return False
    try:
        activate("FA3")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logger.warning(f"{_PACKAGE} is installed and cannot be used ({error}); FlashAttention-2 is used")
        return False
    logger.info(f"FlashAttention-3 ({_PACKAGE}) computes the kernels cuda_flash and varlen")
    return True

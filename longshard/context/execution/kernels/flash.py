"""FlashAttention-3 or -4 instead of FlashAttention-2 behind PyTorch's flash operators, in the whole process.

PyTorch (`torch.nn.attention.activate_flash_attention_impl`, since 2.11) replaces the operators that the kernels
`cuda_flash` and `varlen` and `F.scaled_dot_product_attention` call. FlashAttention-3 (arXiv 2407.08608) and -4 take the
same arguments, without dropout, which attention does not have here.

State of the process: FlashAttention-3 or -4 behind PyTorch's flash operators, on Hopper and Blackwell if a package is
installed; for ever.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

from longshard.context.execution.kernels.base import BackwardInputs
from longshard.context.execution.kernels.cuda import Varlen
from longshard.context.planning.capabilities import FLASH_PACKAGES, FlashPackage
from longshard.context.planning.lowering import Call, Launch
from longshard.context.planning.mask import Relation

logger = logging.getLogger("longshard")


@cache
def newer_flash(head_dim: int) -> FlashPackage | None:
    """Return the package behind the flash operators of this process; None for FlashAttention-2.

    The first call activates a package. The package depends on the GPU and on deterministic algorithms.

    Args:
        head_dim: Size of a head. A package that cannot compute this size is passed over.
    """
    return activated(
        gpu_capability(), head_dim, deterministic=torch.are_deterministic_algorithms_enabled()
    )


def gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of the current NVIDIA GPU; None on other GPUs and on CPUs."""
    return (
        torch.cuda.get_device_capability()
        if torch.cuda.is_available() and torch.version.cuda
        else None
    )


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing it; its parent packages are imported.

    If a parent is missing, return False. If the import of a parent fails, for example because a module that it needs is
    missing, return True, so that a later import shows the error.

    Args:
        module: The name of the module.
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        return not f"{module}.".startswith(f"{error.name}.")
    except ImportError:
        return True


def usable(
    capability: tuple[int, int] | None,
    *,
    deterministic: bool,
    installed: Callable[[str], bool] = is_installed,
) -> list[FlashPackage]:
    """Return the packages that are installed, known to this PyTorch and able to run on a GPU, the preferred one first.

    Args:
        capability: The compute capability of the GPU. If it is None, the list is empty.
        deterministic: Whether results must be the same bits each time. Then the list is empty, because this is untested
            with the packages.
        installed: Returns whether a module is installed.
    """
    if capability is None or deterministic:
        return []
    known = list_flash_attention_impls()
    return [
        package
        for package in FLASH_PACKAGES
        if package.implementation in known
        and package.runs_on(capability)
        and installed(package.module)
    ]


def try_out(head_dim: int, device: str = "cuda", ops: Any = torch.ops.aten) -> None:
    """Check that the active package computes ragged attention of grouped heads in a window, forward and backward.

    Versions of a package differ in what they can compute. The values are not compared with a reference.

    Args:
        head_dim: Size of a head.
        device: The device.
        ops: The operators.

    Raises:
        RuntimeError: A gradient is not finite.
        Exception: Any error that the package raises.
    """
    q, k = (
        torch.ones(1, heads, 256, head_dim, dtype=torch.bfloat16, device=device)
        for heads in (2, 1)
    )
    spans = ((0, 100), (0, 164)), ((100, 256), (36, 256))
    launch = Launch(tuple(Call(*span, Relation.BI_CAUSAL, fresh=True) for span in spans))
    kernel = Varlen(ops)
    out, lse = kernel.forward_many(q, k, k, launch, scale=1.0)
    for gradient in kernel.backward_many(
        BackwardInputs(out, q, k, k, out, lse), launch, scale=1.0
    ):
        if not gradient.isfinite().all():
            raise RuntimeError("gradients of ragged attention in a window are not finite")


def activated(
    capability: tuple[int, int] | None,
    head_dim: int,
    *,
    deterministic: bool,
    installed: Callable[[str], bool] = is_installed,
) -> FlashPackage | None:
    """Activate the first usable package that passes `try_out`, for the whole process.

    Each package that fails is left out with one warning.

    Args:
        capability: The compute capability of the GPU; None if there is no GPU.
        head_dim: Size of a head.
        deterministic: Whether results must be the same bits each time.
        installed: Returns whether a module is installed.

    Returns:
        The package; None if there is none, and PyTorch's own implementation stays active.
    """
    for package in usable(capability, deterministic=deterministic, installed=installed):
        try:
            activate_flash_attention_impl(package.implementation)
            try_out(head_dim)
        except Exception as error:
            # A package may raise anything, such as assertions or errors of a compiler.
            if current_flash_attention_impl() is not None:
                restore_flash_attention_impl()
            reason = str(error).partition("\n")[0] or type(error).__name__
            logger.warning(
                f"{package.module} is installed and cannot be used ({reason}); {package.name} is left out"
            )
            continue
        logger.info(
            f"{package.name} ({package.module}) computes the kernels cuda_flash and varlen"
        )
        return package
    return None

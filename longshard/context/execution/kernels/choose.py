"""All kernels by name, and the choice among them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from longshard.context.execution.kernels.base import Kernel
from longshard.context.execution.kernels.cpu import CpuFlash, Math
from longshard.context.execution.kernels.cuda import (
    CudaFlash,
    Cudnn,
    CudnnVarlen,
    Efficient,
    Varlen,
)
from longshard.context.execution.kernels.flash import gpu_capability, newer_flash
from longshard.context.execution.kernels.head_groups import HeadGroups
from longshard.context.execution.merging import Merge, merge
from longshard.context.planning.capabilities import (
    FlashPackage,
    able_kernels,
    auto_kernel,
    kernel_words,
)

logger = logging.getLogger("longshard")
CUDA_KERNELS: tuple[Kernel, ...] = tuple(
    HeadGroups(kernel)
    for kernel in (CudaFlash(), Efficient(), Cudnn(), Varlen(), CudnnVarlen())
)
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Math())
}


@dataclass(frozen=True)
class GpuKernels:
    """The kernels that depend on the GPUs of this process. `lct estimate` passes the kernels of absent GPUs.

    Attributes:
        newer_flash: Returns the package behind the flash operators, for a size of heads; None for FlashAttention-2.
        merge: Adds a partial result to a total.
    """

    newer_flash: Callable[[int], FlashPackage | None] = newer_flash
    merge: Merge = merge


GPU_KERNELS = GpuKernels()


class KernelNeeds(NamedTuple):
    """What attention needs of a kernel, in addition to the device, the data type and the size of heads."""

    bands: bool = False
    """Whether the mask has a lower bound."""
    calls: int = 1
    """The largest number of tiles of a stage."""
    fixed: bool = False
    """Whether the mask is causal or full, with the same lengths in every step."""
    softcap: float = 0.0
    """The soft-cap of the scores; 0 means none."""
    largest: int = 0
    """The shortest side of the largest tile, see `auto_kernel`."""


NO_NEEDS = KernelNeeds()


def choose_kernel(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    name: str = "auto",
    needs: KernelNeeds = NO_NEEDS,
    *,
    gpu: GpuKernels = GPU_KERNELS,
) -> Kernel:
    """Return the named kernel; for `auto`, the kernel that `auto_kernel` chooses. On a GPU, each new choice is logged.

    Args:
        device_type: The type of the device.
        dtype: The type of queries, keys and values.
        head_dim: Size of a head.
        name: The name of a kernel, or `auto`.
        needs: What the attention needs.
        gpu: The GPU kernels of this process.

    Raises:
        OptionError: The named kernel cannot compute it; the message names kernels that can.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    able = able_kernels(
        name,
        device_type,
        str(dtype).removeprefix("torch."),
        head_dim,
        bands=needs.bands,
        deterministic=deterministic,
        softcap=bool(needs.softcap),
    )
    on_gpu = device_type == "cuda"
    capability, package = (
        (gpu_capability(), gpu.newer_flash(head_dim)) if on_gpu else (None, None)
    )
    chosen = name
    if name == "auto":
        chosen = auto_kernel(
            able,
            needs.calls,
            capability=capability,
            fixed=needs.fixed,
            newer_flash=package is not None,
            largest=needs.largest,
        )
    if capability is not None:
        _log_once(kernel_words(chosen, capability, package, deterministic=deterministic))
    return Math(needs.softcap) if needs.softcap else KERNELS[chosen]


@cache
def _log_once(words: str) -> None:
    logger.info(words)

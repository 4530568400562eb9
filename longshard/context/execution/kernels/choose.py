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
    """The kernels that depend on the GPUs of this process. `lct estimate` passes the kernels of absent GPUs."""

    newer_flash: Callable[[int], FlashPackage | None] = newer_flash
    merge: Merge = merge


GPU_KERNELS = GpuKernels()


class KernelNeeds(NamedTuple):
    """What attention asks of a kernel, beside the device, the data type and the size of heads."""

    bands: bool = False
    """Whether the mask has a lower bound."""
    calls: int = 1
    """The most tiles of a stage."""
    fixed: bool = False
    """Whether the mask is causal or full, with the same lengths in every step."""
    softcap: float = 0.0
    """Of the scores, 0 for none."""
    largest: int = 0
    """See `auto_kernel`."""


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
    """Return the kernel of that name, or for `auto` the kernel that `auto_kernel` chooses on this machine.

    The first choice of a kernel on a GPU is logged.

    Raises:
        OptionError: the named kernel cannot do it; the message names kernels that can.
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

"""All kernels by name, and the choice among them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

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
    """The kernels that depend on the GPUs of this process. `lct estimate` has those of GPUs that are not there."""

    newer_flash: Callable[[int], FlashPackage | None] = newer_flash
    merge: Merge = merge


GPU_KERNELS = GpuKernels()


def choose_kernel(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    name: str = "auto",
    *,
    bands: bool = False,
    calls: int = 1,
    fixed: bool = False,
    softcap: float = 0.0,
    largest: int = 0,
    gpu: GpuKernels = GPU_KERNELS,
) -> Kernel:
    """Return the kernel of that name, or for `auto` the kernel that `auto_kernel` chooses on this machine.

    bands: whether the mask has a lower bound; calls: the most tiles of a stage; fixed: whether the mask is causal or
    full, with the same lengths in every step; softcap: of the scores, 0 for none; largest: see `auto_kernel`. The first
    choice of a kernel on a GPU is logged.

    Raises:
        OptionError: the named kernel cannot do it; the message names kernels that can.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    kind = device_type, str(dtype).removeprefix("torch."), head_dim
    able = able_kernels(
        name, *kind, bands=bands, deterministic=deterministic, softcap=bool(softcap)
    )
    on_gpu = device_type == "cuda"
    capability, package = (
        (gpu_capability(), gpu.newer_flash(head_dim)) if on_gpu else (None, None)
    )
    machine = {"capability": capability, "newer_flash": package is not None}
    chosen = auto_kernel(able, calls, fixed=fixed, largest=largest, **machine)
    chosen = chosen if name == "auto" else name
    if capability is not None:
        _log_once(kernel_words(chosen, capability, package, deterministic=deterministic))
    return Math(softcap) if softcap else KERNELS[chosen]


@cache
def _log_once(words: str) -> None:
    logger.info(words)

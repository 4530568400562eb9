"""All kernels by name, and the choice among them."""

import torch

from trainer.distributed.context_parallel.execution.kernels.base import Kernel
from trainer.distributed.context_parallel.execution.kernels.cpu import CpuFlash, Math
from trainer.distributed.context_parallel.execution.kernels.cuda import CudaFlash, Cudnn, Efficient, Varlen
from trainer.distributed.context_parallel.execution.kernels.flex import Flex
from trainer.distributed.context_parallel.planning.capabilities import able_kernels, auto_kernel
from trainer.runtime.flash3 import flash3, gpu_capability

CUDA_KERNELS: tuple[Kernel, ...] = (CudaFlash(), Efficient(), Cudnn(), Varlen(), Flex())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Math())}


def choose_kernel(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    name: str = "auto",
    *,
    bands: bool = False,
    calls: int = 1,
    fixed: bool = False,
) -> Kernel:
    """Return the kernel of that name, or for `auto` the kernel that `auto_kernel` chooses on this machine.

    bands: whether the mask has a lower bound; calls: the most tiles of a stage; fixed: whether the mask is causal or
    full, with the same lengths in every step.

    Raises:
        ConfigError: the named kernel cannot do it; the message names kernels that can.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    kind = device_type, str(dtype).removeprefix("torch."), head_dim
    able = able_kernels(name, *kind, bands=bands, deterministic=deterministic)
    on_gpu = device_type == "cuda"
    capability, has_flash3 = (gpu_capability(), flash3()) if on_gpu else (None, False)
    chosen = auto_kernel(able, calls, capability=capability, fixed=fixed, flash3=has_flash3)
    return KERNELS[chosen if name == "auto" else name]

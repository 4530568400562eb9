"""All kernels by name, and the choice among them."""

import torch

from trainer.distributed.context_parallel.kernels.base import Kernel
from trainer.distributed.context_parallel.kernels.cpu import CpuFlash, Math
from trainer.distributed.context_parallel.kernels.cuda import CudaFlash, Cudnn, Efficient, Varlen
from trainer.distributed.context_parallel.kernels.flex import Flex
from trainer.distributed.context_parallel.lowering import able_kernels

CUDA_KERNELS: tuple[Kernel, ...] = (CudaFlash(), Efficient(), Cudnn(), Varlen(), Flex())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Math())}


def choose_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, name: str = "auto", *, bands: bool = False
) -> Kernel:
    """Return the kernel of that name, or with `auto` the first that can do it; bands: a sliding window is used.

    Raises:
        ConfigError: a kernel that cannot do it; the sentence names those that can.
    """
    able = able_kernels(name, device_type, str(dtype).removeprefix("torch."), head_dim, bands=bands)
    return KERNELS[able[0] if name == "auto" else name]

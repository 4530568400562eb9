"""All kernels by name, and the choice among them."""

import torch

from trainer.distributed.context_parallel.execution.kernels.base import Kernel
from trainer.distributed.context_parallel.execution.kernels.cpu import CpuFlash, Math
from trainer.distributed.context_parallel.execution.kernels.cuda import CudaFlash, Cudnn, Efficient, Varlen
from trainer.distributed.context_parallel.execution.kernels.flex import Flex
from trainer.distributed.context_parallel.planning.capabilities import able_kernels, auto_kernel

CUDA_KERNELS: tuple[Kernel, ...] = (CudaFlash(), Efficient(), Cudnn(), Varlen(), Flex())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Math())}


def choose_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, name: str = "auto", *, bands: bool = False, calls: int = 1
) -> Kernel:
    """Return the kernel of that name, or for `auto` the kernel that `auto_kernel` chooses.

    bands: whether the mask has a lower bound; calls: the most tiles of a stage.

    Raises:
        ConfigError: the named kernel cannot do it; the message names kernels that can.
    """
    able = able_kernels(name, device_type, str(dtype).removeprefix("torch."), head_dim, bands=bands)
    return KERNELS[auto_kernel(able, calls) if name == "auto" else name]

"""The machine of a rank, as a job sees it, apart from PyTorch's tensors and groups."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from longshard.context.execution.kernels.choose import GPU_KERNELS, GpuKernels
from trainer.runtime.host_memory import page_locked_like, system_memory_like


class Machine:
    """Regions of time, host memory, and kernels of GPUs. `lct estimate` replaces it by a simulated machine."""

    gpu: GpuKernels = GPU_KERNELS

    def region(self, name: str) -> AbstractContextManager[Any]:
        """Return a context for a part of the step, which has this name in profiles.

        Args:
            name: The name in profiles.
        """
        return record_function(name)

    def host_like(self, tensor: Tensor, device_type: str, key: str) -> Tensor:
        """Return zeroed host memory with the shape, strides and dtype of a tensor.

        For a GPU the memory is page-locked; otherwise copies would not overlap.

        Args:
            tensor: A tensor of any shape.
            device_type: The device type of the job.
            key: The setting that asks for the memory, for the message.

        Raises:
            MemoryError: The system does not lock this amount of memory.
        """
        if device_type != "cuda":
            return system_memory_like(tensor)
        return page_locked_like(
            tensor, key, "offload less (activation_checkpoint.offload_fraction)"
        )


MACHINE = Machine()

"""The machine of a rank, as a job sees it beside PyTorch's tensors and groups."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import record_function

from longshard.context.execution.kernels.choose import GPU_KERNELS, GpuKernels
from trainer.runtime.host_memory import page_locked_like, system_memory_like


class Machine:
    """Regions of time, host memory, and kernels of GPUs. `lct estimate` has a machine that is not there."""

    gpu: GpuKernels = GPU_KERNELS

    def region(self, name: str) -> AbstractContextManager[Any]:
        """Enter a part of the step, which has its name in profiles."""
        return record_function(name)

    def host_like(self, tensor: torch.Tensor, device_type: str, key: str) -> torch.Tensor:
        """Return host memory for a tensor, page-locked for a GPU, without which copies do not overlap.

        key: the setting that asks for the memory, for the message.

        Raises:
            MemoryError: the system does not lock so much.
        """
        if device_type != "cuda":
            return system_memory_like(tensor)
        return page_locked_like(
            tensor, key, "offload less (activation_checkpoint.offload_fraction)"
        )


MACHINE = Machine()

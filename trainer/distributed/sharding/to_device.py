"""The way of small tensors from the host to the device."""

import torch


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `x`, in host memory, on a device.

    A GPU reads it from pinned memory by itself: the host neither waits for the kernels before the copy, nor for it.
    """
    if device.type != "cuda" or x.device.type != "cpu" or torch.compiler.is_compiling():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)

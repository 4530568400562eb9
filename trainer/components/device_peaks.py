"""The peak speed of a device, and the peak memory of this process."""

import resource
import sys

import torch

# Dense bfloat16 peak of one device in FLOP/s, from data sheets; the first name that the device's name contains counts.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI325X": 1300e12,
    "MI300X": 1300e12,
    "MI250X": 191.5e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device for matrix products. None if it is not known, as for all dtypes but bfloat16.

    Args:
        device: The device.
        dtype: Dtype of the products.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process, in GiB: allocated on its GPU, or resident.

    Args:
        device: The device of the run.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # ru_maxrss: bytes there, KiB here
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

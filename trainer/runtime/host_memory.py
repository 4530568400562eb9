"""Host memory of the system, page-locked for a GPU."""

import mmap
import weakref

import torch
from torch import Tensor


def page_locked_like(tensor: Tensor, key: str, advice: str) -> Tensor:
    """Return zeroed, page-locked host memory for a tensor. It stays locked as long as the returned object lives.

    It is allocated by the system: PyTorch's allocator of page-locked memory takes the next power of two.

    Args:
        tensor: A tensor of any shape; its shape, strides and dtype are used.
        key: The setting that asks for the memory, for the message.
        advice: How the user can avoid this memory, for the message.

    Raises:
        MemoryError: The system does not lock this amount of memory.
    """
    buffer = system_memory_like(tensor)
    if size := tensor.nbytes:
        runtime = torch.cuda.cudart()
        place = buffer.data_ptr()
        if error := int(runtime.cudaHostRegister(place, size, 0)):
            raise MemoryError(
                f"{key} cannot lock {size:,} more bytes of host memory (CUDA error {error}); "
                f"give the job more host memory (limit of the container, or ulimit -l), or {advice}"
            )
        weakref.finalize(buffer, runtime.cudaHostUnregister, place).atexit = False
    return buffer


def system_memory_like(tensor: Tensor) -> Tensor:
    """Return zeroed host memory for a tensor, with its shape, dtype and order of elements.

    Args:
        tensor: A tensor of any shape.
    """
    size = tensor.nbytes
    flat = torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)
    # A transposed tensor stays transposed, so that the recomputation sums in the same order.
    strides = torch.empty_like(tensor, device="meta").stride()
    return flat[:size].view(tensor.dtype).as_strided(tensor.shape, strides)

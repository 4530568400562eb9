"""A hash of tensors, by which ranks compare what they have."""

import hashlib
from collections.abc import Mapping

import torch


def content_hash(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a 63-bit hash of names, shapes and bytes, the same in every process."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        # A copy, because `numpy()` would fix the size of the tensor's memory. Bytes, because numpy lacks some types.
        tensor = tensors[name].detach().to("cpu", copy=True).contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy())
    return int.from_bytes(digest.digest(), "little") >> 1

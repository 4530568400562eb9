"""Bytes of tensors that are sent side by side."""


def aligned(size: int) -> int:
    """Return the bytes that a tensor takes in a row of an all-to-all of tensors of several types."""
    return -(-size // 16) * 16

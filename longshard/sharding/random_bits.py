"""Random bits of numbered elements: a hash of a key and the element's number, so that no layout changes them."""

import hashlib

from torch import Tensor


def parameter_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed for one parameter, or another name; the same on every machine.

    Args:
        seed: The seed of the run.
        name: The name of the parameter.
    """
    return (
        int.from_bytes(
            hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big"
        )
        >> 1
    )


def random_bits(indices: Tensor, key: Tensor | int) -> Tensor:
    """Return 64 random bits for each index, any shape, int64. The result overwrites `indices`.

    This is SplitMix64 (Steele, Lea and Flood, 2014) with the state key + index * constant. Products wrap around.

    Args:
        indices: The numbers of the elements, any shape, int64.
        key: The key of the hash, a scalar.
    """
    bits = indices.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        shifted = (bits >> shift).bitwise_and_(
            (1 << (64 - shift)) - 1
        )  # without the sign bits that `>>` repeats
        bits.bitwise_xor_(shifted).mul_(_signed(factor))
    return bits


def _signed(number: int) -> int:
    """Return the signed integer of the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number

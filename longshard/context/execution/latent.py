"""Keys and values that are computed from a latent, on the rank whose tile needs them (DeepSeek-V2, arXiv 2405.04434).

Ranks send each other latents. A token's latent has W = R + P numbers for all heads, c and the rotated r:

    k_h = [ up_h[:N] c | r ]        v_h = up_h[N:] c        with up_h (N + V, R) of a head

For DeepSeek-V3 these are 576 numbers instead of 40,960 for 128 heads. Gradients are sent as gradients of latents, and
each rank has its own part of the gradient of `up`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

EXPANDED_BYTES = 1 << 30
"""The most bytes of keys and values that are computed at a time. At least one head is computed at a time."""


def value_dim(q: Tensor, latent: Tensor, up: Tensor) -> int:
    """Return V.

    Args:
        q: The queries, (B, H, S, N + P).
        latent: The latents, (..., T, R + P).
        up: (H, N + V, R).
    """
    return up.shape[1] + latent.shape[-1] - up.shape[2] - q.shape[3]


def expanded(latent: Tensor, up: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Return keys, (B, H, T, N + P), and values, (B, H, T, V).

    Args:
        latent: The latents, (B, 1, T, R + P).
        up: (H, N + V, R).
        key_dim: N + P.
    """
    compressed, rotated = latent.split([up.shape[2], latent.shape[3] - up.shape[2]], -1)
    keys_values = compressed @ up.mT
    unrotated = key_dim - rotated.shape[3]
    k, v = keys_values.split([unrotated, up.shape[1] - unrotated], -1)
    return torch.cat((k, rotated.expand(-1, k.shape[1], -1, -1)), -1), v


def absorbed(q: Tensor, latent: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries of latents, (B, H, S, R + P), and the factors that make values of summed latents, (H, R, V).

    Scores and sums are the same as with expanded keys and values, which are not made: this costs less for few queries
    over many latents.

    Args:
        q: The queries, (B, H, S, N + P).
        latent: The latents, (B, 1, T, R + P).
        up: (H, N + V, R).
    """
    rotated = latent.shape[3] - up.shape[2]
    kept, turned = q.split([q.shape[3] - rotated, rotated], -1)
    up_keys, up_values = up.split([kept.shape[3], up.shape[1] - kept.shape[3]], 1)
    return torch.cat((kept @ up_keys, turned), -1), up_values.mT


class Expansion:
    """The expansion in one call of attention, and in the backward the gradient of `up`, (H, N + V, R).

    Args:
        up: (H, N + V, R).
        key_dim: N + P.
        sum_dtype: The type in which gradients are added up; None in a forward.
    """

    def __init__(self, up: Tensor, key_dim: int, sum_dtype: torch.dtype | None = None) -> None:
        self._up = up
        self._key_dim = key_dim
        self.gradient = None if sum_dtype is None else torch.zeros_like(up, dtype=sum_dtype)

    def groups(self, latent: Tensor) -> Iterator[slice]:
        """Return the slices of heads that are expanded at a time: at most `EXPANDED_BYTES`, at least one head.

        Args:
            latent: The latents, (B, 1, T, W).
        """
        heads, rows, _ = self._up.shape
        head_bytes = max(latent.shape[0] * latent.shape[2] * rows * latent.itemsize, 1)
        size = max(EXPANDED_BYTES // head_bytes, 1)
        return (slice(start, min(start + size, heads)) for start in range(0, heads, size))

    def keys(self, latent: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of some heads, (B, h, T, N + P) each; values are filled up with zeros.

        Args:
            latent: The latents, (B, 1, T, W).
            heads: The heads.
        """
        k, v = expanded(latent, self._up[heads], self._key_dim)
        return k, self.filled(v)

    def filled(self, x: Tensor) -> Tensor:
        """Return values or outputs with zeros up to the size of keys: kernels take one size for both.

        Args:
            x: Values or outputs, (B, h, T, V).
        """
        return F.pad(x, (0, self._key_dim - x.shape[3]))

    def add(
        self,
        dk: Tensor,
        dv: Tensor,
        latent: Tensor,
        heads: slice,
        dlatent: Tensor,
    ) -> None:
        """Add the gradients of keys and values of some heads to the gradients of the latent and of `up`.

        Products are in the type of `up`, as in a linear module.

        Args:
            dk: The gradients of keys, (B, h, T, N + P).
            dv: The gradients of values, (B, h, T, N + P). Only the first V columns count.
            latent: The latents, (B, 1, T, W).
            heads: The heads.
            dlatent: The gradients of the latents, (B, 1, T, W), which are changed.
        """
        up = self._up[heads]
        rank = up.shape[2]
        unrotated = dk.shape[3] - (latent.shape[3] - rank)
        # (B, H, T, N + V)
        gradient = torch.cat((dk[..., :unrotated], dv), -1)[..., : up.shape[1]].to(up.dtype)
        by_token = gradient.transpose(1, 2).flatten(2)  # (B, T, H * (N + V))
        dlatent[:, 0, :, :rank] += by_token @ up.flatten(0, 1)
        dlatent[:, 0, :, rank:] += dk[..., unrotated:].sum(1)
        compressed = latent[:, 0, :, :rank].flatten(0, 1)
        self.gradient[heads] += (by_token.flatten(0, 1).mT @ compressed).view(up.shape)

"""Keys and values that are computed from a latent, on the rank whose tile needs them (DeepSeek-V2, arXiv 2405.04434).

Ranks send each other latents. A token's latent has W = R + P numbers for all heads, c and the rotated r:

    k_h = [ up_h[:N] c | r ]        v_h = up_h[N:] c        with up_h (N + V, R) of a head

For DeepSeek-V3 that is 576 numbers in the place of 128 heads' 40,960. Gradients are sent as gradients of latents, and
each rank has its own part of that of `up`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

EXPANDED_BYTES = 1 << 30
"""Keys and values of so many heads are computed at a time that they take at most so much; of one head at least."""


def value_dim(q: torch.Tensor, latent: torch.Tensor, up: torch.Tensor) -> int:
    """Return V. q: (B, H, S, N + P); latent: (B, 1, T, R + P); up: (H, N + V, R)."""
    return up.shape[1] + latent.shape[3] - up.shape[2] - q.shape[3]


def expanded(
    latent: torch.Tensor, up: torch.Tensor, key_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys (B, H, T, N + P) and values (B, H, T, V). latent: (B, 1, T, W); up: (H, N + V, R); key_dim: N + P."""
    compressed, rotated = latent.split([up.shape[2], latent.shape[3] - up.shape[2]], -1)
    found = compressed @ up.mT
    of_keys = key_dim - rotated.shape[3]
    k, v = found.split([of_keys, up.shape[1] - of_keys], -1)
    return torch.cat((k, rotated.expand(-1, k.shape[1], -1, -1)), -1), v


def absorbed(
    q: torch.Tensor, latent: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries of latents, (B, H, S, R + P), and what makes values of summed latents, (H, R, V).

    Scores and sums are those of expanded keys and values, which are not made: few queries over many latents cost less
    so. Shapes as of `value_dim`.
    """
    rotated = latent.shape[3] - up.shape[2]
    kept, turned = q.split([q.shape[3] - rotated, rotated], -1)
    of_keys, of_values = up.split([kept.shape[3], up.shape[1] - kept.shape[3]], 1)
    return torch.cat((kept @ of_keys, turned), -1), of_values.mT


class Expansion:
    """The expansion in one call of attention, and in the backward the gradient of `up`, (H, N + V, R).

    key_dim: N + P; sum_dtype: in which gradients are added up; None: of a forward, which has none.
    """

    def __init__(
        self, up: torch.Tensor, key_dim: int, sum_dtype: torch.dtype | None = None
    ) -> None:
        self._up, self._key_dim = up, key_dim
        self.gradient = None if sum_dtype is None else torch.zeros_like(up, dtype=sum_dtype)

    def groups(self, latent: torch.Tensor) -> Iterator[slice]:
        """Yield the heads that are expanded at a time, for these tokens."""
        heads, rows, _ = self._up.shape
        of_head = max(latent.shape[0] * latent.shape[2] * rows * latent.itemsize, 1)
        size = max(EXPANDED_BYTES // of_head, 1)
        return (slice(start, min(start + size, heads)) for start in range(0, heads, size))

    def keys(self, latent: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some heads, see `expanded`; values are filled up to the size of keys."""
        k, v = expanded(latent, self._up[heads], self._key_dim)
        return k, self.filled(v)

    def filled(self, x: torch.Tensor) -> torch.Tensor:
        """Return values, or outputs, with zeros up to the size of keys, which kernels take for both."""
        return F.pad(x, (0, self._key_dim - x.shape[3]))

    def add(
        self,
        dk: torch.Tensor,
        dv: torch.Tensor,
        latent: torch.Tensor,
        heads: slice,
        dlatent: torch.Tensor,
    ) -> None:
        """Add the gradients of keys and values of some heads to those of the latent, (B, 1, T, W), and of `up`.

        Products are in the type of `up`, as those of a linear module are.
        """
        up = self._up[heads]
        rank = up.shape[2]
        rotated = latent.shape[3] - up.shape[2]
        of_keys = dk.shape[3] - rotated
        # (B, H, T, N + V)
        found = torch.cat((dk[..., :of_keys], dv), -1)[..., : up.shape[1]].to(up.dtype)
        by_token = found.transpose(1, 2).flatten(2)  # (B, T, H * (N + V))
        dlatent[:, 0, :, :rank] += by_token @ up.flatten(0, 1)
        dlatent[:, 0, :, rank:] += dk[..., of_keys:].sum(1)
        compressed = latent[:, 0, :, :rank].flatten(0, 1)
        self.gradient[heads] += (by_token.flatten(0, 1).mT @ compressed).view(up.shape)

"""The tensors and settings of one call of context-parallel attention, and the check that the tensors fit each other."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from longshard.context.execution.latent import value_dim
from longshard.context.planning.options import ContextParallelError


class AttentionSettings(NamedTuple):
    """The settings of one attention, without its inputs. All fields are numbers: an operator takes them as a list."""

    scale: float
    """Factor of the scores, such as `head_dim ** -0.5`."""
    is_causal: bool = True
    """Whether later tokens are hidden. With more or fewer keys than queries, the last query stands at the last key."""
    window: int = 0
    """A query sees the last `window` keys; without is_causal, `window` keys on each side. 0 means no window."""
    softcap: float = 0.0
    """c of scores c * tanh(score / c) (Gemma 2, arXiv 2408.00118), which the kernel `math` computes. 0 means none."""
    keep_exchanged: bool = False
    """Save the exchanged heads for the backward, instead of q, k, v and the results.

    The backward then sends only the gradient of the output to the ranks of the heads.
    """

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "AttentionSettings":
        """Return the settings.

        Args:
            numbers: The fields, in order.
        """
        scale, is_causal, window, softcap, keep_exchanged = numbers
        return cls(scale, bool(is_causal), int(window), softcap, bool(keep_exchanged))


class AttentionInputs(NamedTuple):
    """The tensors of one call of attention.

    Attributes:
        q: The queries, (B, H, S, D).
        k: The keys, (B, K, T, D), or latents, (B, 1, T, R + P).
        v: The values, (B, K, T, D), or with latents (B, 1, T, 0).
        up: Makes keys and values from latents, (H, N + V, R); None if there are no latents.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    up: Tensor | None = None

    def check(self) -> None:
        """Check shapes and types.

        Raises:
            ContextParallelError: They do not fit each other.
        """
        q, k, v, up = self
        if up is None:
            alike = q.ndim == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype
            if (
                not alike
                or q.shape[0] != k.shape[0]
                or q.shape[3] != k.shape[3]
                or q.shape[1] % max(k.shape[1], 1)
            ):
                raise ContextParallelError(
                    f"context-parallel attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of "
                    f"types {q.dtype}, {k.dtype}, {v.dtype}. Give (B, H, S, D) and twice (B, K, T, D) of one type, "
                    "K dividing H"
                )
            return
        dims = q.ndim, k.ndim, v.ndim, up.ndim
        fits = (
            q.dtype == k.dtype == up.dtype
            and dims == (4, 4, 4, 3)
            and k.shape[:2] == (q.shape[0], 1)
            and up.shape[0] == q.shape[1]
            and v.shape == (*k.shape[:3], 0)
        )
        if not fits or up.shape[2] > k.shape[3] or not 0 < value_dim(q, k, up) <= q.shape[3]:
            raise ContextParallelError(
                f"latent attention got q {tuple(q.shape)}, latents {tuple(k.shape)}, values {tuple(v.shape)} and up "
                f"{tuple(up.shape)} of types {q.dtype}, {k.dtype}, {v.dtype}, {up.dtype}. Give (B, H, S, N + P), "
                "(B, 1, T, R + P), (B, 1, T, 0) and (H, N + V, R) of one type, V at most N + P"
            )

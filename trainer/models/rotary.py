"""Rotary position embedding (arXiv 2104.09864), of adjacent pairs as in Meta's checkpoints, or of halves.

adjacent pairs  (x0, x1) (x2, x3) ...            `apply_rope`
halves          (x0, x_{D/2}) (x1, x_{D/2+1})    `apply_rope_to_halves`, as in Hugging Face's checkpoints
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.families.layer_kinds import RopeScaling


def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    unrotated: int = 0,
    longest: int = 0,
) -> Tensor:
    """Return the angle per position of each pair of a head: ((D + unrotated) / 2,), float64, on the CPU.

    Args:
        head_dim: D, the rotated channels of a head.
        theta: Base of the frequencies.
        scaling: Scaling for longer contexts. None without scaling.
        unrotated: Channels after the rotated ones; their angles are 0.
        longest: Tokens of the longest sequence that the model is for. LongRoPE chooses its factors by it.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = theta**-exponents
    kind = None if scaling is None else scaling.kind
    if kind == "proportional":
        frequencies[int(scaling.share * head_dim // 2) :] = 0.0
    if kind in ("linear", "proportional"):
        frequencies = frequencies / scaling.factor
    elif kind == "longrope":
        factors = (
            scaling.long_factors
            if longest > scaling.original_max_seq_len
            else scaling.short_factors
        )
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64, device="cpu")
    elif scaling is not None:
        # High frequencies are kept, low ones divided by the factor, with a linear ramp between.
        if kind == "llama3":
            turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
            low = scaling.low_freq_factor
            ramp = (turns - low) / (scaling.high_freq_factor - low)
        else:
            first, last = _yarn_pairs(head_dim, theta, scaling)
            pairs = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
            ramp = (last - pairs) / (last - first)
        keep = ramp.clamp(0.0, 1.0)
        frequencies = frequencies * (keep + (1.0 - keep) / scaling.factor)
    return F.pad(frequencies, (0, unrotated // 2))


def _yarn_pairs(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """Return the last pair that YaRN keeps, and the first pair whose frequency it divides by the whole factor.

    Pairs count from 0; without `scaling.truncate` they are fractions. Follows arXiv 2309.00071, section 3.2.
    """

    def pair(turns: float) -> float:
        """Return the fractional number of the pair that makes `turns` turns within the original context."""
        return (
            head_dim
            * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first = pair(scaling.beta_fast)
    last = pair(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    return first, max(last, first + 1e-3)


def precompute_freqs_cis(
    length: int, head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> Tensor:
    """Return `freqs_cis_at` for the positions 0 to length - 1, on the CPU: (length, D / 2, 2).

    Args:
        length: Number of positions.
        head_dim: D, the channels of a head.
        theta: Base of the frequencies.
        scaling: Scaling for longer contexts. None without scaling.
        dtype: Dtype of the result.
    """
    return freqs_cis_at(
        torch.arange(length, device="cpu"),
        rope_frequencies(head_dim, theta, scaling),
        scaling,
        dtype,
    )


def freqs_cis_at(
    positions: Tensor,
    frequencies: Tensor,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
    *,
    unrotated: int = 0,
) -> Tensor:
    """Return cosine and sine of the angles of each position, times the magnitude of the scaling: (..., D / 2, 2).

    Angles are float64: in float32 they are off by 3e-2 at a million tokens. Two float64 tensors exist at a time, 64 MiB
    each for 131,072 positions and D = 128.

    Args:
        positions: (...), int64.
        frequencies: (D / 2,), float64, of `rope_frequencies`.
        scaling: Has the magnitude. None without scaling.
        dtype: Dtype of the result.
        unrotated: Last channels of a head that are not rotated; their pairs have cosine 1 and sine 0.
    """
    magnitude = 1.0 if scaling is None else scaling.magnitude
    angles = positions.unsqueeze(-1) * frequencies
    table = torch.empty(*angles.shape, 2, dtype=dtype, device=angles.device)
    cosines = angles.cos()
    rotated = len(frequencies) - unrotated // 2
    cosines[..., :rotated].mul_(magnitude)
    table[..., 0] = cosines
    table[..., 1] = angles.sin_().mul_(magnitude)
    return table


def apply_rope(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate each adjacent pair of x.

    Args:
        x: (B, S, H, D).
        freqs_cis: Cosines and sines, (S, D / 2, 2), or for each row (B, S, D / 2, 2).

    Returns:
        (B, S, H, D), with the dtype of x.
    """
    return _rotated(x, freqs_cis, _rotated_pairs)


def apply_rope_to_halves(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x, as in Hugging Face's checkpoints.

    Args:
        x: (B, S, H, D).
        freqs_cis: As in `apply_rope`.

    Returns:
        (B, S, H, D), with the dtype of x.
    """
    return _rotated(x, freqs_cis, _rotated_halves)


def _rotated(x: Tensor, freqs_cis: Tensor, rotate: Callable[..., Tensor]) -> Tensor:
    if torch.compiler.is_compiling():
        return rotate(x, freqs_cis).type_as(x)
    return _Rotation.apply(x, freqs_cis, rotate)


def _rotated_pairs(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Return x, (B, S, H, D), with adjacent pairs rotated, in the dtype of the angles.

    In eager mode the rotation is one complex product, which takes a third of the time of real products. In compiled
    mode it is real products, because inductor fuses only these.
    """
    pairs = x.to(freqs_cis.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        turned = torch.stack(_turned(*pairs.unbind(-1), freqs_cis), dim=-1)
    else:
        angles = torch.view_as_complex(freqs_cis.unsqueeze(-3))
        turned = torch.view_as_real(torch.view_as_complex(pairs) * angles)
    return turned.flatten(-2)


def _rotated_halves(x: Tensor, freqs_cis: Tensor) -> Tensor:
    halves = x.to(freqs_cis.dtype).chunk(2, dim=-1)
    return torch.cat(_turned(*halves, freqs_cis), dim=-1)


def _turned(first: Tensor, second: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = freqs_cis.unsqueeze(-3).unbind(-1)
    return first * cos - second * sin, first * sin + second * cos


_PART = 1 << 27
"""Elements that are rotated at a time. Two float32 copies of them take 1 GiB."""


class _Rotation(torch.autograd.Function):
    """A rotation in parts of the sequence, so that a copy in the dtype of the angles exists for one part only.

    Only the angles are saved: the backward rotates by their negatives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, freqs_cis: Tensor, rotate: Callable[..., Tensor]) -> Any:
        ctx.save_for_backward(freqs_cis)
        ctx.rotate = rotate
        parts = -(-x.numel() // _PART)
        if parts <= 1:
            return rotate(x, freqs_cis).type_as(x)
        out = x.new_empty(x.shape)
        places = zip(*(t.tensor_split(parts, -3) for t in (out, x, freqs_cis)), strict=True)
        for target, part, angles in places:
            target.copy_(rotate(part, angles))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (freqs_cis,) = ctx.saved_tensors
        back = torch.view_as_real(torch.view_as_complex(freqs_cis).conj().resolve_conj())
        return _Rotation.apply(grad, back, ctx.rotate), None, None

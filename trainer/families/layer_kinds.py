"""How one layer of a decoder differs from others, and how rotary positions are stretched. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched by `factor`, for sequences that are so much longer.

    kind: 'linear' stretches all (Position Interpolation, arXiv 2306.15595). The others stretch long wavelengths and
    keep short ones, with a ramp between. That of 'llama3' (arXiv 2407.21783) is linear in the turns of a wave within
    `original_max_seq_len`, from `low_freq_factor` to `high_freq_factor`. That of 'yarn' (arXiv 2309.00071) is linear in
    the number of the pair, from the one that makes `beta_fast` turns to the one that makes `beta_slow`; `truncate`
    widens it to whole pairs. 'longrope' (arXiv 2402.13753) has a factor of its own for each pair: `long_factors` in a
    model for sequences longer than `original_max_seq_len`, else `short_factors`.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    kind: str = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """By which YaRN and LongRoPE multiply rotated queries and keys. None: 0.1 ln(factor) + 1 for YaRN, and for LongRoPE
    sqrt(1 + ln(factor) / ln(original_max_seq_len))."""
    truncate: bool = True
    mscale_all_dim: float = 0.0
    """Of latent attention, whose scores are multiplied by (0.1 m ln(factor) + 1)^2 of such an m."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def score_factor(self) -> float:
        """Return the factor of the scores of latent attention."""
        return (
            (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2
            if self.kind == "yarn"
            else 1.0
        )

    @property
    def magnitude(self) -> float:
        """Return the factor of rotated queries and keys."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        log = math.log(max(self.factor, 1.0))
        return (
            0.1 * log + 1.0
            if self.kind == "yarn"
            else math.sqrt(1.0 + log / math.log(self.original_max_seq_len))
        )


@dataclass(frozen=True)
class LayerKind:
    """Which of the model's parts one layer has."""

    linear: bool = False
    """Whether it has the model's linear attention in the place of attention, so that it neither rotates nor has a
    window."""
    window: bool = True
    """Whether it has the model's sliding window, if there is one; False: it sees all tokens before."""
    rope: bool = True
    """Whether its queries and keys are rotated."""
    rope_theta: float | None = None
    """Base of its own frequencies, without scaling; None: frequencies and scaling of the model."""
    experts: bool = True
    """Whether it has the model's experts, if there are some; False: a dense feed-forward network."""


def in_turns(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Return the fewest kinds that, repeated in turn, are these of all layers."""
    turns = range(1, len(kinds) + 1)
    return next(
        tuple(kinds[:n])
        for n in turns
        if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )

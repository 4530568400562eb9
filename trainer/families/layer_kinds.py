"""How one layer of a decoder differs from others, and how rotary positions are stretched. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.schema import Model


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched by `factor`, for sequences that are longer by this factor.

    kind: 'linear' stretches all frequencies (Position Interpolation, arXiv 2306.15595). The other kinds stretch long
    wavelengths and keep short ones, with a ramp between:

    * 'llama3' (arXiv 2407.21783): the ramp is linear in the turns of a wave within `original_max_seq_len`, from
      `low_freq_factor` to `high_freq_factor`.
    * 'yarn' (arXiv 2309.00071): the ramp is linear in the number of the pair, from the pair with `beta_fast` turns to
      the pair with `beta_slow` turns. `truncate` widens the ramp to whole pairs.
    * 'longrope' (arXiv 2402.13753): each pair has its own factor, `long_factors` in a model for sequences longer than
      `original_max_seq_len`, otherwise `short_factors`.
    * 'proportional' (Gemma 4) stretches all frequencies, and the last pairs do not rotate.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    kind: str = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor of rotated queries and keys with YaRN and LongRoPE. None: 0.1 ln(factor) + 1 for YaRN, and for LongRoPE
    sqrt(1 + ln(factor) / ln(original_max_seq_len))."""
    truncate: bool = True
    mscale_all_dim: float = 0.0
    """m: the scores of latent attention are multiplied by (0.1 m ln(factor) + 1)^2."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0
    """Share of the pairs that rotate, with 'proportional'."""

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention, see `mscale_all_dim`; 1 for other kinds than YaRN."""
        return (
            (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2
            if self.kind == "yarn"
            else 1.0
        )

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys, see `attention_factor`; 1 for other kinds than YaRN and LongRoPE."""
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


def configured_scaling(
    settings: Model, flavors: RopeScaling | None, max_seq_len: int
) -> RopeScaling | None:
    """Return the scaling that the settings ask for. If the factor is 1, it is None, except for proportional positions.

    Settings that are not given come from the flavor, or are the usual ones.

    Args:
        settings: Table `[model]`, in which `rope_scaling` is set.
        flavors: The scaling of the flavor. None: the flavor has none.
        max_seq_len: Longest sequence of the flavor, in tokens.

    Raises:
        ConfigError: The settings change the factor of LongRoPE, or the type of proportional rotary positions.
    """
    original = settings.rope_original_seq_len
    own = None if flavors is None else flavors.kind
    kind = settings.rope_scaling_type or own or "llama3"
    if own == "proportional":
        if kind != own:
            raise ConfigError(
                f"model.rope_scaling_type = {kind!r} is not for proportional rotary positions, which belong to the "
                "model; leave it out"
            )
        return replace(flavors, factor=settings.rope_scaling)
    if settings.rope_scaling == 1.0:
        return None
    if kind == "longrope":
        raise ConfigError(
            f"model.rope_scaling = {settings.rope_scaling} is not for LongRoPE, whose factors "
            f"belong to the model; leave it out, or set model.rope_scaling_type too"
        )
    usual = RopeScaling(settings.rope_scaling, kind=kind)
    if kind == "linear":
        return usual
    if original is None and own not in (None, "linear"):
        original = flavors.original_max_seq_len
    if original is None:
        original = usual.original_max_seq_len if kind == "llama3" else max_seq_len
    same = flavors if own == kind else usual
    return replace(same, factor=settings.rope_scaling, original_max_seq_len=original)


@dataclass(frozen=True)
class LayerKind:
    """Which parts of the model a layer has."""

    linear: bool = False
    """Whether linear attention replaces attention; then the layer neither rotates nor has a window."""
    window: bool = True
    """Whether it has the model's sliding window, if there is one; False: it sees all earlier tokens."""
    rope: bool = True
    """Whether its queries and keys are rotated."""
    rope_theta: float | None = None
    """Base of its own frequencies, without scaling; None: frequencies and scaling of the model."""
    global_heads: bool = False
    """Whether it has the model's `global_heads`."""
    shares_keys: bool = False
    """Whether it has the keys and values of the last layer before it that has its own and the same kind of heads."""
    ffn_factor: int = 1
    """Factor of the inner channels of its feed-forward network."""
    experts: bool = True
    """Whether it has the model's experts, if there are any; False: a dense feed-forward network."""


def in_turns(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Return the shortest beginning of the kinds that gives all layers when it is repeated.

    Args:
        kinds: The kind of each layer, at least one.
    """
    turns = range(1, len(kinds) + 1)
    return next(
        tuple(kinds[:n])
        for n in turns
        if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )


def key_sources(kinds: Sequence[LayerKind]) -> dict[int, int]:
    """Return each layer that shares keys and values -> the layer that computes them: the last such layer before it.

    Both layers have the same kind of heads. Layers count from 0.

    Args:
        kinds: The kind of each layer.
    """
    own = {}
    sources = {}
    for number, kind in enumerate(kinds):
        if kind.shares_keys:
            sources[number] = own[kind.global_heads]
        else:
            own[kind.global_heads] = number
    return sources


def with_windows(kinds: Sequence[LayerKind], every: int) -> tuple[LayerKind, ...]:
    """Return the kinds with a window in layers 0, n, 2n, ..., and in no other. The result repeats in turn.

    Args:
        kinds: Kinds of the first layers, which the others repeat in turn.
        every: n, at least 1.
    """
    layers = range(math.lcm(len(kinds), every))
    return in_turns(
        [replace(kinds[layer % len(kinds)], window=layer % every == 0) for layer in layers]
    )


def configured_fields(args: Any, settings: Model) -> dict[str, Any]:
    """Return the fields of a decoder's arguments that the settings decide, with their values.

    Some fields, such as `norm_type`, are always in the result, even if their value stays the same.

    Args:
        args: The arguments of the flavor.
        settings: Table `[model]`.

    Raises:
        ConfigError: A setting is not for this model.
    """
    asked = {}
    refused = ["attention_sinks", "short_conv_kernel"] * (args.latent is not None)
    refused += ["sliding_window"] * (args.index is not None)
    for key in refused:
        if getattr(settings, key):
            kind = "latent attention" if args.index is None else "sparse attention"
            raise ConfigError(
                f"model.{key} = {getattr(settings, key)} is not for {kind}; leave it out"
            )
    if settings.sliding_window is not None:
        asked |= {
            "sliding_window": settings.sliding_window,
            "layers": with_windows(args.layers, settings.sliding_window_every),
        }
    if settings.rope_scaling is not None:
        asked["rope_scaling"] = configured_scaling(
            settings, args.rope_scaling, args.max_seq_len
        )
    balance = "router_aux_loss_coef", "router_aux_loss_load", "router_bias_update_rate"
    for key in ("rope_theta", *balance):
        if (value := getattr(settings, key)) is not None:
            asked[key] = value
    return asked | {
        "mtp_layers": settings.mtp_layers,
        "norm_type": settings.norm_type,
        "attention_sinks": args.attention_sinks or settings.attention_sinks,
        "short_conv_kernel": settings.short_conv_kernel,
    }

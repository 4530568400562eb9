"""Arguments of the decoder that families of language models share. Torch-free: a configuration is checked at once."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from trainer.config.schema import Model
from trainer.config.toml import load_toml
from trainer.families.args import ExpertArgs

TABLES = load_toml(Path(__file__).with_name("sizes.toml"))
"""Sizes of families, and what their architectures assume."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched by `factor`, for sequences that are so much longer.

    kind: 'linear' stretches all (Position Interpolation, arXiv 2306.15595). The others stretch long wavelengths and
    keep short ones, with a ramp between. That of 'llama3' (arXiv 2407.21783) is linear in the turns of a wave within
    `original_max_seq_len`, from `low_freq_factor` to `high_freq_factor`. That of 'yarn' (arXiv 2309.00071) is linear in
    the number of the pair, from the one that makes `beta_fast` turns to the one that makes `beta_slow`; `truncate`
    widens it to whole pairs.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    kind: str = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Of YaRN, by which rotated queries and keys are multiplied; None: 0.1 ln(factor) + 1."""
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Return the factor of rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


def decoder_modules(n_layers: int) -> tuple[str, ...]:
    """Return the modules of a decoder that a pipeline can divide, in the order of the forward."""
    return ("tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output")


def decoder_linear_shapes(
    *, dim: int, query_dim: int, kv_dim: int, hidden_dim: int, n_layers: int, vocab_size: int, experts: int = 0
) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every linear module of a decoder with `Attention` and `FeedForward`, by name.

    query_dim, kv_dim: heads times head size. On a tensor-parallel rank, these, hidden_dim and vocab_size are its share.
    experts: their number, of which only the router is a linear module; 0: a feed-forward network of width hidden_dim.
    """
    of_a_layer = {
        "attention.wq": (query_dim, dim),
        "attention.wk": (kv_dim, dim),
        "attention.wv": (kv_dim, dim),
        "attention.wo": (dim, query_dim),
    }
    if experts:
        of_a_layer["feed_forward.router.gate"] = (experts, dim)
    else:
        shapes = {"w1": (hidden_dim, dim), "w2": (dim, hidden_dim), "w3": (hidden_dim, dim)}
        of_a_layer |= {f"feed_forward.{name}": shape for name, shape in shapes.items()}
    shapes = {f"layers.{i}.{name}": shape for i in range(n_layers) for name, shape in of_a_layer.items()}
    return shapes | {"output": (vocab_size, dim)}


@dataclass(frozen=True)
class TransformerArgs:
    """Arguments of one decoder. `vocab_size` and `max_seq_len` come from the tokenizer and `training.seq_len`."""

    task: ClassVar[str] = "tokens"
    # The same weights serve other lengths and other positions.
    free_to_change: ClassVar[frozenset[str]] = frozenset(
        [
            *("max_seq_len", "norm_eps", "rope_theta", "rope_scaling", "sliding_window", "sliding_window_every"),
            *("router_aux_loss_coef", "router_bias_update_rate"),
        ]
    )

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    ffn_hidden_dim: int = 14336
    vocab_size: int = 128256
    max_seq_len: int = 8192
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    sliding_window: int | None = None
    sliding_window_every: int = 1
    attention_sinks: bool = False
    short_conv_kernel: int = 0
    head_size: int | None = None
    """None: `dim / n_heads`, which heads of their own size need not be."""
    qk_norm: bool = False
    """RMSNorm of each head's query and key before the rotation."""
    attention_bias: bool = False
    """Of queries, keys and values."""
    output_bias: bool = False
    """Of the output projection of attention."""
    experts: ExpertArgs | None = None
    """In the place of the feed-forward network of each layer, whose width then counts for nothing."""
    router_aux_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads if self.head_size is None else self.head_size

    @property
    def norms_have_parameters(self) -> bool:
        return self.norm_type != "np_layernorm"

    def configured(self, settings: Model, *, vocab_size: int, max_seq_len: int) -> "TransformerArgs":
        asked = {}
        if settings.sliding_window is not None:
            asked |= {"sliding_window": settings.sliding_window, "sliding_window_every": settings.sliding_window_every}
        if settings.rope_scaling is not None:
            asked["rope_scaling"] = self._scaled(settings)
        if settings.rope_theta is not None:
            asked["rope_theta"] = settings.rope_theta
        balance = {key: getattr(settings, key) for key in ("router_aux_loss_coef", "router_bias_update_rate")}
        asked |= {key: rate for key, rate in balance.items() if rate is not None}
        return replace(
            self,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            norm_type=settings.norm_type,
            attention_sinks=self.attention_sinks or settings.attention_sinks,
            short_conv_kernel=settings.short_conv_kernel,
            **asked,
        )

    def _scaled(self, settings: Model) -> RopeScaling | None:
        """Return the scaling that the settings ask for; what they leave open is the flavor's, or the usual."""
        flavors, original = self.rope_scaling, settings.rope_original_seq_len
        kind = settings.rope_scaling_type or ("llama3" if flavors is None else flavors.kind)
        if settings.rope_scaling == 1.0:
            return None
        usual = RopeScaling(settings.rope_scaling, kind=kind)
        if kind == "linear":
            return usual
        if original is None and flavors is not None and flavors.kind != "linear":
            original = flavors.original_max_seq_len
        if original is None:
            original = usual.original_max_seq_len if kind == "llama3" else self.max_seq_len
        same = flavors if flavors is not None and flavors.kind == kind else usual
        return replace(same, factor=settings.rope_scaling, original_max_seq_len=original)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {
            "attention heads": self.n_heads,
            "key/value heads": self.n_kv_heads,
            **({} if self.experts else {"feed-forward channels": self.ffn_hidden_dim}),
            "tokens in the vocabulary": self.vocab_size,
        }

    def module_names(self) -> tuple[str, ...]:
        return decoder_modules(self.n_layers)

    def window_of_layer(self, layer: int) -> int | None:
        return self.sliding_window if layer % self.sliding_window_every == 0 else None

    def linear_shapes(self, tp: int = 1) -> dict[str, tuple[int, int]]:
        return decoder_linear_shapes(
            dim=self.dim,
            query_dim=self.n_heads * self.head_dim // tp,
            kv_dim=self.n_kv_heads * self.head_dim // tp,
            hidden_dim=self.ffn_hidden_dim // tp,
            n_layers=self.n_layers,
            vocab_size=self.vocab_size // tp,
            experts=self.experts.number if self.experts else 0,
        )

    def n_params(self) -> int:
        norm = self.dim * {"rmsnorm": 1, "layernorm": 1, "np_layernorm": 0}[self.norm_type]
        return (
            sum(map(math.prod, self.linear_shapes().values()))
            + self.n_layers * (2 * norm + self._vectors())
            + self._convolution_weights()
            + self._expert_weights(self.experts.number if self.experts else 0)
            + norm
            + (0 if self.tie_embeddings else self.vocab_size * self.dim)
        )

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Return model FLOPs per token of a training step (forward + backward) as (full attention, causal attention).

        The first is the convention of the PaLM paper (arXiv 2204.02311, appendix B): 6 per weight of a matrix product
        plus 12 * layers * heads * head size * seq_len, as if every query saw every key. The second counts visible keys:
        (seq_len + 1) / 2 per query under a causal mask, fewer with a window. The embedding look-up is no product. A
        weight of a short convolution meets each token once, as one of a matrix does. Of the experts those count that a
        token chooses.
        """
        active = self._convolution_weights() + self._expert_weights(self.experts.per_token if self.experts else 0)
        matrices = 6.0 * (sum(map(math.prod, self.linear_shapes().values())) + active)
        attention = 12.0 * self.n_heads * self.head_dim
        keys = sum(self._keys_per_query(layer, seq_len) for layer in range(self.n_layers))
        return matrices + attention * self.n_layers * seq_len, matrices + attention * keys

    def words(self) -> str:
        heads = f"{self.n_heads} query and {self.n_kv_heads} key/value heads of {self.head_dim}"
        words = f"{self.n_layers} layers of width {self.dim}, {heads}"
        if (experts := self.experts) is None:
            return words
        chosen = f"{experts.per_token} of {experts.number} experts of width {experts.hidden_dim} a token"
        return f"{words}, {chosen} ({self.n_active_params():,} active parameters)"

    def n_active_params(self) -> int:
        """Return the parameters that a token meets: all but those of the experts that it does not choose."""
        experts = self.experts
        return self.n_params() - (self._expert_weights(experts.number - experts.per_token) if experts else 0)

    def _vectors(self) -> int:
        """Return the parameters of a layer that are neither in norms of a block, matrices, convolutions nor experts."""
        return (
            self.n_heads * self.attention_sinks
            + 2 * self.head_dim * self.qk_norm
            + (self.n_heads + 2 * self.n_kv_heads) * self.head_dim * self.attention_bias
            + self.dim * self.output_bias
            + (self.experts.number * self.experts.biases if self.experts else 0)
        )

    def _expert_weights(self, number: int) -> int:
        """Return the parameters of so many experts of every layer."""
        return self.n_layers * number * self.experts.weights(self.dim) if self.experts else 0

    def _convolution_weights(self) -> int:
        return self.n_layers * (self.n_heads + 2 * self.n_kv_heads) * self.head_dim * self.short_conv_kernel

    def _keys_per_query(self, layer: int, seq_len: int) -> float:
        """Return the mean number of keys that a query of this layer sees."""
        window = min(self.window_of_layer(layer) or seq_len, seq_len)
        return window - window * (window - 1) / 2 / seq_len


def sizes(family: str) -> dict[str, TransformerArgs]:
    """Return the sizes of a family by flavor, from `sizes.toml`."""
    tables = TABLES[family]

    def fields_of(flavor: str) -> dict[str, Any]:
        own = dict(tables[flavor])
        return (fields_of(own.pop("like")) if "like" in own else {}) | own

    kinds = {"rope_scaling": RopeScaling, "experts": ExpertArgs}
    found = {flavor: fields_of(flavor) for flavor in tables}
    return {
        flavor: TransformerArgs(**{key: kinds[key](**x) if key in kinds else x for key, x in fields.items()})
        for flavor, fields in found.items()
    }

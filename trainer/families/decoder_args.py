"""Arguments of the decoder that families of language models share. Torch-free: a configuration is checked at once."""

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from trainer.config.schema import Model
from trainer.config.toml import load_toml
from trainer.families.args import all_layers, decoder_modules
from trainer.families.decoder_words import decoder_words
from trainer.families.feed_forward_args import DenseArgs, ExpertArgs, FeedForwardArgs
from trainer.families.layer_kinds import LayerKind, RopeScaling, configured_fields
from trainer.families.layers import Layer, NormArgs
from trainer.families.linear_args import LinearArgs, linear_args
from trainer.families.mixers import (
    AttentionArgs,
    GlobalHeads,
    IndexArgs,
    LatentArgs,
    LatentAttentionArgs,
    Mixer,
    Shapes,
    SharedKeysArgs,
    SparseAttentionArgs,
)

TABLES = load_toml(Path(__file__).with_name("sizes.toml"))
"""Sizes of families, and what their architectures assume."""


@dataclass(frozen=True)
class TransformerArgs:
    """The table of one decoder: entries of sizes.toml, of `config.json` and of checkpoints.

    `layer` makes the record of a layer from it, and all other code asks these records. `vocab_size` and `max_seq_len`
    come from the tokenizer and `training.seq_len`.
    """

    task: ClassVar[str] = "tokens"
    # The same weights serve other lengths and other positions.
    free_to_change: ClassVar[frozenset[str]] = frozenset(
        {
            "max_seq_len",
            "norm_eps",
            "rope_theta",
            "rope_scaling",
            "sliding_window",
            "layers",
            "router_aux_loss_coef",
            "router_aux_loss_load",
            "router_bias_update_rate",
        }
    )

    dim: int = 4096
    n_layers: int = 32
    mtp_layers: int = 0
    """Layers after the norm; each predicts one more token (DeepSeek-V3)."""
    n_heads: int = 32
    n_kv_heads: int = 8
    ffn_hidden_dim: int = 14336
    vocab_size: int = 128256
    max_seq_len: int = 8192
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    rope_share: float = 1.0
    """Share of the channels of a head that are rotated, its first ones."""
    tie_embeddings: bool = False
    sliding_window: int | None = None
    layers: tuple[LayerKind, ...] = (LayerKind(),)
    """Kinds of the first layers, which the others repeat in turn."""
    attention_sinks: bool = False
    short_conv_kernel: int = 0
    head_size: int | None = None
    """Size of a head. None: `dim / n_heads`."""
    global_heads: GlobalHeads | None = None
    """Heads of the layers of kind `global_heads`. The rotary table of the model is then theirs."""
    per_layer_dim: int = 0
    """Channels of the embedding of tokens that each layer has (Gemma 3n). 0: layers have none."""
    layer_scalar: bool = False
    """Whether the output of each layer is multiplied by a number, a buffer."""
    value_norm: bool = False
    """RMSNorm of each head's value, without weights."""
    qk_norm: bool = False
    """RMSNorm of each head's query and key before the rotation."""
    qk_norm_of_all_heads: bool = False
    """Whether `qk_norm` is one norm over the queries, or keys, of all heads together."""
    attention_bias: bool = False
    """Whether queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    attention_gate: bool = False
    """Whether the output of each head is multiplied by a sigmoid; the rows of the sigmoid follow the head's query."""
    linear: LinearArgs | None = None
    """Sizes of layers with linear attention."""
    latent: LatentArgs | None = None
    """Latents that replace the keys and values of attention."""
    index: IndexArgs | None = None
    """Indexer that chooses the keys of each query. None: a query attends to all keys that it sees."""
    experts: ExpertArgs | None = None
    """Experts that replace the feed-forward network of each layer; `ffn_hidden_dim` is then not used."""
    router_aux_loss_coef: float = 0.0
    router_aux_loss_load: str = "step_before"
    router_bias_update_rate: float = 0.0
    norm_place: str = "before"
    """Where a branch has norms: `before` it, `after` it, or `around` it, both."""
    norm_offset: bool = False
    """Whether an RMSNorm multiplies by 1 + weight."""
    activation: str = "silu"
    """Activation of the gates of feed-forward networks: `silu`, or `gelu_tanh`."""
    embedding_scale: float = 1.0
    """Factor of embeddings."""
    residual_scale: float = 1.0
    """Factor of the output of each branch."""
    logits_divisor: float = 1.0
    attention_scale: float | None = None
    """Factor of the scores of attention; None: `head_dim ** -0.5`."""
    attention_softcap: float | None = None
    """c: scores of attention are c * tanh(score / c) (Gemma 2, arXiv 2408.00118)."""
    logits_softcap: float | None = None
    """The same for logits."""

    @property
    def head_dim(self) -> int:
        """Size of a query head."""
        if self.latent is not None:
            return self.latent.head_dim
        return self.dim // self.n_heads if self.head_size is None else self.head_size

    @property
    def table_dim(self) -> int:
        """Number of channels of the rotary table, including channels that it leaves unchanged."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels of a head."""
        return int(self.table_dim * self.rope_share)

    def rotary_sizes(self, theta: float | None) -> tuple[int, int]:
        """Return how many channels of a head a rotary table rotates, and leaves unchanged.

        Args:
            theta: Base of the frequencies. None: the table of the model.
        """
        if theta is None and self.global_heads is not None:
            return self.global_heads.head_dim, 0
        return self.rotary_dim, self.table_dim - self.rotary_dim

    @property
    def value_dim(self) -> int:
        """Channels of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def score_scale(self) -> float:
        """Factor of the scores of attention: as configured, or head_dim**-0.5, times a factor for stretched MLA."""
        if self.attention_scale is not None:
            return self.attention_scale
        stretched = self.latent is not None and self.rope_scaling is not None
        return self.head_dim**-0.5 * (self.rope_scaling.score_factor if stretched else 1.0)

    @property
    def norms(self) -> NormArgs:
        """The norms of the layers and of the model."""
        return NormArgs(self.norm_type, self.norm_eps, self.norm_offset, self.norm_place)

    @property
    def norms_have_parameters(self) -> bool:
        """Whether a norm has a weight or a bias."""
        return self.norms.parameters(1) > 0

    def configured(
        self, settings: Model, *, vocab_size: int, max_seq_len: int
    ) -> "TransformerArgs":
        """Return the arguments with table `[model]` applied.

        Args:
            settings: Table `[model]`; ConfigError for a setting that is not for this model.
            vocab_size: Number of tokens of the vocabulary.
            max_seq_len: Longest sequence, in tokens.
        """
        asked = configured_fields(self, settings)
        return replace(self, vocab_size=vocab_size, max_seq_len=max_seq_len, **asked)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the sizes that a tensor-parallel degree must divide, by their names in messages.

        If layers differ in a size, it is their greatest common divisor.
        """
        layers = sorted(self._all_layers(), key=lambda layer: layer.mixer.is_recurrent)
        sizes = {}
        for part in ("mixer", "feed_forward"):
            for layer in layers:
                own = getattr(layer, part).tensor_parallel_sizes()
                sizes |= {
                    name: math.gcd(sizes.get(name, 0), size) for name, size in own.items()
                }
        return sizes | {"tokens in the vocabulary": self.vocab_size}

    def module_names(self) -> tuple[str, ...]:
        """Return the modules in the order of the forward."""
        modules = decoder_modules(self.n_layers, self.mtp_layers)
        return modules + ("layer_embeddings", "layer_projection") * (self.per_layer_dim > 0)

    def kind(self, number: int) -> LayerKind:
        """Return the kind of a layer. A layer for further tokens has the kind of the last layer with attention.

        Args:
            number: Number of the layer, from 0.
        """
        if number >= self.n_layers:
            last = self.n_layers - 1
            number = next((i for i in range(last, -1, -1) if not self.kind(i).linear), last)
        return self.layers[number % len(self.layers)]

    @property
    def kinds(self) -> list[LayerKind]:
        """The kinds of the layers, without the layers for further tokens."""
        return [self.kind(number) for number in range(self.n_layers)]

    def layer(self, number: int) -> Layer:
        """Return the record of a layer.

        Args:
            number: Number of the layer.
        """
        return _layer(self, self.kind(number), number >= self.n_layers)

    def _all_layers(self) -> list[Layer]:
        return [self.layer(number) for number in all_layers(self)]

    def mixer_of(self, kind: LayerKind) -> Mixer:
        """Return the mixer of layers of a kind.

        Args:
            kind: The kind.
        """
        if kind.linear:
            return self.linear
        window = self.sliding_window if kind.window else None
        theta = kind.rope_theta if kind.rope else 0.0
        if self.latent is not None:
            sizes = self.n_heads, self.latent, self.score_scale, window, theta
            if self.index is not None:
                return SparseAttentionArgs(*sizes, index=self.index)
            return LatentAttentionArgs(*sizes)
        heads = GlobalHeads(self.head_dim, self.n_kv_heads)
        if kind.global_heads:
            heads = self.global_heads
        mixer = SharedKeysArgs if kind.shares_keys else AttentionArgs
        return mixer(
            self.n_heads,
            heads.n_kv_heads,
            heads.head_dim,
            window,
            theta,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
            sinks=self.attention_sinks,
            short_conv_kernel=self.short_conv_kernel,
            bias=self.attention_bias,
            output_bias=self.output_bias,
            qk_norm=self.qk_norm,
            value_norm=self.value_norm,
            keys_are_values=heads.keys_are_values,
            norm_all_heads=self.qk_norm_of_all_heads,
            gate=self.attention_gate,
        )

    def feed_forward_of(self, kind: LayerKind) -> FeedForwardArgs:
        """Return the feed-forward network of layers of a kind.

        Args:
            kind: The kind.
        """
        if self.experts is not None and kind.experts:
            return self.experts
        return DenseArgs(self.ffn_hidden_dim * kind.ffn_factor, self.activation)

    def window_of_layer(self, layer: int) -> int | None:
        """Return how many tokens a token sees in this layer, itself included. None: all tokens before it.

        Args:
            layer: Number of the layer.
        """
        return self.layer(layer).mixer.window

    def linear_shapes(self, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of linear modules on one tensor-parallel rank, by name, without routed experts.

        Args:
            tp: Tensor-parallel degree.
        """
        shapes = {
            f"layers.{number}.{name}": shape
            for number in all_layers(self)
            for name, shape in self.layer(number).linear_shapes(self.dim, tp).items()
        }
        if channels := self.layer_channels:
            shapes["layer_projection"] = channels, self.dim
        return shapes | {"output": (self.vocab_size // tp, self.dim)}

    @property
    def layer_channels(self) -> int:
        """Channels of the embeddings of all layers together."""
        return self.n_layers * self.per_layer_dim

    def n_params(self) -> int:
        """Return the number of parameters; a tied embedding counts once."""
        matrix = self.vocab_size * self.dim
        norms = 1 + self.mtp_layers
        return (
            sum(layer.parameters(self.dim) for layer in self._all_layers())
            + norms * self.norms.parameters(self.dim)
            + self.layer_channels * (self.vocab_size + self.dim)
            + self.per_layer_dim
            + (matrix if self.tie_embeddings else 2 * matrix)
        )

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Return model FLOPs per token of a training step (forward + backward) as (full attention, causal attention).

        The first follows the convention of the PaLM paper (arXiv 2204.02311, appendix B): 6 per weight of a matrix
        product plus 12 * layers * heads * head size * seq_len, half of it for keys and half for values, as if every
        query saw every key. The second counts visible keys: (seq_len + 1) / 2 per query under a causal mask, fewer with
        a window. The embedding look-up is no product. A weight of a short convolution is used once per token, like a
        weight of a matrix. Only the experts that a token chooses count. Linear attention counts as its recurrence, for
        any length. The output counts once for each predicted token.

        Args:
            seq_len: Number of tokens of a sequence.
        """
        outputs = 6.0 * (1 + self.mtp_layers) * self.vocab_size * self.dim
        outputs += 6.0 * self.layer_channels * self.dim
        full, causal = zip(
            *(layer.flops(self.dim, seq_len) for layer in self._all_layers()), strict=True
        )
        return outputs + sum(full), outputs + sum(causal)

    def words(self) -> str:
        """Return a description of the parts."""
        return decoder_words(self)

    def n_active_params(self) -> int:
        """Return the number of parameters that a token uses: all except the experts that the token does not choose."""
        unused = (
            layer.feed_forward.expert_weights(self.dim, active=False)
            - layer.feed_forward.expert_weights(self.dim, active=True)
            for layer in self._all_layers()
        )
        return self.n_params() - sum(unused)


@cache
def _layer(args: TransformerArgs, kind: LayerKind, predicts_further: bool) -> Layer:
    mixer, feed_forward = args.mixer_of(kind), args.feed_forward_of(kind)
    input_dim = 0 if predicts_further else args.per_layer_dim
    return Layer(mixer, feed_forward, args.norms, predicts_further, input_dim)


@cache
def sizes(family: str) -> dict[str, TransformerArgs]:
    """Return the sizes of a family by flavor, from `sizes.toml`. The dict is kept, so callers must not change it.

    Args:
        family: Name of the family, of the tables in the file; KeyError for others.
    """
    tables = TABLES[family]

    def fields_of(flavor: str) -> dict[str, Any]:
        own = dict(tables[flavor])
        return (fields_of(own.pop("like")) if "like" in own else {}) | own

    def args_of(flavor: str) -> TransformerArgs:
        fields = fields_of(flavor)
        kinds = {
            "rope_scaling": RopeScaling,
            "experts": ExpertArgs,
            "linear": linear_args,
            "latent": LatentArgs,
            "index": IndexArgs,
            "global_heads": GlobalHeads,
        }
        fields |= {key: kind(**fields[key]) for key, kind in kinds.items() if key in fields}
        if "layers" in fields:
            fields["layers"] = tuple(LayerKind(**kind) for kind in fields["layers"])
        return TransformerArgs(**fields)

    return {flavor: args_of(flavor) for flavor in tables}


LLAMA3 = sizes("llama3")
"""Sizes of Llama 3, by flavor."""

"""The first branch of a layer: attention, or latent attention. linear_args.py has linear attention. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

Shapes = dict[str, tuple[int, int]]
"""(outputs, inputs) of linear modules, by name."""
Sizes = dict[str, int]
Names = Mapping[str, str]


class Mixer(Protocol):
    """One kind of mixer: its sizes, and all counts that follow from them.

    A module of trainer/models computes it: `MIXERS` of trainer/models/block.py.
    """

    is_recurrent: ClassVar[bool]
    """Whether a state of fixed size replaces keys and values: linear attention."""
    names: ClassVar[Names]
    """Modules, or their parameters -> their names in a layer of Hugging Face's files, where families agree."""
    window: int | None
    """Tokens that a token sees, itself included. None: all tokens before it."""
    rope_theta: float | None
    """Base of the layer's own rotary frequencies. 0: nothing is rotated. None: the frequencies of the model."""

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """

    def other_weights(self) -> int:
        """Return the number of its other weights that each token is multiplied by."""

    def vectors(self, dim: int) -> int:
        """Return the number of its other parameters: norms, biases, sinks, decays.

        Args:
            dim: Channels of the hidden states.
        """

    def flops(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs per token of a training step, without weights, as (full, causal) attention counts.

        Args:
            seq_len: Number of tokens of a sequence.
        """

    def tensor_parallel_sizes(self) -> Sizes:
        """Return the sizes that tensor-parallel ranks divide, by their names in messages."""


def visible_keys(window: int | None, seq_len: int) -> float:
    """Return the mean number of keys that a query sees under a causal mask, with a window or without.

    Args:
        window: Tokens that a token sees, itself included. None: all tokens before it.
        seq_len: Number of tokens of a sequence.
    """
    reach = min(window or seq_len, seq_len)
    return reach - reach * (reach - 1) / 2 / seq_len


@dataclass(frozen=True)
class AttentionArgs:
    """Grouped-query attention."""

    n_heads: int
    n_kv_heads: int
    """Heads of keys and values. It divides `n_heads`."""
    head_dim: int
    window: int | None = None
    rope_theta: float | None = None
    scale: float | None = None
    """Factor of the scores. None: `head_dim ** -0.5`."""
    softcap: float | None = None
    """Scores are c * tanh(score / c) for this c (Gemma 2, arXiv 2408.00118)."""
    sinks: bool = False
    """Whether each head has the logit of a key without a value, which all tokens see (gpt-oss)."""
    short_conv_kernel: int = 0
    """Tokens of a short convolution of queries, keys and values. 0: there is none."""
    bias: bool = False
    """Whether queries, keys and values have a bias."""
    output_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised before the rotation (arXiv 2302.05442)."""
    value_norm: bool = False
    """Whether values are normalised, too, without weights."""
    keys_are_values: bool = False
    """Whether keys are also the values, before the norms and the rotation. Keys then rotate as halves, so that the
    channels of values have the order of Hugging Face's files."""
    norm_all_heads: bool = False
    """Whether one norm covers the queries, or the keys, of all heads together."""
    gate: bool = False
    """Whether each head's output is multiplied by a sigmoid (arXiv 2505.06708). Its rows in `wq` follow the query's."""

    is_recurrent = False
    names: ClassVar[Names] = {
        "wq": "self_attn.q_proj",
        "wk": "self_attn.k_proj",
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "sinks.weight": "self_attn.sinks",
    }

    @property
    def sizes(self) -> tuple[int, int]:
        """Channels of the queries, and of the keys, of all heads."""
        return self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank, by name.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        queries, keys = (size // tp for size in self.sizes)
        values = {} if self.keys_are_values else {"wv": (keys, dim)}
        return {
            "wq": (queries * (1 + self.gate), dim),
            "wk": (keys, dim),
            **values,
            "wo": (dim, queries),
        }

    def other_weights(self) -> int:
        """Return the number of weights of the short convolution."""
        queries, keys = self.sizes
        return (queries + 2 * keys) * self.short_conv_kernel

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of sinks, norms and biases.

        Args:
            dim: Channels of the hidden states.
        """
        queries, keys = self.sizes
        normed = queries + keys if self.norm_all_heads else 2 * self.head_dim
        biases = queries * (1 + self.gate) + keys * (2 - self.keys_are_values)
        return (
            self.n_heads * self.sinks
            + normed * self.qk_norm
            + biases * self.bias
            + dim * self.output_bias
        )

    def flops(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs per token of a training step, without weights, as (full, causal) attention counts.

        Args:
            seq_len: Number of tokens of a sequence.
        """
        each_key = 12.0 * self.n_heads * self.head_dim
        return each_key * seq_len, each_key * visible_keys(self.window, seq_len)

    def tensor_parallel_sizes(self) -> Sizes:
        """Return the query heads and the key/value heads."""
        return {"attention heads": self.n_heads, "key/value heads": self.n_kv_heads}


@dataclass(frozen=True)
class SharedKeysArgs(AttentionArgs):
    """Attention that computes queries, and reads the keys and values of an earlier layer (arXiv 2405.05254)."""

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        shapes = super().linear_shapes(dim, tp)
        return {name: shapes[name] for name in ("wq", "wo")}

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of sinks, norms and biases.

        Args:
            dim: Channels of the hidden states.
        """
        biases = self.sizes[0] * self.bias + dim * self.output_bias
        return self.n_heads * self.sinks + self.head_dim * self.qk_norm + biases


@dataclass(frozen=True)
class GlobalHeads:
    """Heads of the layers that see all earlier tokens, where they differ from the heads of other layers (Gemma 4)."""

    head_dim: int
    n_kv_heads: int
    keys_are_values: bool = False
    """Whether keys are also the values."""


@dataclass(frozen=True)
class LatentArgs:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    rank: int
    """Width of the latent, from which keys and values of all heads are computed."""
    nope_dim: int
    """Channels of a head's query and key that are not rotated."""
    rope_dim: int
    """Rotated channels after them; all heads share the rotated channels of a key."""
    value_dim: int
    """Channels of a head's value, at most the channels of its key."""
    query_rank: int | None = None
    """Width of the latent of queries. None: queries are computed from the hidden states."""

    @property
    def head_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def up_projection(self, n_heads: int) -> int:
        """Return the number of weights that make keys and values from latents.

        Args:
            n_heads: Number of heads.
        """
        return n_heads * (self.nope_dim + self.value_dim) * self.rank


@dataclass(frozen=True)
class LatentAttentionArgs:
    """Latent attention of one layer."""

    n_heads: int
    latent: LatentArgs
    scale: float
    """Factor of the scores."""
    window: int | None = None
    rope_theta: float | None = None

    is_recurrent = False
    names: ClassVar[Names] = {
        "wq": "self_attn.q_proj",
        "wq_a": "self_attn.q_a_proj",
        "q_a_norm": "self_attn.q_a_layernorm",
        "wq_b": "self_attn.q_b_proj",
        "wkv_a": "self_attn.kv_a_proj_with_mqa",
        "kv_a_norm": "self_attn.kv_a_layernorm",
        "wkv_b": "self_attn.kv_b_proj",
        "wo": "self_attn.o_proj",
    }

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank, by name.

        Every rank has the whole modules `wq_a` and `wkv_a`. The up-projection of latents is no linear module.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        latent = self.latent
        queries = self.n_heads * latent.head_dim // tp
        shapes = {"wq": (queries, dim)}
        if latent.query_rank is not None:
            shapes = {"wq_a": (latent.query_rank, dim), "wq_b": (queries, latent.query_rank)}
        return shapes | {
            "wkv_a": (latent.rank + latent.rope_dim, dim),
            "wo": (dim, self.n_heads * latent.value_dim // tp),
        }

    def other_weights(self) -> int:
        """Return the number of weights that make keys and values from latents."""
        return self.latent.up_projection(self.n_heads)

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of the norms.

        Args:
            dim: Not used.
        """
        return self.latent.rank + (self.latent.query_rank or 0)

    def flops(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs per token of a training step, without weights, as (full, causal) attention counts.

        Args:
            seq_len: Number of tokens of a sequence.
        """
        each_key = 6.0 * self.n_heads * (self.latent.head_dim + self.latent.value_dim)
        return each_key * seq_len, each_key * visible_keys(self.window, seq_len)

    def tensor_parallel_sizes(self) -> Sizes:
        """Return the heads."""
        return {"attention heads": self.n_heads}


@dataclass(frozen=True)
class IndexArgs:
    """Sizes of the indexer that chooses the keys of sparse attention (DeepSeek-V3.2-Exp, 2025)."""

    n_heads: int
    head_dim: int
    """Channels of an index head. The first ones rotate: the number of rotated channels of a key of attention."""
    per_query: int
    """Keys that a query attends to."""
    adjacent_pairs: bool = False
    """Whether rotary pairs are adjacent channels, as in attention (GLM-5), and not halves."""


@dataclass(frozen=True)
class SparseAttentionArgs(LatentAttentionArgs):
    """Latent attention of one layer, in which each query attends to the keys that an indexer has chosen."""

    index: IndexArgs = field(kw_only=True)

    names: ClassVar[Names] = LatentAttentionArgs.names | {
        "indexer.queries": "self_attn.indexer.wq_b",
        "indexer.keys": "self_attn.indexer.wk",
        "indexer.key_norm": "self_attn.indexer.k_norm",
        "indexer.head_weights": "self_attn.indexer.weights_proj",
    }

    def linear_shapes(self, dim: int, tp: int = 1) -> Shapes:
        """Return (outputs, inputs) of its linear modules on one tensor-parallel rank, by name.

        Every rank has the whole indexer.

        Args:
            dim: Channels of the hidden states.
            tp: Tensor-parallel degree.
        """
        index = self.index
        return super().linear_shapes(dim, tp) | {
            "indexer.queries": (index.n_heads * index.head_dim, self.latent.query_rank),
            "indexer.keys": (index.head_dim, dim),
            "indexer.head_weights": (index.n_heads, dim),
        }

    def vectors(self, dim: int) -> int:
        """Return the number of parameters of the norms.

        Args:
            dim: Not used.
        """
        return super().vectors(dim) + 2 * self.index.head_dim

    def flops(self, seq_len: int) -> tuple[float, float]:
        """Return FLOPs per token of a training step, without weights, as (full, causal) attention counts.

        The indexer scores all visible keys, in the forward alone. Attention reads latents of chosen keys.

        Args:
            seq_len: Number of tokens of a sequence.
        """
        index = self.index
        latent = self.latent
        score = 2.0 * index.n_heads * (index.head_dim + 1)
        each_key = 6.0 * self.n_heads * (2 * latent.rank + latent.rope_dim) + 3 * score
        chosen = min(index.per_query, seq_len)
        return (
            score * seq_len + each_key * chosen,
            score * visible_keys(None, seq_len) + each_key * visible_keys(chosen, seq_len),
        )

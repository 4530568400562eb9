"""Shapes of the Llama 3 family. Torch-free, so that the configuration can be checked at once.

Sources: "The Llama 3 Herd of Models" (arXiv 2407.21783) and the model cards of Llama 3, 3.1 and 3.2.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: long wavelengths stretched by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class TransformerArgs:
    """Shape of one decoder. `vocab_size` and `max_seq_len` come from the tokenizer and `training.seq_len`."""

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

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def module_names(self) -> tuple[str, ...]:
        """The modules that a pipeline can divide, in the order of the forward."""
        return ("tok_embeddings", *(f"layers.{i}" for i in range(self.n_layers)), "norm", "output")

    def window_of_layer(self, layer: int) -> int | None:
        """Tokens that a token sees in this layer, itself and those before it; None: all before it."""
        return self.sliding_window if layer % self.sliding_window_every == 0 else None

    def n_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        norm = self.dim * {"rmsnorm": 1, "layernorm": 1, "np_layernorm": 0}[self.norm_type]
        embedding = self.vocab_size * self.dim
        return (
            self.n_layers * (self._layer_matrices() + 2 * norm + self.n_heads * self.attention_sinks)
            + norm
            + embedding * (1 if self.tie_embeddings else 2)
        )

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        """Model FLOPs per token of a training step (forward + backward) as (full attention, causal attention).

        The first is the convention of the PaLM paper (arXiv 2204.02311, appendix B): 6 per weight of a matrix
        product plus 12 * layers * dim * seq_len, as if every query saw every key. The second counts only
        what a causal mask, or a sliding window, leaves: (seq_len + 1) / 2 keys per query, or fewer. The embedding
        look-up is no product.
        """
        matrices = 6.0 * (self.n_layers * self._layer_matrices() + self.vocab_size * self.dim)
        attention = 12.0 * self.n_heads * self.head_dim
        keys = sum(self._keys_per_query(layer, seq_len) for layer in range(self.n_layers))
        return matrices + attention * self.n_layers * seq_len, matrices + attention * keys

    def _keys_per_query(self, layer: int, seq_len: int) -> float:
        """Mean number of keys that a query of this layer sees."""
        window = min(self.window_of_layer(layer) or seq_len, seq_len)
        return window - window * (window - 1) / 2 / seq_len

    def _layer_matrices(self) -> int:
        attention = self.head_dim * self.dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        return attention + 3 * self.dim * self.ffn_hidden_dim


# The published 8B and 70B are Llama 3 here (no scaling); `model.rope_scaling = 8.0` makes them Llama 3.1.
FLAVORS: dict[str, TransformerArgs] = {
    "debugmodel": TransformerArgs(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, ffn_hidden_dim=512),
    "1B": TransformerArgs(
        dim=2048,
        n_layers=16,
        ffn_hidden_dim=8192,
        rope_scaling=RopeScaling(32.0),
        tie_embeddings=True,
    ),
    "3B": TransformerArgs(
        dim=3072,
        n_layers=28,
        n_heads=24,
        ffn_hidden_dim=8192,
        rope_scaling=RopeScaling(32.0),
        tie_embeddings=True,
    ),
    "8B": TransformerArgs(),
    "70B": TransformerArgs(dim=8192, n_layers=80, n_heads=64, ffn_hidden_dim=28672),
    "405B": TransformerArgs(dim=16384, n_layers=126, n_heads=128, ffn_hidden_dim=53248, rope_scaling=RopeScaling(8.0)),
}

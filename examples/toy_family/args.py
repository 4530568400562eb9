"""Shapes of the toy family. Torch-free."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from trainer.config.errors import ConfigError
from trainer.config.schema import Model
from trainer.families.args import decoder_modules
from trainer.families.feed_forward_args import DenseArgs
from trainer.families.layers import Layer, NormArgs
from trainer.families.mixers import AttentionArgs


@dataclass(frozen=True)
class ToyArgs:
    """Arguments of one decoder, whose heads together are wider than its hidden states."""

    task: ClassVar[str] = "tokens"
    free_to_change: ClassVar[frozenset[str]] = frozenset({"max_seq_len"})

    dim: int = 64
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 16
    hidden_dim: int = 96
    vocab_size: int = 0
    max_seq_len: int = 0
    tie_embeddings: bool = False
    norms_have_parameters: bool = True
    qk_norm: bool = False

    def configured(self, settings: Model, *, vocab_size: int, max_seq_len: int) -> "ToyArgs":
        if settings.sliding_window is not None:
            raise ConfigError("model.sliding_window: the toy family has none; leave it out")
        return replace(self, vocab_size=vocab_size, max_seq_len=max_seq_len)

    def module_names(self) -> tuple[str, ...]:
        return decoder_modules(self.n_layers)

    def window_of_layer(self, layer: int) -> int | None:
        return None

    def layer(self, number: int) -> Layer:
        """Return the record of a layer, by which the trainer computes shapes, parameters and FLOPs.

        Args:
            number: Number of the layer.
        """
        attention = AttentionArgs(self.n_heads, self.n_kv_heads, self.head_dim, bias=True, output_bias=True)
        return Layer(attention, DenseArgs(self.hidden_dim, bias=True), NormArgs("layernorm"))

    def linear_shapes(self, tp: int = 1) -> dict[str, tuple[int, int]]:
        shapes = {
            f"layers.{number}.{name}": shape
            for number in range(self.n_layers)
            for name, shape in self.layer(number).linear_shapes(self.dim, tp).items()
        }
        return shapes | {"output": (self.vocab_size // tp, self.dim)}

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {"key/value heads": self.n_kv_heads, "channels": self.hidden_dim, "tokens": self.vocab_size}

    def n_params(self) -> int:
        norms = 2 * self.dim * (2 * self.n_layers + 1)
        matrices = sum(rows * columns + rows for rows, columns in self.linear_shapes().values())
        return self.vocab_size * self.dim + norms + matrices - self.vocab_size  # the output has no bias

    def words(self) -> str:
        return f"{self.n_layers} layers of width {self.dim}"

    def flops_per_token(self, seq_len: int) -> tuple[float, float]:
        matrices = 6.0 * sum(map(math.prod, self.linear_shapes().values()))
        attention = 12.0 * self.n_layers * self.n_heads * self.head_dim
        return matrices + attention * seq_len, matrices + attention * (seq_len + 1) / 2


FLAVORS = {"toy": ToyArgs(), "toy4": ToyArgs(n_layers=4)}

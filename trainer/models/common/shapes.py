"""Parts of model arguments that families share. Torch-free."""

import math
from dataclasses import dataclass


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

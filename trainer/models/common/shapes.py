"""Parts of model arguments that families share. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: stretch long wavelengths by `factor`, keep short ones, with a ramp between."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


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

"""The modules of a decoder for one pipeline stage."""

from collections.abc import Collection

from torch import nn


def keep_stage(model: nn.Module, modules: Collection[str]) -> None:
    """Remove all but the named modules from a whole model on meta; names of modules and parameters stay.

    The forward then takes the previous stage's hidden states instead of tokens, and returns hidden states.
    """
    for name in ("tok_embeddings", "norm", "output"):
        if name not in modules:
            setattr(model, name, None)
    for layer in list(model.layers):
        if f"layers.{layer}" not in modules:
            del model.layers[layer]

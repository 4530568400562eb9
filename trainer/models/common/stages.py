"""A part of a decoder for one pipeline stage."""

from collections.abc import Collection

from torch import nn


def keep_stage(model: nn.Module, modules: Collection[str]) -> None:
    """Leave in a whole model, on meta, only the modules named; their names, and those of parameters, stay.

    Its forward then takes the hidden states of the stage before it in the place of tokens, and gives those for the
    next.
    """
    for name in ("tok_embeddings", "norm", "output"):
        if name not in modules:
            setattr(model, name, None)
    for layer in list(model.layers):
        if f"layers.{layer}" not in modules:
            del model.layers[layer]

"""Tensors of a family as Hugging Face names and lays them out, and back, one at a time, from and to any file format."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trainer.config.errors import ConfigError
from trainer.models.model_spec import Counterpart, ModelSpec

Named = Iterable[tuple[str, torch.Tensor]]


def to_hf(spec: ModelSpec, args: Any, tensors: Named) -> Named:
    """Yield the whole tensors of a model of shape `args` as its counterpart at Hugging Face has them, perhaps as views.

    A parameter that several modules share counts once, under the first of its names.

    Raises:
        ConfigError: the family has no counterpart there; a surplus, missing or misshapen tensor, by its name.
    """
    wanted = {name: (ours.shape, hf.name, hf.to_hf) for name, ours, hf in _counterparts(spec, args)}
    return _converted(wanted, tensors)


def from_hf(spec: ModelSpec, args: Any, tensors: Named) -> Named:
    """Yield the tensors of Hugging Face's model as ours of shape `args` has them; the reverse of `to_hf`."""
    wanted = {hf.name: (hf.to_hf(ours).shape, name, hf.from_hf) for name, ours, hf in _counterparts(spec, args)}
    return _converted(wanted, tensors)


def _counterparts(spec: ModelSpec, args: Any) -> list[tuple[str, torch.Tensor, Counterpart]]:
    """Every tensor of the model, by name and on meta, with its counterpart."""
    if spec.state_dict_adapter is None:
        raise ConfigError(f"model.name = {spec.name!r} has no counterpart in Hugging Face's transformers")
    with torch.device("meta"):
        state = spec.build(args).state_dict(keep_vars=True)
    first_names = {tensor: name for name, tensor in reversed(state.items())}
    return [(name, x, spec.state_dict_adapter(args, name)) for name, x in state.items() if first_names[x] == name]


def _converted(wanted: dict[str, tuple], tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """wanted: name of a tensor -> its shape, its new name, and what changes its layout."""
    for name, tensor in tensors:
        if name not in wanted:
            raise ConfigError(f"{name} is no tensor of this model, or came twice")
        shape, new_name, change = wanted.pop(name)
        if tensor.shape != shape:
            raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}, and this model's has {tuple(shape)}")
        yield new_name, change(tensor)
    if wanted:
        raise ConfigError(f"{len(wanted)} tensors of this model are missing, the first of them {next(iter(wanted))}")

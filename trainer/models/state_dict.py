"""Convert tensors to the names and layouts of Hugging Face and back, one at a time, for any file format."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trainer.config.errors import ConfigError
from trainer.models.model_spec import Counterpart, ModelSpec

Named = Iterable[tuple[str, torch.Tensor]]


def to_hf(spec: ModelSpec, args: Any, tensors: Named) -> Named:
    """Yield the whole tensors of a model with arguments `args` as Hugging Face has them, possibly as views.

    A shared parameter counts once, under the first of its names.

    Raises:
        ConfigError: the family has no counterpart at Hugging Face; a tensor is unknown, missing or of another shape.
    """
    wanted = {name: (ours.shape, hf.name, hf.to_hf) for name, ours, hf in _counterparts(spec, args)}
    return _converted(wanted, tensors)


def from_hf(spec: ModelSpec, args: Any, tensors: Named) -> Named:
    """Yield the tensors of Hugging Face's model as ours with arguments `args` has them; the reverse of `to_hf`."""
    wanted = {hf.name: (hf.to_hf(ours).shape, name, hf.from_hf) for name, ours, hf in _counterparts(spec, args)}
    return _converted(wanted, tensors)


def _counterparts(spec: ModelSpec, args: Any) -> list[tuple[str, torch.Tensor, Counterpart]]:
    """Return every tensor of the model, by name and on meta, with its counterpart."""
    if spec.state_dict_adapter is None:
        raise ConfigError(f"model.name = {spec.name!r} has no counterpart in Hugging Face's transformers")
    with torch.device("meta"):
        state = spec.build(args).state_dict(keep_vars=True)
    first_names = {tensor: name for name, tensor in reversed(state.items())}
    return [(name, x, spec.state_dict_adapter(args, name)) for name, x in state.items() if first_names[x] == name]


def _converted(wanted: dict[str, tuple], tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield converted tensors. wanted: name -> shape, new name, and the function that changes the layout."""
    for name, tensor in tensors:
        if name not in wanted:
            raise ConfigError(f"{name} is no tensor of this model, or came twice")
        shape, new_name, change = wanted.pop(name)
        if tensor.shape != shape:
            raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}, and this model's has {tuple(shape)}")
        yield new_name, change(tensor)
    if wanted:
        raise ConfigError(f"{len(wanted)} tensors of this model are missing, the first of them {next(iter(wanted))}")

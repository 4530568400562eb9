"""A model's tensors beside their counterparts at Hugging Face, and their conversion, for any file format."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config.errors import ConfigError
from trainer.models.model_spec import Counterpart, ModelSpec

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Pair:
    """A tensor of ours, on meta, and its counterpart with its shape there."""

    ours: torch.Tensor
    hf: Counterpart
    hf_shape: torch.Size


def pairs(spec: ModelSpec, args: Any) -> dict[str, Pair]:
    """Return every tensor of a model with arguments `args`, by our name; a shared parameter once, by its first name.

    Raises:
        ConfigError: the family, or a feature of it, has no counterpart at Hugging Face.
    """
    if spec.state_dict_adapter is None:
        raise ConfigError(f"model.name = {spec.name!r} has no counterpart in Hugging Face's transformers")
    with torch.device("meta"):
        state = spec.build(args).state_dict(keep_vars=True)
    first_names = {tensor: name for name, tensor in reversed(state.items())}
    found = {name: (x, spec.state_dict_adapter(args, name)) for name, x in state.items() if first_names[x] == name}
    return {name: Pair(x, hf, hf.to_hf(x).shape) for name, (x, hf) in found.items()}


def ties(spec: ModelSpec, args: Any) -> dict[str, str]:
    """Return the second names of shared parameters at Hugging Face, which files need not have -> the first names."""
    with torch.device("meta"):
        state = spec.build(args).state_dict(keep_vars=True)
    names: dict[torch.Tensor, list[str]] = {}
    for name, x in state.items():
        names.setdefault(x, []).append(spec.state_dict_adapter(args, name).name)
    return {second: first for first, *others in names.values() for second in others}


def to_hf(spec: ModelSpec, args: Any, tensors: Named) -> Named:
    """Yield the whole tensors of a model with arguments `args` as Hugging Face has them, possibly as views.

    Raises:
        ConfigError: the family has no counterpart at Hugging Face; a tensor is unknown, missing or of another shape.
    """
    found = pairs(spec, args)
    return _converted({name: (pair.ours.shape, pair.hf.name, pair.hf.to_hf) for name, pair in found.items()}, tensors)


def from_hf(spec: ModelSpec, args: Any, tensors: Named) -> Named:
    """Yield the tensors of Hugging Face's model as ours with arguments `args` has them; the reverse of `to_hf`."""
    found = pairs(spec, args)
    return _converted({pair.hf.name: (pair.hf_shape, name, pair.hf.from_hf) for name, pair in found.items()}, tensors)


def _converted(wanted: dict[str, tuple], tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield converted tensors. wanted: name -> shape, new name, and the function that changes the layout."""
    for name, tensor in tensors:
        if name not in wanted:
            raise ConfigError(f"{name} is no tensor of this model, or came twice")
        shape, new_name, change = wanted.pop(name)
        _check_shape(name, tensor.shape, shape)
        yield new_name, change(tensor)
    _check_complete(wanted)


def check_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that tensors, given by their shapes, are those of the model.

    Raises:
        ConfigError: a tensor is unknown, missing or of another shape.
    """
    for name, shape in found.items():
        if name not in wanted:
            raise ConfigError(f"{name} is no tensor of this model")
        _check_shape(name, shape, wanted[name])
    _check_complete([name for name in wanted if name not in found])


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(found) != tuple(wanted):
        raise ConfigError(f"{name} has the shape {tuple(found)}, and this model's has {tuple(wanted)}")


def _check_complete(missing: Iterable[str]) -> None:
    if missing := list(missing):
        raise ConfigError(f"{len(missing)} tensors of this model are missing, the first of them {missing[0]}")

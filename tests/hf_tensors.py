"""Whole tensors of a model under the names and in the layouts of Hugging Face, and back."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainer.models.model_spec import ModelSpec, hf_model


def to_hf(spec: ModelSpec, args: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pairs = hf_model(spec, args).pairs
    return {there: y for name, x in tensors for there, y in pairs[name][1].tensors(x).items()}


def from_hf(spec: ModelSpec, args: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([torch.cat([tensors[part] for part in row]) for row in hf.stacked])
        if hf.stacked
        else hf.from_hf(tensors[hf.name])
        for name, (_, hf) in hf_model(spec, args).pairs.items()
    }

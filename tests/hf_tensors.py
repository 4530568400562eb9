"""Whole tensors of a model under the names and in the layouts of Hugging Face, and back."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainer.models.model_spec import ModelSpec, hf_model


def to_hf(spec: ModelSpec, args: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    own, there = dict(tensors), {}
    for name, (_, hf) in hf_model(spec, args).pairs.items():
        for other, y in hf.tensors(own[name]).items() if name in own else ():
            there[other] = torch.cat((there[other], y)) if hf.first_row else y
    return there


def from_hf(spec: ModelSpec, args: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([torch.cat([tensors[part] for part in row]) for row in hf.stacked])
        if hf.stacked
        else hf.from_hf(tensors[hf.name][hf.first_row :][: len(ours) if hf.all_rows else None])
        for name, (ours, hf) in hf_model(spec, args).pairs.items()
    }

"""Folders of transformers that tests read."""

from pathlib import Path

import safetensors.torch
import torch

from trainer.config.loader import parse_command_line
from trainer.job import ResolvedJob, resolve


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by safetensors itself."""
    files = folder.glob("*.safetensors")
    return {name: x for file in files for name, x in safetensors.torch.load_file(file).items()}


def resolved(*arguments: str) -> ResolvedJob:
    return resolve(parse_command_line(list(arguments)).config, 1, "cpu")

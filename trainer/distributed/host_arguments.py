"""Arguments of a model that stay in host memory under FSDP, which moves every tensor argument of its root to the GPU.

The plan of attention is such an argument: its numbers are read in every attention. On a GPU each reading would wait for
the device to finish all its work.
"""

from typing import Any

import torch
from torch import nn


class _Held:
    """A tensor in an object in which FSDP finds none."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def keep_on_host(model: nn.Module, *names: str) -> None:
    """Hide these arguments, given by name, from FSDP's hooks of `model`. Call it after `fully_shard`."""

    def hide(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {
            name: _Held(x) if name in names and isinstance(x, torch.Tensor) else x for name, x in kwargs.items()
        }

    def show(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {name: x.tensor if isinstance(x, _Held) else x for name, x in kwargs.items()}

    model.register_forward_pre_hook(hide, prepend=True, with_kwargs=True)  # before the hook of `fully_shard`
    model.register_forward_pre_hook(show, with_kwargs=True)

"""Rules for `torch.autocast`: this project's operators cast as F.scaled_dot_product_attention does."""

from typing import Any

import torch

_LIBRARY = torch.library.Library("trainer", "FRAGMENT")
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def add_autocast_rule(name: str, *, casts: int) -> None:
    """Register a rule for the operator `trainer::name`: cast its first `casts` arguments, but not float64.

    Inside the operator autocast is off, so that its float32 tensors stay float32.
    """
    for device_type, key in _KEYS.items():
        _LIBRARY.impl(name, _rule(getattr(torch.ops.trainer, name).default, device_type, casts), key)


def _rule(operator: Any, device_type: str, casts: int) -> Any:
    def run(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        cast = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in args[:casts]]
        with torch.autocast(device_type, enabled=False):
            return operator(*cast, *args[casts:])

    return run

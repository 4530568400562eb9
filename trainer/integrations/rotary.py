"""Rotary tables that depend on the largest position: transformers' `dynamic` and `longrope`.

Their frequencies depend on `max(position_ids) + 1`, and a rank has the positions of its part only. So each rank appends
the largest position of all ranks to its own, and drops the last row of the table.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.distributed.sharding.exchange import all_reduce
from trainer.integrations.calls import outside_of_graphs


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module's table depends on the largest position."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


class GlobalLength:
    """Hooks that give a rotary module the largest position of all ranks of a mesh. Each call is a collective."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def hook(self, module: nn.Module) -> list[RemovableHandle]:
        """Put the hooks on a module; return handles that remove them."""
        return [
            module.register_forward_pre_hook(self._lengthen, with_kwargs=True),
            module.register_forward_hook(self._shorten),
        ]

    @outside_of_graphs
    def _lengthen(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if not isinstance(positions, torch.Tensor) or positions.ndim < 2:
            raise ContextParallelError(
                f"{type(module).__name__} has a rotary table that depends on the largest position, and was called "
                "without `position_ids`; use another rope_type, such as 'linear', 'yarn' or 'llama3'"
            )
        largest = all_reduce(positions.max().reshape(1), self._mesh, "max")
        longer = torch.cat([positions, largest.expand(*positions.shape[:-1], 1)], dim=-1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    @outside_of_graphs
    def _shorten(self, module: nn.Module, args: tuple, table: Any) -> Any:
        if isinstance(table, torch.Tensor):
            return table[..., :-1, :]
        return tuple(x[..., :-1, :] for x in table)

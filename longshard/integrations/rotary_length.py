"""Rotary tables that depend on the longest sequence: give them the largest position of all ranks.

In transformers, the frequencies of `dynamic` and `longrope` depend on max(position_ids) + 1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from longshard.context.planning.options import ContextParallelError
from longshard.sharding.exchange import all_reduce


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module's table depends on the largest position, which may be on another rank.

    Args:
        module: The module.
    """
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def lengthened(
    mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Return a rotary module's arguments with one more position in `position_ids`: the largest of all ranks.

    A collective. The table then has one row more, which `shortened` removes.

    Args:
        mesh: The 1-D mesh of the ranks.
        module: The rotary module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ContextParallelError: The arguments have no `position_ids`.
    """
    positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    if not isinstance(positions, Tensor) or positions.ndim < 2:
        raise ContextParallelError(
            f"{type(module).__name__} has a rotary table that depends on the largest position, and was called "
            "without `position_ids`; use another rope_type, such as 'linear', 'yarn' or 'llama3'"
        )
    largest = all_reduce(positions.max().reshape(1), mesh, "max")
    longer = torch.cat([positions, largest.expand(*positions.shape[:-1], 1)], dim=-1)
    if "position_ids" in kwargs:
        return args, kwargs | {"position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def shortened(module: nn.Module, args: tuple, kwargs: dict, table: Any) -> Any:
    """Return a rotary module's table, or tables, without the row of the position that `lengthened` appended.

    Args:
        module: The rotary module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        table: The table, (..., S + 1, D), or several.
    """
    return (
        table[..., :-1, :]
        if isinstance(table, Tensor)
        else tuple(x[..., :-1, :] for x in table)
    )

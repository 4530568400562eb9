"""Reads the work of an operator from its arguments: FLOPs, bytes, the kernel of attention, the direction of a copy."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lct_planner.device import is_pinned
from lct_planner.stand_ins import ATTENTION
from longshard.context.execution.build import Execution
from longshard.context.planning.lowering import is_large


def flops(func: torch._ops.OpOverload, name: str, args: tuple, result: Any) -> int:
    """Return the FLOPs of an operator on one rank.

    Attention and matrix products are counted here, other operators by PyTorch's FLOP counter; 0 if it has no formula.

    Attention counts as causal: half of all pairs. Its keys must be (B, H, S, D).

    Args:
        func: The operator.
        name: Its name.
        args: Its arguments.
        result: Its result.
    """
    if name in ATTENTION:
        q, k = args[1:3] if "backward" in name else args[:2]
        return (5 if "backward" in name else 2) * q.numel() * k.shape[-2]
    if name in ("mm", "addmm", "_scaled_mm", "_grouped_mm"):
        a, b = args[1:3] if name == "addmm" else args[:2]
        return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else count(*args, out_val=result)


def kernel_name(execution: Execution) -> str:
    """Return the kernel of an execution.

    If a kernel gives large tiles to cuDNN, return "cudnn" or "varlen", by which of them has more pairs.

    Args:
        execution: A plan bound to a kernel.
    """
    run = getattr(execution, "inner", execution)
    capabilities = run.kernel.capabilities
    if not capabilities.large:
        return run.kernel.name
    calls = [
        call for launches in run.lowered.forward for launch in launches for call in launch.calls
    ]
    large = sum(call.pairs for call in calls if is_large(call, capabilities))
    return "cudnn" if 2 * large > sum(call.pairs for call in calls) else "varlen"


def has_stages(execution: Execution) -> bool:
    """Return whether ranks wait for each other between tiles, as in a ring.

    Args:
        execution: A plan bound to a kernel.
    """
    return any(
        stage.messages and not stage.collective
        for stage in getattr(execution, "inner", execution).plan.forward
    )


def parallel_rows(name: str, args: tuple, *, in_stages: bool) -> int:
    """Return over how many rows x heads a kernel of attention spreads: of queries, in the backward of keys.

    Args:
        name: Name of the operator.
        args: Its arguments.
        in_stages: Whether ranks wait for each other between tiles. Then the smaller of queries and keys counts, because
            another rank has as many queries as this rank has keys, and the slowest rank decides.
    """
    is_backward = "backward" in name
    q, k = args[is_backward : is_backward + 2]
    heads = 1 if name.startswith("_scaled_dot_product") else -2
    queries = q.numel() // q.shape[-1]
    keys = k.numel() // k.shape[-1] * q.shape[heads] // k.shape[heads]
    return max(min(queries, keys) if in_stages else (keys if is_backward else queries), 1)


def moved(args: tuple, result: Any) -> int:
    """Return the bytes of all tensors that an operator reads or returns, each tensor once.

    Args:
        args: The arguments.
        result: The result.
    """
    tensors = {id(x): x for x in tree_leaves((args, result)) if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in tensors.values())


def is_handle(x: object) -> bool:
    """Return whether an argument is the handle of an attention plan (`live.py`).

    Args:
        x: The argument.
    """
    return isinstance(x, Tensor) and x.dtype == torch.int64 and x.device.type == "cpu"


def shapes(name: str, args: tuple) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of q and k of an attention operator.

    Args:
        name: Name of the operator.
        args: Its arguments.
    """
    if not name.endswith("backward"):
        return tuple(x.shape for x in args[:2])
    dout, saved, kv_heads, *_ = args
    b, _, s, d = dout.shape
    return (
        tuple(x.shape for x in saved[:2])
        if len(saved) > 2
        else (dout.shape, torch.Size((b, kv_heads, s, d)))
    )


def direction(name: str, args: tuple, kwargs: dict[str, Any], result: Tensor) -> str:
    """Return the direction of a copy between host and device, and why the host waits; "" within a device.

    For example: "cpu to cuda, blocking, pageable".

    Args:
        name: Name of the operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: Its result, a tensor of any shape.
    """
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
    kinds = source.device.type, target.device.type
    if kinds[0] == kinds[1]:
        return ""
    on_host = source if kinds[0] == "cpu" else target
    waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    pageable = kinds[0] == "cpu" and not is_pinned(on_host)
    return f"{kinds[0]} to {kinds[1]}" + ", blocking" * waits + ", pageable" * pageable

"""Attention calls of models that this project did not write, and what hands them to an `Interception`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from trainer.distributed.context_parallel.planning.options import ContextParallelError

NOT_COMPILED = "`intercept_sdpa` cannot be compiled; the model runs as it is inside the context"
# The compiler breaks its graph at a function with this mark; where it may not (fullgraph), it raises with this reason.
outside_of_graphs = torch.compiler.disable(reason=NOT_COMPILED)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a model: q (B, H, S, D), k and v (B, K, S, D), and its options.

    window: how many keys a query sees, its own among them; 0: no window. sinks: (H,), as for the operator. refusal: why
    the call cannot be context parallel, or None. told: further arguments of the model's attention, by name.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None
    is_causal: bool
    window: int = 0
    sinks: torch.Tensor | None = None
    refusal: str | None = None
    told: Mapping[str, Any] = field(default_factory=dict)


def attend(q: torch.Tensor, call: Call) -> torch.Tensor:
    """Hand a call to the `Interception` in force.

    Raises:
        ContextParallelError: no interception is in force.
    """
    if has_torch_function_unary(q):
        return handle_torch_function(attend, (q,), call)
    raise ContextParallelError(
        "context-parallel attention was called outside its context; enter "
        "`context_parallel(..., intercept=intercept_sdpa())` around the forward and the backward"
    )


def is_intercepted(x: torch.Tensor) -> bool:
    """Return whether an `Interception` is in force here."""
    return has_torch_function_unary(x) and handle_torch_function(is_intercepted, (x,), x)


def refusal_of_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> str | None:
    """Return why attention of these inputs cannot be context parallel, or None."""
    if mask is not None:
        return (
            f"this attention got a mask of shape {tuple(mask.shape)}, which says nothing of the tokens of other ranks; "
            "give the model no mask (transformers: an all-ones `attention_mask`, cut as a buffer), and packed "
            "documents as `context_parallel(mask=...)`"
        )
    if dropout > 0:
        return f"attention with dropout {dropout} cannot be context parallel; set the model's attention dropout to 0"
    if not q.ndim == k.ndim == v.ndim == 4 or q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        return (
            f"attention of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} cannot be intercepted; give "
            "queries (B, H, S, D), and keys and values (B, K, S, D)"
        )
    if len({q.shape[-1], k.shape[-1], v.shape[-1]}) > 1:
        return (
            f"attention with heads of size {q.shape[-1]} for queries and {v.shape[-1]} for values cannot be context "
            "parallel; both must be of one size"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads; their number must divide it"
    return None

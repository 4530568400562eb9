"""Attention calls of models that this project did not write, and the attention function for transformers' registry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from longshard.context.planning.options import ContextParallelError

NOT_COMPILED = "`intercept_sdpa` cannot be compiled; the model runs as it is inside the context"
# The compiler breaks its graph at a function with this mark. If it may not (fullgraph), it raises with this reason.
outside_of_graphs = torch.compiler.disable(reason=NOT_COMPILED)

# Arguments of transformers' attention functions that do not change attention; any other one must be empty.
_WITHOUT_EFFECT = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "output_router_logits",
    "num_items_in_batch",
    "sliding_window",
}


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a model.

    Attributes:
        q: The queries, (B, H, S, D).
        k: The keys, (B, K, S, D).
        v: The values, (B, K, S, D).
        scale: Factor of the scores; None means the default.
        is_causal: Whether later tokens are hidden.
        window: Number of keys that a query sees, its own among them; 0 means no window.
        sinks: (H,), as for the operator; None if absent.
        positions: The positions that the model passes to its attention; None if absent.
        hides_from: The distance from which on tokens are hidden in another way than by a window; 0 if absent.
        refusal: Why the call cannot be context parallel; None if it can.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    is_causal: bool
    window: int = 0
    sinks: Tensor | None = None
    positions: Tensor | None = None
    hides_from: int = 0
    refusal: str | None = None


def attend(q: Tensor, call: Call) -> Tensor:
    """Return the result of a call, which the interception in force runs.

    Args:
        q: The queries, (B, H, S, D).
        call: The call.

    Raises:
        ContextParallelError: No interception is in force.
    """
    if has_torch_function_unary(q):
        return handle_torch_function(attend, (q,), call)
    raise ContextParallelError(
        "context-parallel attention was called outside its context; enter "
        "`context_parallel(..., intercept=intercept_sdpa())` around the forward and the backward"
    )


def is_intercepted(x: Tensor) -> bool:
    """Return whether an `Interception` is in force here.

    Args:
        x: A tensor of any shape.
    """
    return has_torch_function_unary(x) and handle_torch_function(is_intercepted, (x,), x)


def refusal_of_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> str | None:
    """Return why attention of these inputs cannot be context parallel; None if it can.

    Args:
        q: The queries, (B, H, S, D).
        k: The keys, (B, K, S, D).
        v: The values, (B, K, S, D).
        mask: The mask of the call; None if absent.
        dropout: The probability of dropout.
    """
    if mask is not None:
        return (
            f"this attention got a mask of shape {tuple(mask.shape)}, which says nothing of the tokens of other ranks; "
            "give the model no mask (transformers: an all-ones `attention_mask`, cut as a buffer), "
            "and packed documents as `context_parallel(mask=...)`"
        )
    if dropout > 0:
        return f"attention with dropout {dropout} cannot be context parallel; set the model's attention dropout to 0"
    if (
        not q.ndim == k.ndim == v.ndim == 4
        or q.shape[0] != k.shape[0]
        or k.shape[:3] != v.shape[:3]
    ):
        return (
            f"attention of shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} cannot be intercepted; "
            "give queries (B, H, S, D), and keys and values (B, K, S, D)"
        )
    if q.shape[-1] != k.shape[-1]:
        return f"queries of size {q.shape[-1]} do not fit keys of size {k.shape[-1]}; both must be of one size"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads; their number must divide it"
    return None


# ---- Transformers


def register_transformers_attention(name: str = "context_parallel") -> None:
    """Register context-parallel attention for transformers' models: `model.set_attn_implementation(name)`.

    It runs inside `context_parallel(..., intercept=intercept_sdpa())`, and is an error elsewhere. Unlike an intercepted
    F.scaled_dot_product_attention, it honours sliding windows and attention sinks. Needs transformers 5.

    Args:
        name: The name of the implementation.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _transformers_attention)
    AttentionMaskInterface.register(name, _transformers_mask)


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention, (B, S, H, D), and None for the weights, as transformers' attention functions do.

    query: (B, H, S, D); key, value: unrepeated; s_aux: sinks.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = others.get("sliding_window") or 0
    hides_from = 0
    # A note of `_transformers_mask` is an expanded tensor on the CPU. It has no memory, can be read without waiting
    # for a GPU, and does not change when it is detached or sliced.
    if (
        attention_mask is not None
        and attention_mask.dtype == torch.int32
        and attention_mask.device.type == "cpu"
        and not any(attention_mask.stride())
    ):
        noted = int(attention_mask[0, 0, 0, 0])
        attention_mask = None
        window, hides_from = (noted, 0) if noted > 0 else (window, -noted)
    refusal = refusal_of_call(query, key, value, attention_mask, dropout)
    options = {
        name for name, value in others.items() if value is not None and value is not False
    }
    if unknown := options - _WITHOUT_EFFECT:
        refusal = (
            f"this model passes {', '.join(map(repr, sorted(unknown)))} to its attention, which context-parallel "
            "attention does not know; use a model without"
        )
    elif window and not is_causal:
        refusal = f"a window of {window} tokens to both sides cannot be intercepted; use a causal model"
    positions = others.get("position_ids")
    call = Call(
        query, key, value, scaling, is_causal, window, s_aux, positions, hides_from, refusal
    )
    return attend(query, call).transpose(1, 2), None


def _transformers_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """Return None if the mask is causal or full, a note if it hides distant tokens, else a dense mask (refused).

    A note is an int32 tensor on the CPU, expanded to (1, 1, q_length, kv_length), which `_transformers_attention`
    reads. It is the size of a window; the negative size if the form is not a window.

    Some models have their window in the mask only (Qwen2-MoE, Phimoe); the mask here has the length of a rank's part.
    Attention refuses a dense mask.
    """
    may_skip = others.get("allow_is_causal_skip", True) or others.get(
        "allow_is_bidirectional_skip"
    )
    is_simple = may_skip and q_length == kv_length
    if not (is_simple and (attention_mask is None or attention_mask.all())):
        return torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    if not local_size:
        return None
    note = torch.tensor(
        local_size if _is_window(mask_function, local_size) else -local_size, dtype=torch.int32
    )
    return note.expand(1, 1, q_length, kv_length)


def _is_window(mask_function: Callable[..., Tensor], size: int) -> bool:
    """Return whether a mask function of transformers shows each query `size` keys, the last one its own."""
    query = torch.tensor([size, size + 1, 2 * size, 2 * size + 1])
    zero = torch.zeros_like(query)
    seen = [
        mask_function(zero, zero, query, query + offset) for offset in (-size, 1 - size, 0, 1)
    ]
    return torch.stack(seen).tolist() == [[False] * 4, [True] * 4, [True] * 4, [False] * 4]

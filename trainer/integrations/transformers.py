"""The attention function for the registry of Hugging Face's transformers, and how transformers calls SDPA."""

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from trainer.integrations.calls import Call, attend, refusal_of_call

_SDPA_OF_TRANSFORMERS = "transformers.integrations.sdpa_attention"
# Arguments of transformers' attention functions that do not change attention; any other one must be empty.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
    | {"output_router_logits", "num_items_in_batch", "sliding_window"}
)
_OTHER_MASK = "mask of another form"  # our own entry among the arguments of a call


def register_transformers_attention(name: str = "context_parallel") -> None:
    """Register context-parallel attention for transformers' models: `model.set_attn_implementation(name)`.

    It runs inside `context_parallel(..., intercept=intercept_sdpa())`, and is an error elsewhere. Unlike an intercepted
    F.scaled_dot_product_attention, it honours sliding windows and attention sinks. Needs transformers 5.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _transformers_attention)
    AttentionMaskInterface.register(name, _transformers_mask)


def _transformers_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **told: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by transformers' interface: query (B, H, S, D), unrepeated key and value, sinks -> (B, S, H, D)."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = told.get("sliding_window") or 0
    if _is_note(attention_mask):
        noted = int(attention_mask[0, 0, 0, 0])
        attention_mask = None
        window, other = (noted, None) if noted > 0 else (window, -noted)
        told |= {_OTHER_MASK: other}
    refusal = refusal_of_call(query, key, value, attention_mask, dropout)
    given = {name for name, value in told.items() if value is not None and value is not False}
    unknown = given - _WITHOUT_EFFECT - {_OTHER_MASK}
    if unknown:
        refusal = (
            f"this model passes {', '.join(map(repr, sorted(unknown)))} to its attention, which context-parallel "
            "attention does not know; use a model without"
        )
    elif window and not is_causal:
        refusal = f"a window of {window} tokens to both sides cannot be intercepted; use a causal model"
    call = Call(query, key, value, scaling, is_causal, window, s_aux, refusal, told)
    return attend(call.q, call).transpose(1, 2), None


def _transformers_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """Return None if the mask is causal or full, and a note for `_transformers_attention` if it hides distant tokens.

    The window of some models is in their mask only (Qwen2-MoE, Phimoe), whose length here is that of a rank's part. Any
    other mask is returned as one that attention refuses.
    """
    is_simple = (allow_is_causal_skip or allow_is_bidirectional_skip) and q_length == kv_length
    if not is_simple or not (attention_mask is None or bool(attention_mask.all())):
        return torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    if not local_size:
        return None
    note = torch.tensor(local_size if _is_window(mask_function, local_size) else -local_size, dtype=torch.int32)
    return note.expand(1, 1, q_length, kv_length)


def _is_window(mask_function: Callable[..., torch.Tensor], size: int) -> bool:
    """Return whether a mask function of transformers shows each query `size` keys, the last of them its own."""
    query = torch.tensor([size, size + 1, 2 * size, 2 * size + 1])
    zero = torch.zeros_like(query)
    seen = [mask_function(zero, zero, query, query + offset) for offset in (-size, 1 - size, 0, 1)]
    return torch.stack(seen).tolist() == [[False] * 4, [True] * 4, [True] * 4, [False] * 4]


def _is_note(mask: torch.Tensor | None) -> bool:
    """Return whether a mask is a note of `_transformers_mask`: the size of a window, or minus that of another form.

    A note is an expanded tensor on the CPU, so that it has no memory, can be read without waiting for a GPU, and
    remains what it is when it is detached or sliced.
    """
    return mask is not None and mask.dtype == torch.int32 and mask.device.type == "cpu" and not any(mask.stride())


def mask_from_kwargs(caller: FrameType | None) -> dict[str, Any]:
    """Return the arguments of the transformers function that calls F.scaled_dot_product_attention, or an empty dict.

    transformers decides by the length of this rank's part whether a window hides anything. If it decides that the
    window does not, the call itself does not show it.
    """
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back  # other modes
    if caller is None or caller.f_globals.get("__name__") != _SDPA_OF_TRANSFORMERS:
        return {}
    return dict(caller.f_locals.get("kwargs", {}))


def refusal_of_window(call: Call, seq_len: int) -> str | None:
    """Return why a call cannot be context parallel, by what its model hides from queries, or None."""
    other = call.told.get(_OTHER_MASK)
    if other and other < seq_len:
        return (
            f"this model's mask hides tokens by a distance of {other} in another way than a causal window, such as "
            f"chunks, for {seq_len} tokens; use a causal model, or sequences of at most {other} tokens"
        )
    window = call.told.get("sliding_window")
    if window and not call.window and window < seq_len:
        return (
            f"transformers gives F.scaled_dot_product_attention no sliding window, and this model has one of "
            f"{window} for {seq_len} tokens; call `register_transformers_attention()` and "
            'model.set_attn_implementation("context_parallel")'
        )
    return None

"""The attention function for the registry of Hugging Face's transformers, and how transformers calls SDPA."""

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


def register_transformers_attention(name: str = "context_parallel") -> None:
    """Register context-parallel attention for transformers' models: `model.set_attn_implementation(name)`.

    It runs inside `context_parallel(..., intercept_sdpa=True)`, and is an error elsewhere. Unlike an intercepted
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
    refusal = refusal_of_call(query, key, value, attention_mask, dropout)
    given = {name for name, value in told.items() if value is not None and value is not False}
    unknown = given - _WITHOUT_EFFECT
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
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor | None:
    """Return None if an attention's own arguments tell all that it hides; else a mask, which attention refuses."""
    says_itself = (allow_is_causal_skip or allow_is_bidirectional_skip) and q_length == kv_length
    if says_itself and (attention_mask is None or bool(attention_mask.all())):
        return None
    return torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)


def told_by_transformers(caller: FrameType | None) -> dict[str, Any]:
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
    """Return why a call cannot be context parallel: it lost its sliding window on the way to SDPA. Else None."""
    window = call.told.get("sliding_window")
    if window and not call.window and window < seq_len:
        return (
            f"transformers gives F.scaled_dot_product_attention no sliding window, and this model has one of "
            f"{window} for {seq_len} tokens; call `register_transformers_attention()` and "
            'model.set_attn_implementation("context_parallel")'
        )
    return None

"""Attention by the registry of Hugging Face's transformers, and what transformers says of its calls of SDPA."""

from types import FrameType
from typing import Any

import torch
from torch import nn

from trainer.integrations.intercept import Call, attend, refusal_of_call

_SDPA_OF_TRANSFORMERS = "transformers.integrations.sdpa_attention"
# What transformers passes to an attention function that does not change attention; anything else must be empty.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
    | {"output_router_logits", "num_items_in_batch", "sliding_window"}
)


def register_transformers_attention(name: str = "context_parallel") -> None:
    """Offer attention under this name to transformers' models: `model.set_attn_implementation(name)`.

    It runs where `context_parallel(..., intercept_sdpa=True)` is in force, and is an error elsewhere. Beside what the
    interception of F.scaled_dot_product_attention does, it honours sliding windows and attention sinks. Needs
    transformers 5.
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
    """Attention by transformers' interface: query (B, H, S, D), unrepeated key and value, sinks -> (B, S, H, D)."""
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
    """None where nothing is hidden beside what an attention says of itself; else a mask, for attention to refuse."""
    says_itself = (allow_is_causal_skip or allow_is_bidirectional_skip) and q_length == kv_length
    if says_itself and (attention_mask is None or bool(attention_mask.all())):
        return None
    return torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)


def told_by_transformers(caller: FrameType | None) -> dict[str, Any]:
    """Return what transformers told its function that calls F.scaled_dot_product_attention, if that is the caller.

    Whether a window hides anything it decides by the length of this rank's part, and where it decides that none does,
    nothing of the window is left in the call itself.
    """
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back  # other modes
    if caller is None or caller.f_globals.get("__name__") != _SDPA_OF_TRANSFORMERS:
        return {}
    return dict(caller.f_locals.get("kwargs", {}))


def refusal_of_window(call: Call, seq_len: int) -> str | None:
    """Return why a call cannot be honoured that lost its sliding window on the way to SDPA, or None."""
    window = call.told.get("sliding_window")
    if window and not call.window and window < seq_len:
        return (
            f"transformers gives F.scaled_dot_product_attention no sliding window, and this model has one of "
            f"{window} for {seq_len} tokens; call `register_transformers_attention()` and "
            'model.set_attn_implementation("context_parallel")'
        )
    return None

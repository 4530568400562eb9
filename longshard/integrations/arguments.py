"""Check the arguments of a model of transformers, and its logits: each must be right for a part of a sequence."""

import inspect

import torch
from torch import nn

from longshard.context.live import LivePlan
from longshard.context.planning.options import ContextParallelError
from longshard.integrations import inspection


def check_logits(model: nn.Module, logits: object, live: LivePlan) -> None:
    """Check that there is a row of logits for each token of the rank's part.

    Args:
        model: The model.
        logits: The logits, (..., S, V); None if absent.
        live: The plan of the context.

    Raises:
        ContextParallelError: There is another number of rows.
    """
    length = live.layout.local_length(live.rank)
    if isinstance(logits, torch.Tensor) and (logits.ndim < 3 or logits.shape[-2] != length):
        raise ContextParallelError(
            f"{type(model).__name__} has logits of shape {tuple(logits.shape)}, not one row for each token of a rank's "
            "part. Use a model with a head for every token, such as one for causal or masked language modelling"
        )


def check_inputs(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Check that a model does not count positions itself, and does not shift labels within a part.

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ContextParallelError: The model got text without `position_ids`, or `labels` without `shift_labels` and
            `num_items_in_batch`.
    """
    inputs = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    inputs |= inputs.get("kwargs", {})
    name = type(model).__name__
    has_text = any(inputs.get(key) is not None for key in ("input_ids", "inputs_embeds"))
    if inspection.takes_positions(model) and inputs.get("position_ids") is None and has_text:
        raise ContextParallelError(
            f"{name} got no `position_ids`, and would count positions from 0 on every rank; give it global "
            "`position_ids`, cut as a buffer of `context_parallel`"
        )
    if inputs.get("labels") is not None and (
        inputs.get("shift_labels") is None or not inputs.get("num_items_in_batch")
    ):
        raise ContextParallelError(
            f"{name} got `labels`, which it shifts within the part of a rank. It divides by the tokens of this part. "
            "Instead, shift and cut labels as a buffer, and take the loss from the logits"
        )

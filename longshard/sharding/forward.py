"""Replace the forward of a module from outside, in a fixed order of features. No other function may do this.

FSDP comes last and works by hooks. A feature replaces a forward once, and never after a later feature of the list.
If other code has set a forward on the instance, it is refused: it would be dropped without a message.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

ORDER = (
    "packed weights",  # a linear module dequantises its frozen weight
    "adapters",  # a linear module also multiplies by low-rank adapters
    "context parallelism",  # attention of a module becomes attention over ranks
    "expert parallelism",  # tokens are sent to the ranks of their experts
    "experts in parts",  # experts compute a part of the rows at a time
    "loss in chunks",  # the projection to logits also returns losses
    "activation checkpointing",  # the block's forward is recomputed in the backward
    "compile",  # the block's forward of that moment becomes one graph
    "offload",  # the block's input waits for the backward on the host
)
_WRAPPING = ORDER[-2:]


def replace_forward(module: nn.Module, feature: str, forward: Callable[..., Any]) -> None:
    """Replace the forward of a module.

    Args:
        module: The module.
        feature: A name of `ORDER`. The last two features wrap any forward, also one that other code has set.
        forward: The new forward.

    Raises:
        RuntimeError: The feature is out of order or is applied twice, or other code has set a forward.
    """
    before = module.__dict__.get("_forward_replaced_by", ())
    kind = type(module).__name__
    late = [name for name in before if ORDER.index(name) >= ORDER.index(feature)]
    if late:
        raise RuntimeError(
            f"{feature} cannot replace the forward of this {kind} after {late[-1]}; "
            f"build the model again, and apply each feature once, in the order {', '.join(ORDER)}"
        )
    if "forward" in module.__dict__ and not before and feature not in _WRAPPING:
        raise RuntimeError(
            f"{feature} would drop the forward that was set on this {kind} itself; define it in a class, or set it "
            "afterwards"
        )
    module.forward = forward
    module._forward_replaced_by = (*before, feature)

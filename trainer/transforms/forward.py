"""The one place where a module's forward is replaced, from outside and in a stated order.

    context parallelism      attention of one module becomes attention over ranks
    activation checkpointing the block's forward, computed again in the backward
    compile                  whatever the block's forward is by then, as one graph

FSDP comes last and works by hooks. Nothing is replaced twice by the same feature, or by an earlier one of the list; a
forward that somebody else has put on the instance is refused, as it would be dropped without a word.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

ORDER = ("context parallelism", "activation checkpointing", "compile")


def replace_forward(module: nn.Module, feature: str, forward: Callable[..., Any]) -> None:
    """Let `forward` be what calling the module runs.

    feature: one of `ORDER`; the last of them takes what it finds, whoever put it there.

    Raises:
        RuntimeError: out of order, a second time, or over a forward that none of these features has put there.
    """
    before: tuple[str, ...] = module.__dict__.get("_forward_replaced_by", ())
    kind = type(module).__name__
    late = [name for name in before if ORDER.index(name) >= ORDER.index(feature)]
    if late:
        raise RuntimeError(
            f"{feature} cannot replace the forward of this {kind} after {late[-1]}; apply them once each, in the order "
            f"{', '.join(ORDER)}"
        )
    if "forward" in module.__dict__ and not before and feature != ORDER[-1]:
        raise RuntimeError(
            f"{feature} would drop the forward that was set on this {kind} itself; define it in a class, or set it "
            "afterwards"
        )
    module.forward = forward
    module._forward_replaced_by = (*before, feature)

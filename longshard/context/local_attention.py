"""Refuse attention calls that do not use the plan: inside a context they would see only the rows of one rank.

A context cuts the inputs. Without an error, `F.scaled_dot_product_attention` and similar calls would compute another
model there. `RefusedLocalAttention` sees these calls and raises. It is a torch function mode: it is in force in one
thread, and `torch.compile` traces through it.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longshard.context.planning.options import ContextParallelError

_ATEN = torch.ops.aten.scaled_dot_product_attention
ATTENTION_CALLS = {F.scaled_dot_product_attention, _ATEN, _ATEN.default}
"""The calls that an interception runs with the plan."""

_CLOSED_CALLS = frozenset(
    {
        F.multi_head_attention_forward,
        torch._native_multi_head_attention,
        torch._transformer_encoder_layer_fwd,
    }
)
# Names of kernels of PyTorch, flash-attn, xformers and SageAttention.
_KERNELS = re.compile(
    "scaled_dot_product|flash_att|flash_fwd|efficient_attention|cudnn_attention|varlen_att|flex_attention|sageatt"
)

WAYS_TO_THE_PLAN = (
    "give context_parallel `intercept=intercept_sdpa(model)`, or the attention module the style "
    "`ContextParallelAttention`; attention that shall stay local needs `local_attention=True`"
)


@lru_cache(maxsize=4096)
def attends(function: Callable) -> bool:
    """Return whether a function computes attention in one call. Kernels count, too; no interception can replace them.

    Args:
        function: A function or operator.
    """
    if function in _CLOSED_CALLS:
        return True
    if isinstance(function, OpOverloadPacket):
        name = str(function)  # namespace.name
    elif isinstance(function, OpOverload):
        # the compiler cannot trace `name()`
        name = f"{function.namespace}::{function.__name__}"
    elif isinstance(function, HigherOrderOperator | BuiltinFunctionType):
        name = function.__name__
    else:
        return False
    return bool(_KERNELS.search(name))


class RefusedLocalAttention(TorchFunctionMode):
    """Refuse attention on the rows of one rank while a context or region over several ranks is open.

    Args:
        ranks: Number of ranks over which the inputs are cut, for the message.

    Raises:
        ContextParallelError: Raised in the attention call.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(
        self,
        function: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        if attends(function):
            raise ContextParallelError(
                f"{function.__name__} was called inside a context over {self._ranks} ranks, and would see the rows "
                f"of this rank alone; {WAYS_TO_THE_PLAN}"
            )
        return function(*args, **(kwargs or {}))

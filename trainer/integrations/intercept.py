"""Models that this project did not write: their attention runs over all ranks, the models stay as they are.

A torch function mode, in force inside one context and one thread, gives calls of `F.scaled_dot_product_attention` to
the context-parallel operator; no function is replaced. A mode is off while it handles a call, and `loss.backward()` is
such a call: backward is run with the mode in force, so that what activation checkpointing computes again goes the same
way.

A rank sees a part of the sequence. What a model says of that part, such as a dense mask, means nothing for the whole,
so it is refused rather than guessed at.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import BuiltinFunctionType, FrameType
from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from trainer.distributed.context_parallel.attention import context_parallel_attention
from trainer.distributed.context_parallel.live import LivePlan
from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.distributed.sharding.exchange import all_gather

_NOT_COMPILED = "`intercept_sdpa` cannot be compiled; the model runs as it is inside the context"
# The compiler leaves its graph for what is marked so, or says this where it may not (fullgraph).
outside_of_graphs = torch.compiler.disable(reason=_NOT_COMPILED)

_ATEN = torch.ops.aten.scaled_dot_product_attention
_ATTENTION_CALLS = frozenset({F.scaled_dot_product_attention, _ATEN, _ATEN.default})
# They attend inside of one call, where no mode is in force.
_CLOSED_CALLS = frozenset(
    {F.multi_head_attention_forward, torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd}
)
# They move rows along a dimension, which may be that of tokens.
_SHIFTS = frozenset({F.pad, torch.roll, torch.Tensor.roll, torch.cumsum, torch.Tensor.cumsum})
# Operators of one kernel, which models call past F.scaled_dot_product_attention.
_KERNELS = re.compile("scaled_dot_product|flash_att|efficient_attention|cudnn_attention|varlen_att|flex_attention")


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a model: q (B, H, S, D), k and v (B, K, S, D), and what it says of them.

    window: keys that a query sees, its own among them; 0: no window. sinks: (H,), as for the operator. refusal: why it
    cannot be honoured, if so. told: what else the model says of it, by name.
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


class Watch(Protocol):
    """What sees the models that run under an `Interception`, and says what of them is wrong.

    flags: what this rank saw, for `refusal_of_ranks` to judge together with that of the other ranks, when `has_news`.
    """

    @property
    def has_news(self) -> bool: ...

    @property
    def flags(self) -> int: ...

    def told(self, caller: FrameType | None) -> dict[str, Any]: ...

    def on_embedding(self, indices: object) -> None: ...

    def on_shift(self, name: str, x: object, shifted: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> None: ...

    def on_attention(self, call: Call) -> str | None: ...

    def refusal_of_ranks(self, flags: list[int]) -> str | None: ...


class Interception(TorchFunctionMode):
    """Attention calls inside it run over the ranks of an open plan, also during backward.

    handle: the plan's, for the whole batch; a call may hold fewer sequences if all have the same mask. watch: sees what
    the models do.

    Raises:
        ContextParallelError: inside of another one, or a rank with fewer than two tokens; and from calls that cannot
            be honoured: a mask, dropout, heads of unequal size. What the first call of a rank cannot do is an error on
            all ranks, so that none waits for the others.
    """

    def __init__(self, handle: torch.Tensor, live: LivePlan, watch: Watch) -> None:
        super().__init__()
        if is_intercepted(handle):
            raise ContextParallelError(
                "`intercept_sdpa` is in force already, for another mesh; an attention call can run over one only"
            )
        shortest = min(map(live.layout.local_length, range(live.layout.degree)))
        if shortest < 2:
            # transformers takes a single query for a step of generation, and calls its attention not causal.
            raise ContextParallelError(
                f"`intercept_sdpa` with {live.layout.length} tokens leaves a rank {shortest}, and models take a "
                f"single token for a step of generation; use at least {2 * live.layout.degree} tokens and the load "
                "balancer 'head_tail' or 'contiguous'"
            )
        self._handle = handle
        self._live = live
        self._watch = watch

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            # The compiler then leaves the graph here, or says so where it may not (fullgraph).
            raise ContextParallelError(_NOT_COMPILED)
        if func in _ATTENTION_CALLS:
            return self._attend(_sdpa_call(self._watch.told(sys._getframe(1)), *args, **kwargs))
        if func is attend:
            return self._attend(*args)
        if func is is_intercepted:
            return True
        if func is F.embedding:
            self._watch.on_embedding(args[0])
        if func in _SHIFTS:
            shifted = func(*args, **kwargs)
            self._watch.on_shift(func.__name__, args[0], shifted, args[1:], kwargs)
            return shifted
        if func in _CLOSED_CALLS or _is_kernel(func):
            raise ContextParallelError(
                f"{func.__name__} attends inside of one call, which `intercept_sdpa` does not reach; let the model "
                "call F.scaled_dot_product_attention itself"
            )
        if func in _BACKWARD:
            with self:
                return _BACKWARD[func](*args, **kwargs)
        return func(*args, **kwargs)

    # Where the compiler leaves its graph it may still trace what is called from there; a collective would then wait for
    # a result that nobody computes.
    @outside_of_graphs
    def _attend(self, call: Call) -> torch.Tensor:
        refusal = call.refusal or self._watch.on_attention(call)
        if self._watch.has_news:
            refusal = self._agree(refusal)
        if refusal:
            raise ContextParallelError(refusal)
        scale = call.q.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
        return context_parallel_attention(
            call.q, call.k, call.v, self._handle, scale, call.is_causal, call.window, call.sinks
        )[0]

    def _agree(self, refusal: str | None) -> str | None:
        """Return why this rank must raise: what it refuses, or what others or all together do. A collective."""
        mesh = self._live.mesh
        mine = torch.tensor([refusal is not None, self._watch.flags], dtype=torch.int64, device=mesh.device_type)
        ranks = all_gather(mine, mesh).tolist()
        refusing = [rank for rank, (refused, _) in enumerate(ranks) if refused]
        if refusing and refusal is None:
            return (
                f"rank(s) {refusing} of the group cannot do this attention call context parallel; their message says "
                "why"
            )
        return refusal or self._watch.refusal_of_ranks([flags for _, flags in ranks])


def attend(q: torch.Tensor, call: Call) -> torch.Tensor:
    """A torch function that only an `Interception` handles."""
    if has_torch_function_unary(q):
        return handle_torch_function(attend, (q,), call)
    raise ContextParallelError(
        "context-parallel attention was called outside its context; enter `context_parallel(..., intercept_sdpa=True)` "
        "around the forward and the backward"
    )


def is_intercepted(x: torch.Tensor) -> bool:
    """Whether an `Interception` is in force here."""
    return has_torch_function_unary(x) and handle_torch_function(is_intercepted, (x,), x)


@lru_cache(maxsize=4096)
def _is_kernel(func: Callable) -> bool:
    """Whether a torch function is an attention kernel."""
    if not isinstance(func, OpOverload | OpOverloadPacket | HigherOrderOperator | BuiltinFunctionType):
        return False
    return bool(_KERNELS.search(func.__name__))


def _sdpa_call(
    told: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """A call of F.scaled_dot_product_attention, whose parameters these are beside what is told of it."""
    refusal = refusal_of_call(query, key, value, attn_mask, dropout_p)
    if refusal is None and query.shape[1] != key.shape[1] and not enable_gqa:
        refusal = f"{query.shape[1]} query heads and {key.shape[1]} key/value heads need enable_gqa=True"
    return Call(query, key, value, scale, is_causal, refusal=refusal, told=told)


def refusal_of_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> str | None:
    """Why attention of these cannot be context parallel, if so."""
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


def _tensor_backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _backward(
    tensors: Sequence[torch.Tensor | GradientEdge], *args: Any, inputs: Sequence | None = None, **kwargs: Any
) -> None:
    for x in inputs or ():
        if isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf:
            x.retain_grad()  # as torch does where it is given the tensor
    torch.autograd.backward(_edges(tensors), *args, inputs=None if inputs is None else _edges(inputs), **kwargs)


def _grad(
    outputs: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    *args: Any,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    allow_unused = allow_unused or materialize_grads
    edges = _edges(outputs), _edges(inputs)
    grads = torch.autograd.grad(*edges, *args, create_graph=create_graph, allow_unused=allow_unused, **kwargs)
    if not materialize_grads:
        return grads
    pairs = zip(grads, inputs, strict=True)
    return tuple(torch.zeros_like(x, requires_grad=create_graph) if grad is None else grad for grad, x in pairs)


def _edges(tensors: Sequence[torch.Tensor | GradientEdge]) -> list[GradientEdge]:
    """Places in the graph instead of tensors: torch looks for modes in tensors, so that these go on to its engine."""
    return [x if isinstance(x, GradientEdge) else get_gradient_edge(x) for x in tensors]


_BACKWARD: dict[Callable, Callable] = {
    torch.Tensor.backward: _tensor_backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
}

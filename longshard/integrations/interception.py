"""Run a model that this project did not write inside a context: its attention runs over all ranks.

A torch function mode, in force in one context and one thread, runs calls of `F.scaled_dot_product_attention` by the
context-parallel operator. No function is replaced, and the model is not changed. A mode is off while it handles a call,
and `loss.backward()` is a call, too. So backward runs with the mode entered again, and recomputed attention is context
parallel, too.

If a model says something about the tokens of one rank, such as a dense mask, it says nothing about the whole sequence.
Such a call is refused.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longshard.context.attention import context_parallel_attention
from longshard.context.attention_inputs import AttentionSettings
from longshard.context.live import LivePlan
from longshard.context.local_attention import ATTENTION_CALLS, attends
from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import Intercept
from longshard.integrations.calls import (
    NOT_COMPILED,
    Call,
    attend,
    is_intercepted,
    outside_of_graphs,
    refusal_of_call,
)
from longshard.integrations.inspection import Allowed
from longshard.integrations.scans import run_scan, scanned
from longshard.integrations.watch import ModelWatch
from longshard.sharding.exchange import all_gather

# These functions mix rows along a dimension, which may be the dimension of tokens.
_NAMES = ("roll", "cumsum", "flip", "mean")
_SHIFTS = {F.pad, F.conv1d, *(getattr(of, name) for of in (torch, Tensor) for name in _NAMES)}


def intercept_sdpa(
    model: nn.Module | None = None, *, allow_modules: Collection[type | str] = ()
) -> Intercept:
    """Return the argument `intercept` for `context_parallel`.

    It makes calls of F.scaled_dot_product_attention inside the context run over all ranks.

    At its exit the context raises a ContextParallelError if no attention ran over the ranks, or if an entry of
    `allow_modules` named nothing.

    Args:
        model: The model, which is checked when the context is entered. If None, each model is checked at its first call
            inside.
        allow_modules: Classes, names or kinds of modules not to refuse (docs/transformers.md).
    """

    @contextmanager
    def intercepting(handle: Tensor, live: LivePlan) -> Iterator[None]:
        allowed = Allowed(allow_modules)
        watch = ModelWatch(live, lambda: is_intercepted(handle), allowed)
        with Interception(handle, live, watch), watch:
            watch.start(model)
            yield
        if live.calls == 0:
            raise ContextParallelError(
                f"the inputs were cut over {live.mesh.size()} ranks, but no attention ran over them: nothing called "
                "F.scaled_dot_product_attention inside the context; make the model use it (transformers: "
                'attn_implementation="sdpa", not "eager"), and run its forward and backward inside'
            )
        if allowed.unused:
            raise ContextParallelError(
                f"allow_modules of intercept_sdpa names {allowed.unused}, and the model has no such "
                "module or kind of layers. Give classes, their names, dotted names of modules, or "
                "kinds of layers that the model has"
            )

    return intercepting


class Interception(TorchFunctionMode):
    """The mode in which attention calls run over the ranks of an open plan, also during backward.

    Args:
        handle: The handle of the plan for the whole batch, (B,) int64. A call may have fewer sequences if all have the
            same mask.
        live: The plan.
        watch: Observes the models that run.

    Raises:
        ContextParallelError: Another interception is in force, or a rank has fewer than two tokens. Also raised by
            calls that cannot be context parallel, such as a call with a mask or dropout. A refusal of a rank's first
            call is an error on all ranks, so that no rank waits for another.
    """

    def __init__(self, handle: Tensor, live: LivePlan, watch: ModelWatch) -> None:
        super().__init__()
        if is_intercepted(handle):
            raise ContextParallelError(
                "`intercept_sdpa` is in force already, for another mesh; an attention call can run over one only"
            )
        shortest = min(live.layout.lengths)
        if shortest < 2:
            # For transformers, a single query is a step of generation; its attention is not causal.
            raise ContextParallelError(
                f"`intercept_sdpa` with {live.layout.length} tokens leaves a rank {shortest}, and "
                "models take a single token for a step of generation. Use at least "
                f"{2 * live.layout.degree} tokens and the load balancer 'head_tail' or 'contiguous'"
            )
        self._handle = handle
        self._live = live
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            # The compiler then breaks its graph here, or raises where it may not (fullgraph).
            raise ContextParallelError(NOT_COMPILED)
        if func in ATTENTION_CALLS:
            return self._attend(_sdpa_call(*args, **kwargs))
        if func is attend:
            return self._attend(*args)
        if func is run_scan:
            return self._scan(*args[1:])
        if func is is_intercepted:
            return True
        if func is F.embedding:
            self._watch.see(args[0])
        if func in _SHIFTS:
            shifted = func(*args, **kwargs)
            self._watch.on_shift(func.__name__, args[0], shifted, args[1:], kwargs)
            return shifted
        if attends(func):
            raise ContextParallelError(
                f"{func.__name__} attends inside of one call, which `intercept_sdpa` does not reach; "
                "let the model call F.scaled_dot_product_attention itself"
            )
        if func in _BACKWARD:
            with self:
                return _BACKWARD[func](*args, **kwargs)
        return func(*args, **kwargs)

    # After a graph break the compiler may still trace the functions that are called from there. A traced collective
    # would wait for a result that nobody computes.
    @outside_of_graphs
    def _attend(self, call: Call) -> Tensor:
        self._agree(call.refusal or self._watch.on_attention(call))
        width = call.q.shape[-1]
        values = call.v.shape[-1]
        scale = width**-0.5 if call.scale is None else float(call.scale)
        # The operator takes one size of heads: zeros change neither scores nor the other elements of an output.
        size = max(width, values)
        q, k, v = (
            x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
            for x in (call.q, call.k, call.v)
        )
        settings = AttentionSettings(scale, call.is_causal, call.window)
        out, _ = context_parallel_attention(q, k, v, self._handle, settings, sinks=call.sinks)
        return out if values == size else out[..., :values]

    @outside_of_graphs
    def _scan(self, name: str, function: Callable, arguments: dict) -> Any:
        self._agree(self._watch.shift)
        return scanned(name, function, arguments, self._handle, self._live)

    def _agree(self, refusal: str | None) -> None:
        """Raise ContextParallelError if this rank refuses, or others do, or the ranks' positions do not fit together.

        If the watch `has_news`, as at the first call and after new positions, it is a collective. Then `has_news` is
        cleared, unless only other ranks refuse. Without news only this rank's own refusal raises.
        """
        if self._watch.has_news:
            mesh = self._live.mesh
            positions = self._watch.positions
            local_state = torch.tensor(
                [refusal is not None, positions.flags],
                dtype=torch.int64,
                device=mesh.device_type,
            )
            ranks = all_gather(local_state, mesh).tolist()
            refusing = [rank for rank, (refused, _) in enumerate(ranks) if refused]
            if refusing and refusal is None:
                raise ContextParallelError(
                    f"rank(s) {refusing} of the group cannot do this attention call context parallel; "
                    "their message says why"
                )
            self._watch.has_news = False
            refusal = refusal or positions.refusal_of_ranks([flags for _, flags in ranks])
        if refusal:
            raise ContextParallelError(refusal)


def _sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    refusal = refusal_of_call(query, key, value, attn_mask, dropout_p)
    if refusal is None and query.shape[1] != key.shape[1] and not enable_gqa:
        refusal = f"{query.shape[1]} query heads and {key.shape[1]} key/value heads need enable_gqa=True"
    return Call(query, key, value, scale, is_causal, refusal=refusal)


def _tensor_backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _backward(
    tensors: Sequence[Tensor | GradientEdge],
    *args: Any,
    inputs: Sequence | None = None,
    **kwargs: Any,
) -> None:
    for x in inputs or ():
        if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf:
            x.retain_grad()  # as torch does for a tensor; it does not for an edge
    torch.autograd.backward(
        _edges(tensors), *args, inputs=None if inputs is None else _edges(inputs), **kwargs
    )


def _grad(
    outputs: Sequence[Tensor | GradientEdge],
    inputs: Sequence[Tensor | GradientEdge],
    *args: Any,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **kwargs: Any,
) -> tuple[Tensor | None, ...]:
    allow_unused = allow_unused or materialize_grads
    grads = torch.autograd.grad(
        _edges(outputs),
        _edges(inputs),
        *args,
        create_graph=create_graph,
        allow_unused=allow_unused,
        **kwargs,
    )
    if not materialize_grads:
        return grads
    return tuple(
        torch.zeros_like(x, requires_grad=create_graph) if grad is None else grad
        for grad, x in zip(grads, inputs, strict=True)
    )


def _edges(tensors: Sequence[Tensor | GradientEdge]) -> list[GradientEdge]:
    """Return tensors as edges of the graph: torch would call the mode again for tensors, but not for edges."""
    return [x if isinstance(x, GradientEdge) else get_gradient_edge(x) for x in tensors]


_BACKWARD: dict[Callable, Callable] = {
    Tensor.backward: _tensor_backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
}

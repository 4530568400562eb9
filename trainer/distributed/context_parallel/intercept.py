"""Models that this project did not write: their attention runs over all ranks, the models stay as they are.

A torch function mode, in force inside one context and one thread, gives calls of `F.scaled_dot_product_attention` to
the context-parallel operator; no function is replaced. A mode is off while it handles a call, and `loss.backward()` is
such a call: backward is run with the mode in force, so that what activation checkpointing computes again goes the same
way.

A rank sees a part of the sequence. What a model says of that part, such as a dense mask, means nothing for the whole,
so it is refused rather than guessed at.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from trainer.distributed.context_parallel.attention import context_parallel_attention
from trainer.distributed.context_parallel.live import LivePlan
from trainer.distributed.context_parallel.options import ContextParallelError
from trainer.distributed.exchange import all_gather

# They attend inside of one call, where no mode is in force.
_CLOSED_CALLS = frozenset(
    {F.multi_head_attention_forward, torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd}
)
_SDPA_OF_TRANSFORMERS = "transformers.integrations.sdpa_attention"
# What transformers passes to an attention function that does not change attention; anything else must be empty.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
    | {"output_router_logits", "num_items_in_batch", "sliding_window"}
)


@dataclass(frozen=True, eq=False)
class _Call:
    """One attention call of a model: q (B, H, S, D), k and v (B, K, S, D), and what it says of them.

    window: keys that a query sees, its own among them; 0: no window. sinks: (H,), as for the operator. refusal: why it
    cannot be honoured, if so. module, told: who called, and what else transformers told it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None
    is_causal: bool
    window: int = 0
    sinks: torch.Tensor | None = None
    refusal: str | None = None
    module: nn.Module | None = None
    told: Mapping[str, Any] = field(default_factory=dict)


class Interception(TorchFunctionMode):
    """Attention calls inside it run over the ranks of an open plan, also during backward.

    handle: the plan's, for the whole batch; a call may hold fewer sequences if all have the same mask.

    Raises:
        ContextParallelError: inside of another one, or a rank with fewer than two tokens; and from calls that cannot
            be honoured: a mask, dropout, heads of unequal size. What the first call of a rank cannot do is an error on
            all ranks, so that none waits for the others.
    """

    def __init__(self, handle: torch.Tensor, live: LivePlan) -> None:
        super().__init__()
        if _is_intercepted(handle):
            raise ContextParallelError(
                "`intercept_sdpa` is in force already, for another mesh; an attention call can run over one only"
            )
        shortest = min(map(live.layout.length, range(live.layout.degree)))
        if shortest < 2:
            # transformers takes a single query for a step of generation, and calls its attention not causal.
            raise ContextParallelError(
                f"`intercept_sdpa` with {live.layout.seq_len} tokens leaves a rank {shortest}, and models take a "
                f"single token for a step of generation; use at least {2 * live.layout.degree} tokens and the load "
                "balancer 'head_tail' or 'contiguous'"
            )
        self._handle = handle
        self._live = live
        self._is_first = True

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            # The compiler then leaves the graph here, or says so where it may not (fullgraph).
            raise ContextParallelError(
                "`intercept_sdpa` cannot be compiled; the model runs as it is inside the context"
            )
        if func is F.scaled_dot_product_attention:
            return self._attend(_sdpa_call(sys._getframe(1), *args, **kwargs))
        if func is _attend:
            return self._attend(*args)
        if func is _is_intercepted:
            return True
        if func in _CLOSED_CALLS:
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
    @torch.compiler.disable
    def _attend(self, call: _Call) -> torch.Tensor:
        refusal = call.refusal or self._refusal(call)
        if self._is_first:
            self._is_first = False
            refusal = refusal or self._refusal_of_positions(call)
            self._agree(refusal)
        if refusal:
            raise ContextParallelError(refusal)
        scale = call.q.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
        return context_parallel_attention(
            call.q, call.k, call.v, self._handle, scale, call.is_causal, call.window, call.sinks
        )[0]

    def _refusal(self, call: _Call) -> str | None:
        """Why this call cannot be honoured, from what is the same on every rank."""
        seq_len = self._live.layout.seq_len
        window = call.told.get("sliding_window")
        if window and not call.window and window < seq_len:
            return (
                f"transformers gives F.scaled_dot_product_attention no sliding window, and this model has one of "
                f"{window} for {seq_len} tokens; call `register_transformers_attention()` and "
                'model.set_attn_implementation("context_parallel")'
            )
        chunk = _chunk(call.module)
        if chunk and chunk < seq_len:
            return (
                f"attention in chunks of {chunk} for {seq_len} tokens cannot be context parallel; use sequences of at "
                f"most {chunk} tokens"
            )
        return None

    def _refusal_of_positions(self, call: _Call) -> str | None:
        """Positions that a model made up for this rank's part, as if it were a sequence of its own."""
        positions, layout = call.told.get("position_ids"), self._live.layout
        if self._live.mask is not None or not isinstance(positions, torch.Tensor) or positions.ndim != 2:
            return None
        mine = torch.from_numpy(layout.indices(self._live.mesh.get_local_rank()))
        restarted = torch.arange(len(mine))
        if torch.equal(mine, restarted) or not torch.equal(positions[0].cpu(), restarted):
            return None
        return (
            "the model counts this rank's positions from 0, where its tokens are not the sequence's first; give it "
            "global `position_ids`, cut as a buffer of `context_parallel` (or, where documents begin here, their mask)"
        )

    def _agree(self, refusal: str | None) -> None:
        """Raise on all ranks what some refuse; a collective."""
        mesh = self._live.mesh
        mine = torch.tensor([refusal is not None], dtype=torch.int64, device=mesh.device_type)
        refusing = all_gather(mine, mesh).flatten().nonzero().flatten().tolist()
        if refusing and refusal is None:
            raise ContextParallelError(
                f"rank(s) {refusing} of the group cannot do this attention call context parallel; their message says "
                "why"
            )


@contextmanager
def intercepting(handle: torch.Tensor, live: LivePlan) -> Iterator[None]:
    """An `Interception`, under which some attention must run.

    Raises:
        ContextParallelError: as an `Interception`, and at the end, if no attention ran.
    """
    with Interception(handle, live):
        yield
    if live.calls == 0:
        raise ContextParallelError(
            f"the inputs were cut over {live.mesh.size()} ranks, but no attention ran over them: nothing called "
            "F.scaled_dot_product_attention inside the context; make the model use it (transformers: "
            'attn_implementation="sdpa", not "eager"), and run its forward and backward inside'
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
    refusal = _refusal(query, key, value, attention_mask, dropout)
    given = {name for name, value in told.items() if value is not None and value is not False}
    unknown = given - _WITHOUT_EFFECT
    if unknown:
        refusal = (
            f"this model passes {', '.join(map(repr, sorted(unknown)))} to its attention, which context-parallel "
            "attention does not know; use a model without"
        )
    elif window and not is_causal:
        refusal = f"a window of {window} tokens to both sides cannot be intercepted; use a causal model"
    call = _Call(query, key, value, scaling, is_causal, window, s_aux, refusal, module, told)
    return _attend(call.q, call).transpose(1, 2), None


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


def _attend(q: torch.Tensor, call: _Call) -> torch.Tensor:
    """A torch function that only an `Interception` handles."""
    if has_torch_function_unary(q):
        return handle_torch_function(_attend, (q,), call)
    raise ContextParallelError(
        "context-parallel attention was called outside its context; enter `context_parallel(..., intercept_sdpa=True)` "
        "around the forward and the backward"
    )


def _is_intercepted(x: torch.Tensor) -> bool:
    """Whether an `Interception` is in force here."""
    return has_torch_function_unary(x) and handle_torch_function(_is_intercepted, (x,), x)


def _sdpa_call(
    caller: FrameType,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Call:
    """A call of F.scaled_dot_product_attention, whose parameters these are."""
    refusal = _refusal(query, key, value, attn_mask, dropout_p)
    if refusal is None and query.shape[1] != key.shape[1] and not enable_gqa:
        refusal = f"{query.shape[1]} query heads and {key.shape[1]} key/value heads need enable_gqa=True"
    told = _told_by_transformers(caller)
    module = told.pop("module", None)
    return _Call(query, key, value, scale, is_causal, refusal=refusal, module=module, told=told)


def _refusal(
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


def _told_by_transformers(caller: FrameType | None) -> dict[str, Any]:
    """What transformers told its function that calls F.scaled_dot_product_attention, if it is the caller.

    Whether a window hides anything it decides by the length of this rank's part, and where it decides that none does,
    nothing of the window is left in the call itself.
    """
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back  # other modes
    if caller is None or caller.f_globals.get("__name__") != _SDPA_OF_TRANSFORMERS:
        return {}
    names = caller.f_locals
    return {**names.get("kwargs", {}), "module": names.get("module")}


def _chunk(module: nn.Module | None) -> int | None:
    """The chunk that a module of transformers attends in, if it does."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or kinds[getattr(module, "layer_idx", None) or 0] != "chunked_attention":
        return None
    return config.attention_chunk_size


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

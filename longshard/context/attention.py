"""Context-parallel attention as one operator, and the style that replaces a model's attention by it.

The operator finds its plan by a handle, an argument of the model's forward (`live.py`). It is a `torch.library`
operator, so that `torch.compile(fullgraph=True)` works, and selective activation checkpointing can keep its output and
log-sum-exp instead of communicating again. With `keep_exchanged` it keeps the exchanged heads.

State of the process: A library of operators, which PyTorch keeps registered.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from longshard.context.attention_inputs import AttentionInputs, AttentionSettings
from longshard.context.execution.kernels.base import BackwardInputs, Terms, rows_first
from longshard.context.execution.latent import value_dim
from longshard.context.execution.ulysses import HeadExchange, Kept
from longshard.context.live import Mark, layer_of, resolve
from longshard.context.planning.options import ContextParallelError
from longshard.sharding.forward import replace_forward
from longshard.sharding.tensors import wide_type


class AttentionResult(NamedTuple):
    """The results of one call of context-parallel attention."""

    output: Tensor
    """Shape of the queries: (B, H, S, D), or with latents (B, H, S, V). A query that sees no key has the output 0."""
    lse: Tensor
    """(B, H, S), log-sum-exp of the scores, with the sink's share, in float32 at least. -inf without any key and sink.
    """


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    settings: AttentionSettings,
    *,
    sinks: Tensor | None = None,
    up: Tensor | None = None,
) -> AttentionResult:
    """Return attention of this rank's queries over the whole sequence; a collective over the plan's mesh.

    Gradients flow through the output only.

    Args:
        q: (B, H, S, D), S this rank's rows.
        k: (B, K, T, D), T this rank's rows; K divides H.
        v: (B, K, T, D), as k.
        plan: The handle of the open context, (B,) int64.
        settings: The settings of this attention. Its mask is intersected with the mask of the context.
        sinks: (H,) logits, each of one more key with value zero for all queries of its head (GPT-OSS; Xiao et al.,
            arXiv 2309.17453). They are applied once, after all results are merged. None if absent.
        up: (H, N + V, R), with which k is a latent, (B, 1, T, R + P), v has no width, (B, 1, T, 0), and D = N + P.
            Ranks send each other latents, and the output is (B, H, S, V). See `execution/latent.py`. None if absent.

    Raises:
        ContextParallelError: No context is open, or it did not cut the inputs.
        ContextParallelError: The method cannot divide the heads, or the scale is not above 0.
        ContextParallelError: Forward-mode differentiation is used.
        ContextParallelError: keep_exchanged is set, and no heads are exchanged, or latents are.
        OptionError: The kernel cannot compute it.
    """
    output, lse, *_ = operator(q, k, v, plan, [float(x) for x in settings], sinks, up)
    return AttentionResult(output, lse)


@torch.library.custom_op("longshard::context_parallel_attention", mutates_args=())
def operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    settings: Sequence[float],
    sinks: Tensor | None = None,
    up: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `context_parallel_attention`, with its settings as a list of numbers.

    Args:
        q: As for `context_parallel_attention`, (B, H, S, D).
        k: (B, K, T, D).
        v: (B, K, T, D).
        plan: The handle, (B,) int64.
        settings: The fields of `AttentionSettings`, in order.
        sinks: (H,); None if absent.
        up: As for `context_parallel_attention`, (H, N + V, R); None if absent.

    Returns:
        Output, log-sum-exp, and two 1-D uint8 tensors. The first uint8 tensor holds the exchanged q, k and v, for all
        rows of this rank's heads. The second uint8 tensor holds output and log-sum-exp of the same rows and heads.
        The lengths of both depend on the layout of the batch. Both are empty unless keep_exchanged.

    Raises:
        ContextParallelError: As for `context_parallel_attention`.
    """
    how = AttentionSettings.of(settings)
    _check_call(how.scale)
    inputs = AttentionInputs(*map(_rows_contiguous, (q, k, v)), up)
    live, sequences = resolve(plan)
    run = live.execution(inputs, how, sequences, layer_of(plan))
    live.calls += 1
    kept = {"keep": True} if how.keep_exchanged else {}
    if kept and not isinstance(run, HeadExchange):
        raise ContextParallelError(
            "keep_exchanged is set for an attention, but its context exchanges no heads. Set it for "
            "both or for neither, with method = 'all_to_all' or 'hybrid' on more than one rank"
        )
    out, lse, *exchanged = run.forward(*inputs[:3], terms=Terms(how.scale, sinks, up), **kept)
    live.show_scores(layer_of(plan), lse, sequences)
    return out, lse, *(exchanged or (q.new_empty(0, dtype=torch.uint8) for _ in range(2)))


@torch.library.custom_op("longshard::context_parallel_attention_backward", mutates_args=())
def _operator_backward(
    dout: Tensor,
    saved: Sequence[Tensor],
    kv_heads: int,
    plan: Tensor,
    settings: Sequence[float],
    sinks: Tensor | None,
    up: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, and this rank's parts of the gradients of `sinks` and of `up` ((0,) if absent).

    A collective over the plan's mesh. It does not sum the last two gradients over ranks.

    saved: q, k, v, output and log-sum-exp; or the two uint8 tensors of the forward. kv_heads: K.
    """
    how = AttentionSettings.of(settings)
    live, sequences = resolve(plan)
    dout, *saved = map(_rows_contiguous, (dout, *saved))
    if len(saved) == 2:
        inputs = Kept(dout, *saved, kv_heads)
        b, _, s, d = dout.shape
        k = dout.new_empty(()).expand(b, kv_heads, s, d)  # for its shape and dtype
    else:
        inputs = BackwardInputs(dout, *saved)
        k = inputs.k
    q, v = (dout, k) if up is None else inputs[1:4:2]
    run = live.execution(AttentionInputs(q, k, v, up), how, sequences, layer_of(plan))
    dq, dk, dv, *others = run.backward(inputs, Terms(how.scale, sinks, up))
    return dq, dk, dv, *(dout.new_empty(0) if x is None else others.pop(0) for x in (sinks, up))


def _check_call(scale: float) -> None:
    """Raise a ContextParallelError for a scale that is not a number above 0, and in forward-mode differentiation."""
    if not 0 < scale < math.inf:
        raise ContextParallelError(
            f"context-parallel attention got scale = {scale}; it must be a number above 0, such as head_dim ** -0.5"
        )
    # No public name as of torch 2.13. The body of an operator does not see the tangents of `torch.func.jvp`.
    if forward_ad._current_level >= 0:
        raise ContextParallelError(
            "context-parallel attention has no forward-mode derivative; use reverse mode (`backward`, "
            "`torch.autograd.grad`), or compute the tangent on one process"
        )


def _rows_contiguous(x: Tensor) -> Tensor:
    """Return x as kernels read it: the elements of a row lie one after another; other strides are free."""
    return x if x.stride(-1) == 1 else x.contiguous()


@operator.register_fake
def _(q, k, v, plan, settings, sinks=None, up=None):
    keep_exchanged = AttentionSettings.of(settings).keep_exchanged
    b, h, s, d = q.shape
    d = d if up is None else value_dim(q, k, up)
    sizes = (
        torch.library.get_ctx().new_dynamic_size() if keep_exchanged else 0 for _ in range(2)
    )
    kept = (q.new_empty(size, dtype=torch.uint8) for size in sizes)
    out = rows_first(q, h, s, d)
    return out, q.new_empty(b, h, s, dtype=wide_type(q.dtype)), *kept


@_operator_backward.register_fake
def _(dout, saved, kv_heads, plan, settings, sinks, up):
    if len(saved) == 2:
        _, heads, s, d = dout.shape
        gradients = (rows_first(dout, n, s, d) for n in (heads, kv_heads, kv_heads))
    else:
        gradients = map(torch.empty_like, saved[:3])
    return *gradients, *(
        dout.new_empty(0) if x is None else torch.empty_like(x) for x in (sinks, up)
    )


def _save(ctx, inputs, output) -> None:
    q, k, v, plan, ctx.settings, sinks, up = inputs
    ctx.kv_heads = k.shape[1]
    out, lse, *kept = output
    keep_exchanged = AttentionSettings.of(ctx.settings).keep_exchanged
    ctx.save_for_backward(*(kept if keep_exchanged else (q, k, v, out, lse)), plan, sinks, up)
    ctx.mark_non_differentiable(lse, *kept)
    ctx.set_materialize_grads(False)  # else the backward allocates zeros for unused gradients


def _differentiate(ctx, dout: Tensor, *_: None):
    *saved, plan, sinks, up = ctx.saved_tensors
    dq, dk, dv, dsinks, dup = _operator_backward(
        dout, saved, ctx.kv_heads, plan, ctx.settings, sinks, up
    )
    dsinks = None if sinks is None else dsinks
    dup = None if up is None else dup
    return dq, dk, dv, None, None, dsinks, dup


operator.register_autograd(_differentiate, setup_context=_save)

_LIBRARY = torch.library.Library("longshard", "FRAGMENT")


def add_autocast_rules(operator: Any, casts: Collection[int] = ()) -> None:
    """Register how an operator runs under autocast, on CPUs and GPUs.

    The arguments at `casts` are cast to the dtype of autocast, except float64 and integers. Inside the operator
    autocast is off, so that its float32 tensors stay float32.

    Args:
        operator: The operator.
        casts: The positions of the arguments to cast; none by default.
    """

    def run(device_type: str, *args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        cast = [_cast(x, dtype) if i in casts else x for i, x in enumerate(args)]
        with torch.autocast(device_type, enabled=False):
            return operator(*cast)

    for device_type in ("cpu", "cuda"):
        _LIBRARY.impl(operator, partial(run, device_type), f"Autocast{device_type.upper()}")


def _cast(x: Any, dtype: torch.dtype) -> Any:
    is_cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if is_cast else x


_QKV_UP = 0, 1, 2, 6
add_autocast_rules(torch.ops.longshard.context_parallel_attention.default, _QKV_UP)
add_autocast_rules(torch.ops.longshard.context_parallel_attention_backward.default)


# ---- The style


class ContextParallelAttention(ParallelStyle):
    """Style that makes an attention module attend over the sequence of all ranks of the mesh.

    The module's forward is `(q, k, v, *, scale=None, sinks=None, plan=None, up=None)`. Shapes are as for
    `context_parallel_attention`: q (B, H, S, D), unrepeated k and v (B, K, S, D). Inside `context_parallel(...)`, the
    model passes the context's `attention_plan` as `plan`.

    Args:
        is_causal: Whether later tokens are hidden.
        sliding_window: Number of keys that a token sees; None means all.
        keep_exchanged: The same as `ContextParallelOptions.keep_exchanged` of the context.
        softcap: The soft-cap of the scores; None if absent.

    Raises:
        ContextParallelError: The window is below 1; or, when the style is applied, the module has dropout.
    """

    def __init__(
        self,
        *,
        is_causal: bool = True,
        sliding_window: int | None = None,
        keep_exchanged: bool = False,
        softcap: float | None = None,
    ) -> None:
        if sliding_window is not None and sliding_window < 1:
            raise ContextParallelError(
                f"sliding_window = {sliding_window} shows nothing; use at least 1, or None for all"
            )
        self._settings = AttentionSettings(
            0.0, is_causal, sliding_window or 0, softcap or 0.0, keep_exchanged
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Dropout would need the same random pairs in every tile and in the backward.
        rates = [part.p for part in module.modules() if isinstance(part, nn.Dropout)]
        rates += [
            getattr(module, name, 0.0) for name in ("dropout", "dropout_p", "attention_dropout")
        ]
        for rate in rates:
            if isinstance(rate, int | float) and rate > 0:
                raise ContextParallelError(
                    f"attention with dropout {rate} cannot be context parallel; set its dropout to 0, "
                    "or drop elsewhere, such as after the output projection"
                )
        replace_forward(module, "context parallelism", _forward_of(self._settings))
        module._context_parallel_mark = Mark(device_mesh.get_group())
        return module


@dataclass(frozen=True)
class _Forward:
    """The forward of parallelised modules, which can be pickled. The scale of its settings is replaced in each call."""

    settings: AttentionSettings

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        plan: Tensor | None = None,
        up: Tensor | None = None,
    ) -> Tensor:
        """Return the operator's output. If `plan` is None, raise ContextParallelError. Default scale: D ** -0.5."""
        if plan is None:
            raise ContextParallelError(
                "this attention is context parallel and got no plan; run the model inside "
                "`context_parallel(...)` and pass that context's `attention_plan` to its forward"
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        settings = self.settings._replace(scale=scale)
        return context_parallel_attention(q, k, v, plan, settings, sinks=sinks, up=up).output


_forward_of = cache(_Forward)
"""Modules of one kind share a forward: the compiler guards on the object, and would compile each layer again."""

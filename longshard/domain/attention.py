"""Rules of attention. Queries stay on their rank; keys and values of a sharded sequence go round the ranks.

No rank ever has all keys: attention over sharded positions is context-parallel attention over the layout of the axis,
with shards of any sizes. Keys and values are gathered in two cases: with a mask, which takes memory for each query and
key itself, and if queries and keys are sharded over different ranks.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longshard.context.execution.build import build_execution
from longshard.context.execution.kernels.base import BackwardInputs, Terms
from longshard.context.execution.kernels.choose import KernelNeeds
from longshard.context.planning.mask import full
from longshard.context.planning.methods import make_plan
from longshard.context.planning.options import ContextParallelOptions
from longshard.domain.dispatch import DomainTensor, is_sharded, rule, unwrapped, wrapped
from longshard.domain.domain import Axis, Domain, balanced, shares_ranks
from longshard.domain.elementwise import own_part
from longshard.domain.transfer import gather
from longshard.sharding.rows import connected


@rule("scaled_dot_product_attention", draws=True)
def _attention(
    function,
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
) -> DomainTensor:
    """Compute attention. query, key, value: (B, H, S, D), or as torch broadcasts them; D is gathered.

    attn_mask: in any form that torch takes. With dropout, the weights are computed explicitly.
    """
    inputs = query, key, value, attn_mask
    options = _Options(is_causal, scale, enable_gqa)
    if not dropout_p and not any(map(is_sharded, inputs)):
        return wrapped(function(*unwrapped(inputs), **options._asdict()))
    q, k, v = (gather(wrapped(t), [t.ndim - 1]) for t in inputs[:3])
    is_repeated = dropout_p or q.ndim - 3 in q.domain.axes
    if enable_gqa and (is_repeated or k.shape[-3] != v.shape[-3]):
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        options = options._replace(enable_gqa=False)
    q, k, v = _broadcast(q, k, v, shares=options.enable_gqa)
    if dropout_p:  # drawn by the place in the whole tensor, also for tensors that are whole
        return F.dropout(_weights(q, k, attn_mask, options), dropout_p) @ v
    return _attended(function, q, k, v, attn_mask, options)


class _Options(NamedTuple):
    is_causal: bool
    scale: float | None = None
    enable_gqa: bool = False


def _attended(
    function: Callable,
    q: DomainTensor,
    k: DomainTensor,
    v: DomainTensor,
    attn_mask: Any,
    options: _Options,
) -> DomainTensor:
    """Return the attention of broadcast q, k and v.

    If there is no mask, keys are sharded, and queries are not sharded over another group, keys go round the ranks. Else
    keys are gathered.
    """
    both = torch.cat([k, v], -1)
    rows = q.ndim - 2
    key_axis = both.domain.axes.get(rows)
    domain = q.domain
    other_axes = domain.without(rows)
    is_ring = attn_mask is None and key_axis is not None
    is_ring = is_ring and not shares_ranks(key_axis, other_axes.axes.values())
    is_whole = is_ring and rows not in domain.axes
    if is_whole:  # the ranks that share the keys divide the queries
        some = Axis(balanced(q.shape[rows], key_axis.degree), key_axis.group)
        domain = Domain(other_axes.axes | {rows: some})
    is_ring = is_ring and domain.axes[rows].group is key_axis.group
    keys = Domain(other_axes.axes | {rows: key_axis}) if is_ring else other_axes
    q_local = own_part(q, domain, q.shape)
    both = gather(both, [dim for dim in both.domain.axes if dim not in keys.axes])
    local = own_part(both, keys, (*q.shape[:-2], *both.shape[-2:]))
    parts = local.split([k.shape[-1], v.shape[-1]], -1)
    if is_ring:
        axes = domain.axes[rows], key_axis
        out = DomainTensor(_over_ranks(q_local, *parts, axes=axes, options=options), domain)
        return gather(out, [rows]) if is_whole else out
    mask = _seen(attn_mask, q, k, options)
    mask = None if mask is None else _rows_of_mask(mask, q)
    if q_local.numel():
        score_options = options._replace(is_causal=False)._asdict()
        out = function(q_local, *parts, attn_mask=mask, **score_options)
    else:
        float_mask = mask if mask is not None and mask.is_floating_point() else None
        empty = q_local.new_zeros(*q_local.shape[:-1], v.shape[-1])
        out = connected(empty, q_local, *parts, float_mask)
    return DomainTensor(out, domain)


def _broadcast(
    q: DomainTensor, k: DomainTensor, v: DomainTensor, *, shares: bool
) -> tuple[DomainTensor, DomainTensor, DomainTensor]:
    """Return q, k and v with the same number of dimensions, broadcast before the last two dimensions (S, D).

    k and v get the common sizes of k and v. q gets the common sizes of q, k and v.

    shares: whether heads of q share keys; then the numbers of heads may differ.
    """
    rows = max(t.ndim for t in (q, k, v)) - 2
    q, k, v = (t[(None,) * (rows + 2 - t.ndim)] if t.ndim < rows + 2 else t for t in (q, k, v))
    batch = rows - shares  # heads that share keys are not broadcast
    kv_sizes = torch.broadcast_shapes(k.shape[:batch], v.shape[:batch])
    k, v = (t.expand(*kv_sizes, *t.shape[batch:]) for t in (k, v))
    return q.expand(*torch.broadcast_shapes(q.shape[:batch], kv_sizes), *q.shape[batch:]), k, v


def _rows_of_mask(mask: Any, q: DomainTensor) -> Tensor:
    """Return the rows of a mask that belong to this rank's queries."""
    before = q.ndim - mask.ndim
    shape = *q.shape[:before], *mask.shape
    axes = {
        dim: axis
        for dim, axis in q.domain.axes.items()
        if dim >= before and shape[dim] == q.shape[dim]
    }
    return own_part(mask, Domain(axes), shape)


def _seen(mask: Any, q: DomainTensor, k: DomainTensor, options: _Options) -> Any:
    """Return the mask. Without a mask, return a causal mask for causal attention, and None for other attention."""
    if mask is not None or not options.is_causal:
        return mask
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def _weights(q: DomainTensor, k: DomainTensor, mask: Any, options: _Options) -> DomainTensor:
    """Return the softmax of the masked products of queries and keys: (B, H, S, S of keys)."""
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = (q * scale) @ k.mT
    if (mask := _seen(mask, q, k, options)) is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    return scores.softmax(-1)


def _over_ranks(*qkv: Tensor, axes: tuple[Axis, Axis], options: _Options) -> Tensor:
    """Return attention of this rank's rows; a collective. axes: the axes of the queries and of the keys."""
    q, k, v = qkv
    query_axis, key_axis = axes
    is_causal, scale, enable_gqa = options
    *lead, rows, width = q.shape
    batch = len(lead) - enable_gqa
    values = v.shape[-1]
    size = max(width, values)  # kernels take one size of heads
    k, v = (t.expand(*lead[:batch], *t.shape[batch:]) for t in (k, v))
    q, k, v = (F.pad(t, (0, size - t.shape[-1])) for t in (q, k, v))
    q, k, v = (
        t.reshape(math.prod(lead[:batch]), *(t.shape[batch:-2] or (1,)), *t.shape[-2:])
        for t in (q, k, v)
    )
    if q.is_meta:
        return q.new_empty(*lead, rows, values)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    mask = full(query_axis.layout.length, key_axis.layout.length)
    if is_causal:  # the first query stands at the first key
        mask = replace(mask, bands=tuple(band._replace(upper=0) for band in mask.bands))
    ring = ContextParallelOptions(method="ring")
    plan = make_plan(
        query_axis.layout, mask, ring.method, query_axis.rank, kv_layout=key_axis.layout
    )
    run = build_execution(plan, q, (query_axis.group,) * 2, ring, needs=KernelNeeds(fixed=True))
    out = _Attention.apply(q, k, v, run, width**-0.5 if scale is None else scale)
    return out[..., :values].reshape(*lead, rows, values)


class _Attention(torch.autograd.Function):
    """Context-parallel attention of (B, H, S, D). Forward and backward are collectives."""

    @staticmethod
    def forward(ctx, q, k, v, run, scale):
        out, lse = run.forward(q, k, v, terms=Terms(scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run, ctx.scale = run, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        dq, dk, dv, *_ = ctx.run.backward(
            BackwardInputs(dout, *ctx.saved_tensors), Terms(ctx.scale)
        )
        return dq, dk, dv, None, None


@rule("multi_head_attention_forward", draws=True)
def _multi_head_attention(
    function, *args, **kwargs
) -> tuple[DomainTensor, DomainTensor | None]:
    """Compute attention as nn.MultiheadAttention calls it. query, key, value: (S, N, E), or (S, E)."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    options = SimpleNamespace(**bound.arguments)
    inputs = options.query, options.key, options.value
    share = options.dropout_p if options.training else 0.0
    if not share and not any(map(is_sharded, inputs)):
        return wrapped(function(*unwrapped(args), **unwrapped(kwargs)))
    weights = options.q_proj_weight, options.k_proj_weight, options.v_proj_weight
    weights = weights if options.use_separate_proj_weight else options.in_proj_weight.chunk(3)
    biases = (None,) * 3 if options.in_proj_bias is None else options.in_proj_bias.chunk(3)
    q, *projected = (  # (N, H, S, D), or (H, S, D)
        F.linear(t, w, b).unflatten(-1, (options.num_heads, -1)).movedim(0, -2)
        for t, w, b in zip(inputs, weights, biases, strict=True)
    )
    both = zip(
        projected,
        (options.static_k, options.static_v),
        (options.bias_k, options.bias_v),
        strict=True,
    )
    k, v = (_with_extras(*each, zero=options.add_zero_attn) for each in both)
    mask = _both_masks(options, q, (options.bias_k is not None) + options.add_zero_attn)
    is_causal = options.is_causal and mask is None
    if options.need_weights:
        seen = F.dropout(_weights(q, k, mask, _Options(is_causal)), share)
        out = seen @ v
        seen = seen.mean(-3) if options.average_attn_weights else seen
    else:
        seen = None
        out = F.scaled_dot_product_attention(q, k, v, mask, share, is_causal)
    return F.linear(
        out.movedim(-2, 0).flatten(-2), options.out_proj_weight, options.out_proj_bias
    ), seen


def _with_extras(t: DomainTensor, static: Any, bias: Any, *, zero: bool) -> DomainTensor:
    """Return keys or values, (N, H, S, D), or the static ones, followed by a learned one and a zero."""
    t = t if static is None else wrapped(static).view(*t.shape[:-2], *static.shape[-2:])
    shape = *t.shape[:-2], 1, t.shape[-1]
    extras = [] if bias is None else [bias.view(t.shape[-3], 1, -1).expand(shape)]
    extras += [t.new_zeros(shape)] * zero
    return torch.cat([t, *extras], -2) if extras else t


def _both_masks(options: SimpleNamespace, q: DomainTensor, extras: int) -> Any:
    """Return the masks of positions and of padded keys as one mask to add to the scores; None if absent.

    A boolean mask hides a key where it is True. extras: number of keys after the others, which no mask hides. If
    `is_causal` is set, no keys are padded and no weights are requested, return None: the caller computes causally.
    """
    mask = options.attn_mask
    padding = options.key_padding_mask
    if extras:
        mask, padding = (None if t is None else F.pad(t, (0, extras)) for t in (mask, padding))
    if options.is_causal and padding is None and not options.need_weights:
        return None
    if mask is not None and mask.ndim == 3:  # (N * heads, S, S of keys)
        mask = mask.unflatten(0, (-1, options.num_heads))
    if padding is not None:
        padding = _added(
            padding.unsqueeze(-2).unsqueeze(-2) if padding.ndim == 2 else padding, q.dtype
        )
    mask = None if mask is None else _added(mask, q.dtype)
    return mask if padding is None else padding if mask is None else mask + padding


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """Return a mask to add to scores; a mask of truths becomes minus infinity where it hides."""
    return (
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
        if mask.dtype == torch.bool
        else mask
    )

"""Rules of attention. Queries stay where they are; keys and values of a sharded sequence travel from rank to rank.

No rank ever has all keys: attention over sharded positions is context-parallel attention, whose layout is that of the
axis, in any sizes. Where a mask is given, which takes memory for each query and key itself, and where queries and keys
are sharded over different ranks, keys and values are gathered.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from longshard.context.execution.build import Execution, build_execution
from longshard.context.execution.kernels.base import BackwardInputs, Terms
from longshard.context.execution.kernels.choose import KernelNeeds
from longshard.context.planning.mask import full
from longshard.context.planning.methods import make_plan
from longshard.context.planning.options import ContextParallelOptions
from longshard.domain.dispatch import (
    DomainTensor,
    is_sharded,
    rule,
    unwrapped,
    wrapped,
)
from longshard.domain.domain import Axis, Domain, balanced, shares_ranks
from longshard.domain.elementwise import own_part
from longshard.domain.transfer import gather
from longshard.sharding.rows import connected


@rule("scaled_dot_product_attention", draws=True)
def attention(
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
    """query, key, value: (B, H, S, D), or as torch broadcasts them; D is gathered.

    attn_mask: as large as torch takes it. Dropped weights are computed by hand.
    """
    inputs = query, key, value, attn_mask
    if not dropout_p and not any(map(is_sharded, inputs)):
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return wrapped(function(*unwrapped(inputs), **options))
    q, k, v = (gather(wrapped(t), [t.ndim - 1]) for t in inputs[:3])
    is_repeated = dropout_p or q.ndim - 3 in q.domain.axes
    if enable_gqa and (is_repeated or k.shape[-3] != v.shape[-3]):
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        enable_gqa = False
    q, k, v = _broadcast(q, k, v, shares=enable_gqa)
    if dropout_p:  # drawn by place, of whole tensors too
        weights = _weights(q, k, attn_mask, is_causal=is_causal, scale=scale)
        return F.dropout(weights, dropout_p) @ v
    options = _Options(is_causal, scale, enable_gqa)
    return _attended(function, q, k, v, attn_mask, options)


class _Options(NamedTuple):
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _attended(
    function: Callable,
    q: DomainTensor,
    k: DomainTensor,
    v: DomainTensor,
    attn_mask: Any,
    options: _Options,
) -> DomainTensor:
    """Return the attention of broadcast q, k and v: keys travel over the ranks of the queries, or are gathered."""
    both = torch.cat([k, v], -1)
    rows = q.ndim - 2
    of_keys = both.domain.axes.get(rows)
    domain = q.domain
    beside = domain.without(rows)
    travels = attn_mask is None and of_keys is not None
    travels = travels and not shares_ranks(of_keys, beside.axes.values())
    is_whole = travels and rows not in domain.axes
    if is_whole:  # each of the ranks that share the keys computes some of the queries
        some = Axis(balanced(q.shape[rows], of_keys.degree), of_keys.group)
        domain = Domain(beside.axes | {rows: some})
    travels = travels and domain.axes[rows].group is of_keys.group
    keys = Domain(beside.axes | {rows: of_keys}) if travels else beside
    q_local = own_part(q, domain, q.shape)
    both = gather(both, [dim for dim in both.domain.axes if dim not in keys.axes])
    local = own_part(both, keys, torch.Size([*q.shape[:-2], *both.shape[-2:]]))
    parts = local.split([k.shape[-1], v.shape[-1]], -1)
    if travels:
        axes = domain.axes[rows], of_keys
        out = DomainTensor(_over_ranks(q_local, *parts, axes=axes, options=options), domain)
        return gather(out, [rows]) if is_whole else out
    mask = _seen(attn_mask, q, k.shape[-2], is_causal=options.is_causal)
    mask = None if mask is None else _rows_of_mask(mask, q)
    if q_local.numel():
        of_scores = {"scale": options.scale, "enable_gqa": options.enable_gqa}
        out = function(q_local, *parts, attn_mask=mask, **of_scores)
    else:
        of_mask = [] if mask is None or not mask.is_floating_point() else [mask]
        empty = q_local.new_zeros(*q_local.shape[:-1], v.shape[-1])
        out = connected(empty, q_local, *parts, *of_mask)
    return DomainTensor(out, domain)


def _broadcast(
    q: DomainTensor, k: DomainTensor, v: DomainTensor, *, shares: bool
) -> tuple[DomainTensor, DomainTensor, DomainTensor]:
    """Give all three the same number of dimensions, and q, and k with v, the sizes before (S, D) that torch broadcasts.

    shares: heads of q share keys, so that the sizes of heads may differ.
    """
    rows = max(t.ndim for t in (q, k, v)) - 2
    q, k, v = (t[(None,) * (rows + 2 - t.ndim)] if t.ndim < rows + 2 else t for t in (q, k, v))
    batch = rows - shares  # heads that share keys are no broadcast
    beside = torch.broadcast_shapes(k.shape[:batch], v.shape[:batch])
    k, v = (
        t if t.shape[:batch] == beside else t.expand(*beside, *t.shape[batch:]) for t in (k, v)
    )
    before = [*torch.broadcast_shapes(q.shape[:batch], beside), *q.shape[batch:-2]]
    return q if [*q.shape[:-2]] == before else q.expand(*before, *q.shape[-2:]), k, v


def _rows_of_mask(mask: Any, q: DomainTensor) -> torch.Tensor:
    """Return the rows of a mask that belong to this rank's queries."""
    before = q.ndim - mask.ndim
    shape = torch.Size([*q.shape[:before], *mask.shape])
    axes = {
        dim: axis
        for dim, axis in q.domain.axes.items()
        if dim >= before and shape[dim] == q.shape[dim]
    }
    return own_part(mask, Domain(axes), shape)


def _seen(mask: Any, q: DomainTensor, keys: int, *, is_causal: bool) -> Any:
    """Return the mask; where none is given and attention is causal, the one that says so."""
    if mask is not None or not is_causal:
        return mask
    return torch.ones(q.shape[-2], keys, dtype=torch.bool, device=q.device).tril()


def _weights(
    q: DomainTensor,
    k: DomainTensor,
    mask: Any,
    *,
    is_causal: bool,
    scale: float | None,
) -> DomainTensor:
    """Return the softmax of the masked products of queries and keys: (B, H, S, S of keys)."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if (mask := _seen(mask, q, k.shape[-2], is_causal=is_causal)) is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    return scores.softmax(-1)


def _over_ranks(*qkv: torch.Tensor, axes: tuple[Axis, Axis], options: _Options) -> torch.Tensor:
    """Return attention of this rank's rows; a collective. axes: of queries and of keys."""
    q, k, v = qkv
    of_queries, of_keys = axes
    is_causal, scale, enable_gqa = options
    *lead, rows, width = q.shape
    batch = len(lead) - enable_gqa
    values = v.shape[-1]
    size = max(width, values)  # the engine takes one size of heads
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
    lengths = of_queries.layout.length, of_keys.layout.length
    mask = full(*lengths)
    if is_causal:  # the first query stands at the first key
        mask = replace(mask, bands=tuple(band._replace(upper=0) for band in mask.bands))
    ring = ContextParallelOptions(method="ring")
    plan = make_plan(
        of_queries.layout, mask, ring.method, of_queries.rank, kv_layout=of_keys.layout
    )
    run = build_execution(plan, q, (of_queries.group,) * 2, ring, needs=KernelNeeds(fixed=True))
    out = _Attention.apply(q, k, v, run, width**-0.5 if scale is None else scale)
    return out[..., :values].reshape(*lead, rows, values)


class _Attention(torch.autograd.Function):
    """Context-parallel attention of (B, H, S, D), whose forward and backward are collectives."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        run: Execution,
        scale: float,
    ) -> torch.Tensor:
        out, lse = run.forward(q, k, v, terms=Terms(scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run, ctx.scale = run, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk, dv, *_ = ctx.run.backward(
            BackwardInputs(dout, *ctx.saved_tensors), Terms(ctx.scale)
        )
        return dq, dk, dv, None, None


@rule("multi_head_attention_forward", draws=True)
def multi_head_attention(function, *args, **kwargs) -> tuple[DomainTensor, DomainTensor | None]:
    """query, key, value: (S, N, E), or (S, E); as nn.MultiheadAttention calls it."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    inputs = given.query, given.key, given.value
    share = given.dropout_p if given.training else 0.0
    if not share and not any(map(is_sharded, inputs)):
        return wrapped(function(*unwrapped(args), **unwrapped(kwargs)))
    weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
    weights = weights if given.use_separate_proj_weight else given.in_proj_weight.chunk(3)
    biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    projected = []
    for t, w, b in zip(inputs, weights, biases, strict=True):
        # (S, N, H, D), or (S, H, D)
        heads = F.linear(t, w, b).unflatten(-1, (given.num_heads, -1))
        projected.append(heads.movedim(0, -2))
    q, *projected = projected
    of_keys = zip(
        projected, (given.static_k, given.static_v), (given.bias_k, given.bias_v), strict=True
    )
    k, v = (_with_extras(*each, zero=given.add_zero_attn) for each in of_keys)
    mask = _both_masks(given, q, (given.bias_k is not None) + given.add_zero_attn)
    is_causal = given.is_causal and mask is None
    if given.need_weights:
        seen = F.dropout(_weights(q, k, mask, is_causal=is_causal, scale=None), share)
        out = seen @ v
        seen = seen.mean(-3) if given.average_attn_weights else seen
    else:
        seen = None
        out = F.scaled_dot_product_attention(q, k, v, mask, share, is_causal)
    return F.linear(
        out.movedim(-2, 0).flatten(-2), given.out_proj_weight, given.out_proj_bias
    ), seen


def _with_extras(t: DomainTensor, given: Any, bias: Any, *, zero: bool) -> DomainTensor:
    """Return keys or values (N, H, S, D), or those given in their place, with a learned one and a zero behind them."""
    t = t if given is None else wrapped(given).view(*t.shape[:-2], *given.shape[-2:])
    shape = *t.shape[:-2], 1, t.shape[-1]
    extras = [] if bias is None else [bias.view(t.shape[-3], 1, -1).expand(shape)]
    extras += [torch.zeros(shape, dtype=t.dtype, device=t.device)] * zero
    return torch.cat([t, *extras], -2) if extras else t


def _both_masks(given: SimpleNamespace, q: DomainTensor, extras: int) -> Any:
    """Return the masks of positions and of padded keys as one to add to the scores, or None; True: not seen.

    extras: number of keys behind the others, which the masks show. Where `is_causal` says what the mask is, and nothing
    of the weights is asked, causality takes its place.
    """
    mask = given.attn_mask
    padding = given.key_padding_mask
    if extras:
        mask, padding = (None if t is None else F.pad(t, (0, extras)) for t in (mask, padding))
    if given.is_causal and padding is None and not given.need_weights:
        return None
    if mask is not None and mask.ndim == 3:  # (N * heads, S, S of keys)
        mask = mask.unflatten(0, (-1, given.num_heads))
    if padding is not None:
        padding = _added(
            padding.unsqueeze(-2).unsqueeze(-2) if padding.ndim == 2 else padding, q.dtype
        )
    mask = None if mask is None else _added(mask, q.dtype)
    return mask if padding is None else padding if mask is None else mask + padding


def _added(mask: Any, dtype: torch.dtype) -> Any:
    """Return a mask that is added: minus infinity where a mask of truths hides."""
    return (
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
        if mask.dtype == torch.bool
        else mask
    )

"""Rules of products and of attention: rows stay where they are, and what others need is gathered."""

from inspect import signature
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.distributed.domain_parallel.dispatch import DomainTensor, is_sharded, refuse_unless, rule
from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.domain_parallel.elementwise import common_domain, merged, own_part
from trainer.distributed.domain_parallel.transfer import gather
from trainer.distributed.sharding.rows import connected


@rule("linear", first_only=True)
def linear(function, x, weight, bias=None) -> DomainTensor:
    """weight: plain, or tensor parallel, cut by outputs (x whole) or by inputs (x this rank's features)."""
    refuse_unless(x.ndim - 1 not in x.domain.axes, function, x, "sharded features")
    if not isinstance(weight, DTensor):
        return DomainTensor(F.linear(x.local, weight, bias), x.domain)
    is_part = x.shape[-1] != weight.shape[1]
    local = DTensor.from_local(x.local, weight.device_mesh, [Shard(x.ndim - 1) if is_part else Replicate()])
    out = F.linear(local, weight, None if is_part else bias)
    if is_part:
        out = out.redistribute(placements=[Replicate()])
        out = out if bias is None else out + bias
    return DomainTensor(out.to_local(), x.domain)


@rule("matmul", "bmm", "__matmul__", "__rmatmul__", "mm")
def matmul(function, a, b) -> DomainTensor:
    """Rows of a, and what stands before the last two dimensions, may be sharded."""
    if function.__name__ == "__rmatmul__":
        a, b = b, a
    x = a if is_sharded(a) else b
    refuse_unless(min(a.ndim, b.ndim) >= 2, function, x, "vectors")
    inner = [(t.ndim - 1, t) for t in (a, b)] + [(b.ndim - 2, b)]
    refuse_unless(not any(is_sharded(t) and dim in t.domain.axes for dim, t in inner), function, x, "sharded columns")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shapes = [torch.Size([*batch, *t.shape[-2:]]) for t in (a, b)]
    result = merged("matmul", [x], [common_domain("matmul", [t], s).axes for t, s in zip((a, b), shapes, strict=True)])
    shared = Domain({dim: axis for dim, axis in result.axes.items() if dim < len(batch)})
    return DomainTensor(torch.matmul(own_part(a, result, shapes[0]), own_part(b, shared, shapes[1])), result)


@rule("scaled_dot_product_attention")
def attention(
    function, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> DomainTensor:
    """query, key, value: (B, H, S, D). Queries stay where they are; keys and values that others need are gathered."""
    q, k, v = (t if isinstance(t, DomainTensor) else DomainTensor(t, Domain({})) for t in (query, key, value))
    x = next(filter(is_sharded, (q, k, v)))
    refuse_unless(attn_mask is None and not dropout_p and not is_causal, function, x, "a mask, or dropout")
    refuse_unless(k.shape[:-1] == v.shape[:-1] and q.ndim == k.ndim, function, x, "tensors of these sizes")
    refuse_unless(not any(t.ndim - 1 in t.domain.axes for t in (q, k, v)), function, x, "a sharded last dimension")
    batch = q.ndim - 2 - enable_gqa  # heads that share keys are no broadcast
    before = [*torch.broadcast_shapes(q.shape[:batch], k.shape[:batch]), *q.shape[batch:-2]]
    refuse_unless(not enable_gqa or batch not in q.domain.axes, function, q, "sharded heads that share keys")
    domain = common_domain(function.__name__, [q], torch.Size([*before, *q.shape[-2:]]))
    keys = Domain({dim: axis for dim, axis in domain.axes.items() if dim < q.ndim - 2})
    both = torch.cat([k, v], -1)
    both = gather(both, [dim for dim in both.domain.axes if dim not in keys.axes])
    merged(function.__name__, [x], [keys.axes, both.domain.axes])
    local = own_part(both, keys, torch.Size([*before, *both.shape[-2:]]))
    k_local, v_local = local.split([k.shape[-1], v.shape[-1]], -1)
    if not q.local.numel():
        empty = q.local.new_zeros(*q.local.shape[:-1], v.shape[-1])
        return DomainTensor(connected(empty, q.local, k_local, v_local), domain)
    return DomainTensor(function(q.local, k_local, v_local, scale=scale, enable_gqa=enable_gqa), domain)


@rule("multi_head_attention_forward")
def multi_head_attention(function, *args, **kwargs) -> tuple[DomainTensor, None]:
    """query, key, value: (S, N, E), or (S, E); as nn.MultiheadAttention calls it with need_weights=False."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    inputs = given.query, given.key, given.value
    x = next(filter(is_sharded, inputs), given.query)
    extras = given.bias_k, given.bias_v, given.key_padding_mask, given.attn_mask, given.static_k, given.static_v
    plain = all(extra is None for extra in extras) and not given.add_zero_attn and not given.is_causal
    dropped = given.training and given.dropout_p
    refuse_unless(plain and not dropped, function, x, "a mask, dropout in training, or a bias of keys")
    refuse_unless(not given.need_weights, function, x, "the attention weights; pass need_weights=False")
    weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
    weights = weights if given.use_separate_proj_weight else given.in_proj_weight.chunk(3)
    biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    projected = []
    for t, w, b in zip(inputs, weights, biases, strict=True):
        heads = F.linear(t, w, b).unflatten(-1, (given.num_heads, -1))  # (S, N, H, D), or (S, H, D)
        projected.append(heads.movedim(0, -2))
    out = F.scaled_dot_product_attention(*projected).movedim(-2, 0).flatten(-2)
    return F.linear(out, given.out_proj_weight, given.out_proj_bias), None

"""Rules of the functions that this package computes over sharded axes: the arguments of torch -> its operators.

`_OPERATORS` is the table of those that take torch's arguments as they are. Options that an operator does not have are
refused, with the option's name.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.distributed.domain_parallel import convolution, norms, pooling, reductions, resample
from trainer.distributed.domain_parallel.dispatch import DomainTensor, is_sharded, refused, rule, wrapped
from trainer.distributed.domain_parallel.domain import Domain
from trainer.distributed.domain_parallel.elementwise import common_domain, elementwise, merged, own_part
from trainer.distributed.domain_parallel.transfer import gather
from trainer.distributed.sharding.rows import connected


def _numbers(name: str) -> list[str]:
    return [f"{name}{n}d" for n in (1, 2, 3)]


# Functions that are an operator of this package on the first tensor; its other arguments, in torch's order. Arguments
# that choose a kernel of cuDNN are left out.
_OPERATORS: tuple[tuple[Sequence[str], Callable, str], ...] = (
    (_numbers("conv"), convolution.conv, "weight bias stride padding dilation groups"),
    (
        _numbers("conv_transpose"),
        convolution.conv_transpose,
        "weight bias stride padding output_padding groups dilation",
    ),
    (_numbers("max_pool"), pooling.max_pool, "kernel_size stride padding dilation ceil_mode"),
    (_numbers("avg_pool"), pooling.avg_pool, "kernel_size stride padding ceil_mode count_include_pad divisor_override"),
    (["group_norm"], norms.group_norm, "num_groups weight bias eps"),
    (["batch_norm"], norms.batch_norm, "running_mean running_var weight bias training momentum eps"),
    (["layer_norm"], norms.layer_norm, "normalized_shape weight bias eps"),
    (["rms_norm"], norms.rms_norm, "normalized_shape weight eps"),
)


def _on_shards(operator: Callable, names: Sequence[str]) -> Callable[..., DomainTensor]:
    def compute(function: Callable, x: DomainTensor, *args: Any, **kwargs: Any) -> DomainTensor:
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        if "kernel_size" in given:
            given["kernel_size"] = _each(given["kernel_size"], int(function.__name__[-2]))
            given["stride"] = given.get("stride") or None
        return _result(operator(x.local, x.domain, **given))

    return compute


for _functions, _operator, _names in _OPERATORS:
    rule(*_functions, first_only=True)(_on_shards(_operator, _names.split()))


def _unless(condition: bool, function: Callable, x: DomainTensor, why: str) -> None:
    if not condition:
        raise refused(function.__name__, x, why)


def _result(pair: tuple[torch.Tensor, Domain]) -> DomainTensor:
    return DomainTensor(*pair)


@rule(*_numbers("adaptive_avg_pool"), *_numbers("adaptive_max_pool"))
def adaptive_pool(function, x, output_size, return_indices=False) -> DomainTensor:
    spatial = int(function.__name__[-2])
    if _spatial_is_whole(x, spatial):
        return _locally(function, x, output_size)
    _unless({*_each(output_size, 1)} == {1}, function, x, "an output size other than 1")
    operator = pooling.adaptive_avg_pool if "avg" in function.__name__ else pooling.adaptive_max_pool
    return _result(operator(x.local, x.domain, spatial=spatial))


def _spatial_is_whole(x: DomainTensor, number: int) -> bool:
    return all(dim < x.ndim - number for dim in x.domain.axes)


def _locally(function: Callable, x: DomainTensor, *options: Any) -> DomainTensor:
    """Apply a function to a shard, which may be empty, of a tensor whose spatial dimensions are whole."""
    if x.local.numel():
        return wrapped(function(x.local, *options), x.domain)
    shape = function(torch.empty(x.shape, device="meta"), *options).shape
    return wrapped(connected(x.local.new_zeros(x.domain.local_shape(shape)), x.local), x.domain)


def _each(value: int | Sequence[int], number: int) -> tuple[int, ...]:
    return (value,) * number if isinstance(value, int) else tuple(value)


@rule("instance_norm", first_only=True)
def instance_norm(
    function,
    x,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
) -> DomainTensor:
    _unless(use_input_stats and running_mean is None, function, x, "running statistics of instances")
    return _result(norms.instance_norm(x.local, x.domain, weight, bias, eps))


@rule("interpolate")
def interpolate(
    function,
    x,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
) -> DomainTensor:
    if _spatial_is_whole(x, x.ndim - 2):
        options = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        return _locally(function, x, *options)
    names = {"linear": "linear", "bilinear": "linear", "trilinear": "linear", "nearest": "nearest"}
    _unless(mode in names and not recompute_scale_factor and not antialias, function, x, f"mode {mode!r}, or an option")
    options = {"mode": names[mode], "align_corners": bool(align_corners)}
    return _result(resample.interpolate(x.local, x.domain, size, scale_factor, **options))


@rule("pad")
def pad(function, x, pad, mode="constant", value=None) -> DomainTensor:
    pairs = zip(pad[::2], pad[1::2], strict=True)
    rows = {x.ndim - 1 - i: pair for i, pair in enumerate(pairs) if any(pair)}
    padded, domain = resample.pad(x.local, x.domain, rows, mode=mode, value=value or 0.0)
    return DomainTensor(padded if any(n > 0 for n in pad) else padded.clone(), domain)  # compiled code needs it


@rule("flip")
def flip(function, x, *args, dims=()) -> DomainTensor:
    asked = dims or (args[0] if isinstance(args[0], Sequence) else args)
    return _result(resample.flip(x.local, x.domain, [dim % x.ndim for dim in asked]))


@rule("roll")
def roll(function, x, shifts, dims=None) -> DomainTensor:
    _unless(dims is not None, function, x, "a roll of the flattened tensor; name the dimensions")
    pairs = [(shifts, dims)] if isinstance(dims, int) else zip(_each(shifts, 1), dims, strict=True)
    total: Counter[int] = Counter()
    for shift, dim in pairs:  # a dimension may be named twice
        total[dim % x.ndim] += shift
    rolled, domain = resample.roll(x.local, x.domain, total)
    return DomainTensor(rolled.clone() if rolled is x.local else rolled, domain)  # compiled code needs it


@rule("cumsum")
def cumsum(function, x, dim, dtype=None) -> DomainTensor:
    dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    return _result(resample.cumsum(x.local.to(dtype), x.domain, dim % x.ndim))


def _dims(dim: int | Sequence[int] | None) -> int | Sequence[int] | None:
    return None if isinstance(dim, Sequence) and not dim else dim  # no dimension: all of them


@rule("sum", "mean")
def total(function, x, dim=None, keepdim=False, dtype=None) -> DomainTensor:
    operator = {"sum": reductions.domain_sum, "mean": reductions.domain_mean}[function.__name__]
    return _result(operator(x.local if dtype is None else x.local.to(dtype), x.domain, _dims(dim), keepdim=keepdim))


@rule("amax", "amin", "max", "min")
def extreme(function, x, dim=None, keepdim=False) -> Any:
    name = function.__name__
    if isinstance(dim, DomainTensor | torch.Tensor):  # of two tensors
        return elementwise(torch.maximum if name == "max" else torch.minimum, x, dim)
    if not name.startswith("a") and dim is not None:
        _unless(isinstance(dim, int) and dim % x.ndim not in x.domain.axes, function, x, "indices along that dimension")
        return wrapped(function(x.local, dim, keepdim), x.domain.reduced([dim % x.ndim], keepdim=keepdim))
    signed = x.local if x.is_floating_point() else x.local.long()
    largest, domain = reductions.domain_max(-signed if "min" in name else signed, x.domain, _dims(dim), keepdim=keepdim)
    return DomainTensor((-largest if "min" in name else largest).to(x.dtype), domain)


@rule("all", "any")
def truth(function, x, dim=None, keepdim=False) -> DomainTensor:
    sought = (x.local if function.__name__ == "any" else x.local == 0).bool().long()
    found, domain = reductions.domain_sum(sought, x.domain, dim, keepdim=keepdim)
    return DomainTensor(found > 0 if function.__name__ == "any" else found == 0, domain)


@rule("var", "std")
def variance(function, x, dim=None, unbiased=None, keepdim=False, *, correction=None) -> DomainTensor:
    if isinstance(dim, bool):  # the first argument may be `unbiased`
        dim, unbiased = None, dim
    correction = (1 if unbiased in (None, True) else 0) if correction is None else correction
    options = {"correction": correction, "keepdim": keepdim, "dtype": reductions.wide(x.dtype)}
    var, domain = reductions.domain_var(x.local, x.domain, _dims(dim), **options)
    if function.__name__ == "std":  # without a gradient where it is 0
        var = torch.where(var == 0, 0.0, torch.where(var == 0, 1.0, var).sqrt())
    return DomainTensor(var.to(x.dtype), domain)


@rule("norm", "linalg_vector_norm")
def vector_norm(function, x, p=2.0, dim=None, keepdim=False, dtype=None, **named) -> DomainTensor:
    p = named.pop("ord", p)
    _unless(p in (None, "fro") or (not isinstance(p, str) and p > 0), function, x, f"order {p!r}")
    order, local = 2.0 if p in (None, "fro") else p, x.local if dtype is None else x.local.to(dtype)
    return _result(reductions.domain_norm(local, x.domain, _dims(dim), order=order, keepdim=keepdim))


@rule("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(function, x, p=0.5, training=True, inplace=False) -> DomainTensor:
    _unless(not training or p == 0, function, x, "ranks would draw masks that no single process draws; use p = 0")
    return x


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
def loss(
    function, x, target, *, reduction="mean", size_average=None, reduce=None, weight=None, **kwargs
) -> DomainTensor:
    told = x if is_sharded(x) else target
    plain = weight is None and size_average is None and reduce is None and reduction in ("none", "mean", "sum")
    _unless(plain, function, told, "weights, `reduce`, `size_average`, or a reduction that is not none, mean or sum")
    each = elementwise(function, x, target, reduction="none", **kwargs)
    return each if reduction == "none" else getattr(each, reduction)()


@rule("linear", first_only=True)
def linear(function, x, weight, bias=None) -> DomainTensor:
    """weight: plain, or tensor parallel, cut by outputs (x whole) or by inputs (x this rank's features)."""
    _unless(x.ndim - 1 not in x.domain.axes, function, x, "sharded features")
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
    _unless(min(a.ndim, b.ndim) >= 2, function, x, "vectors")
    inner = [(t.ndim - 1, t) for t in (a, b)] + [(b.ndim - 2, b)]
    _unless(not any(is_sharded(t) and dim in t.domain.axes for dim, t in inner), function, x, "sharded columns")
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
    _unless(attn_mask is None and not dropout_p and not is_causal, function, x, "a mask, or dropout")
    _unless(k.shape[:-1] == v.shape[:-1] and q.ndim == k.ndim, function, x, "tensors of these sizes")
    _unless(not any(t.ndim - 1 in t.domain.axes for t in (q, k, v)), function, x, "a sharded last dimension")
    batch = q.ndim - 2 - enable_gqa  # heads that share keys are no broadcast
    before = [*torch.broadcast_shapes(q.shape[:batch], k.shape[:batch]), *q.shape[batch:-2]]
    _unless(not enable_gqa or batch not in q.domain.axes, function, q, "sharded heads that share keys")
    domain = common_domain(function.__name__, [q], torch.Size([*before, *q.shape[-2:]]))
    keys = Domain({dim: axis for dim, axis in domain.axes.items() if dim < q.ndim - 2})
    both = torch.cat([k, v], -1)
    both = DomainTensor(*gather(both.local, both.domain, [dim for dim in both.domain.axes if dim not in keys.axes]))
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
    _unless(plain and not dropped, function, x, "a mask, dropout in training, or a bias of keys")
    _unless(not given.need_weights, function, x, "the attention weights; pass need_weights=False")
    weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
    weights = weights if given.use_separate_proj_weight else given.in_proj_weight.chunk(3)
    biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    projected = []
    for t, w, b in zip(inputs, weights, biases, strict=True):
        heads = F.linear(t, w, b).unflatten(-1, (given.num_heads, -1))  # (S, N, H, D), or (S, H, D)
        projected.append(heads.movedim(0, -2))
    out = F.scaled_dot_product_attention(*projected).movedim(-2, 0).flatten(-2)
    return F.linear(out, given.out_proj_weight, given.out_proj_bias), None

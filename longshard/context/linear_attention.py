"""Linear attention over a sequence that many ranks share, as one operator: a scan of states over the ranks.

A run of tokens that follow one another, a fragment, changes the state of a head by an affine map, S -> M S + B. Each
rank computes the map of each of its fragments. One exchange brings it the maps of all fragments before its own; it
folds them in the order of the tokens, and runs its own tokens from there:

    head_tail, 4 pieces on 2 ranks:   rank 0: fragments 0 3    wants the maps of 0 1 2, of which it has 0
                                      rank 1: fragments 1 2    wants the maps of 0 and 1

Bytes do not depend on the length: a map has K x (V + K) numbers a head, or K x (V + 1) without erasure. The backward is
the same from the end: a fragment's gradient of its entry state is M' times that of its exit, plus a bias. Maps and
states have float32 at least. See arXiv 2404.02882 (LASP-2 is 2502.07563) for simple decays.
"""

import math

import torch

from longshard.context.attention import add_autocast_rule
from longshard.context.execution.linear_chunks import Given, Tokens
from longshard.context.execution.linear_kernels import KernelPass, runs_kernels
from longshard.context.linear_pass import ChunkedPass, Place
from longshard.context.linear_scan import states_before
from longshard.context.planning.options import ContextParallelError


@torch.library.custom_op("longshard::linear_attention", mutates_args=())
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    plan: torch.Tensor | None,
    positions: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the recurrence of `execution/linear_chunks.py` over the whole sequence; a collective over the plan's mesh.

    q, k: (B, S, H, K), S this rank's rows; v: (B, S, G, V), H divides G; log_decay: (B, S, G) or (B, S, G, K), at most
    0; beta: (B, S, G), of the delta rule, None for no erasure; plan: the handle, (B,) int64, None if the rows are the
    whole sequence; positions: (B, S), 0 where a document begins, None for one document.
    -> scale times the outputs, as v; bytes of what the backward needs of the states; the state behind this
    rank's last row, (B, G, K, V). States are in float32 at least. Gradients flow through the outputs alone.

    Raises:
        ContextParallelError: inputs that do not fit each other, or a plan that did not cut them.
    """
    place, local = _local(Tokens(q, k, v, log_decay, beta, positions, scale), plan)
    maps = local.maps() if place.has_maps else None
    if maps is None:
        ends = place.ends(local.zeros, reverse=False)
    else:
        ends = Given(states_before(maps, place.axis, v.shape[3], reverse=False))
    out, entries, last = local.forward(ends)
    kept = [entries] if maps is None else [entries, maps[..., v.shape[3] :]]
    return (
        out.to(v.dtype),
        torch.cat([x.reshape(-1) for x in kept]).view(torch.uint8),
        last.clone(),
    )


@torch.library.custom_op("longshard::linear_attention_backward", mutates_args=())
def _linear_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    plan: torch.Tensor | None,
    positions: torch.Tensor | None,
    kept: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v, log_decay and beta ((0,) without one)."""
    place, local = _local(Tokens(q, k, v, log_decay, beta, positions, scale), plan)
    kept = kept.view(torch.promote_types(v.dtype, torch.float32))
    size = math.prod(local.shape)
    local.begin_backward(dout, kept[:size].view(local.shape))
    if place.has_maps:
        transitions = kept[size:].view(*local.shape[:-1], 1 if beta is None else q.shape[3])
        maps = torch.cat((local.biases(), transitions), -1)
        ends = Given(states_before(maps, place.axis, v.shape[3], reverse=True))
    else:
        ends = place.ends(local.zeros, reverse=True)
    *found, dbeta = local.backward(ends)
    given = q, k, v, log_decay
    found = [x.to(like.dtype).view(like.shape) for x, like in zip(found, given, strict=True)]
    return *found, v.new_empty(0) if beta is None else dbeta.to(beta.dtype).view(beta.shape)


def _local(x: Tokens, plan: torch.Tensor | None) -> tuple[Place, ChunkedPass | KernelPass]:
    """Check the inputs of the operator, and return where they are and what computes them."""
    q = x.q
    k = x.k
    v = x.v
    log_decay = x.log_decay
    beta = x.beta
    alike = (
        q.ndim == v.ndim == 4
        and q.shape == k.shape
        and q.shape[:2] == v.shape[:2]
        and v.shape[2] % q.shape[2] == 0
    )
    decays = (v.shape[:3], (*v.shape[:3], q.shape[-1]))
    if (
        not alike
        or log_decay.shape not in decays
        or (beta is not None and beta.shape != v.shape[:3])
    ):
        raise ContextParallelError(
            f"linear attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, decays "
            f"{tuple(log_decay.shape)} and beta {None if beta is None else tuple(beta.shape)}; give (B, S, H, K) "
            "twice, (B, S, G, V) with H dividing G, (B, S, G) or (B, S, G, K), and (B, S, G)"
        )
    place = Place.of(plan, q)
    return place, KernelPass(x, place.lengths) if runs_kernels(x) else ChunkedPass(x, place)


@linear_attention.register_fake
def _(q, k, v, _log_decay, _beta, plan, *_rest):
    dtype = torch.promote_types(v.dtype, torch.float32)
    last = v.new_empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    size = (
        math.prod(last.shape) * last.itemsize
        if plan is None
        else torch.library.get_ctx().new_dynamic_size()
    )
    return v.new_empty(v.shape), v.new_empty(size, dtype=torch.uint8), last


@_linear_attention_backward.register_fake
def _(_dout, q, k, v, log_decay, beta, *_rest):
    dbeta = v.new_empty(0) if beta is None else beta.new_empty(beta.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, log_decay)), dbeta


def _save(ctx, inputs, output) -> None:
    *tensors, scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.scale = scale


def _differentiate(ctx, dout, _dkept, _dlast):
    *inputs, kept = ctx.saved_tensors
    *gradients, dbeta = _linear_attention_backward(dout, *inputs, kept, ctx.scale)
    return *gradients, dbeta if inputs[4] is not None else None, None, None, None


linear_attention.register_autograd(_differentiate, setup_context=_save)

for _device_type in ("cpu", "cuda"):
    add_autocast_rule(torch.ops.longshard.linear_attention.default, _device_type, casts=())
    add_autocast_rule(
        torch.ops.longshard.linear_attention_backward.default, _device_type, casts=()
    )

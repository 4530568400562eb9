"""Linear attention over a sequence that many ranks share, as one operator: a scan of states over the ranks.

A fragment is a run of tokens that follow one another. It changes the state of a head by an affine map, S -> M S + B.
Each rank computes the map of each of its fragments. One exchange brings it the maps of all fragments before its own;
it folds them in the order of the tokens, and runs its own tokens from there:

    head_tail, 4 pieces on 2 ranks:   rank 0: fragments 0 3    wants the maps of 0 1 2, of which it has 0
                                      rank 1: fragments 1 2    wants the maps of 0 and 1

Bytes do not depend on the length: a map has K x (V + K) numbers a head, or K x (V + 1) without erasure. The backward is
the same from the end: the gradient of a fragment's entry state is M' times the gradient of its exit state, plus a bias.
Maps and states have float32 at least. See arXiv 2404.02882 (LASP-2 is 2502.07563) for simple decays.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longshard.context.attention import add_autocast_rules
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.execution.linear_kernels import KernelPass, runs_kernels
from longshard.context.linear_pass import ChunkedPass, Place
from longshard.context.planning.options import ContextParallelError
from longshard.sharding.tensors import wide_type


def linear_attention(x: Tokens, plan: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence of `execution/linear_chunks.py` over the whole sequence; a collective over the plan's mesh.

    Gradients flow through the outputs only.

    Args:
        x: This rank's rows.
        plan: The handle, (B,) int64; None if the rows are the whole sequence.

    Returns:
        Scale times the outputs, in the shape of v. The bytes of the states that the backward needs, 1-D. The state
        after this rank's last row, (B, G, K, V). States are in float32 at least.

    Raises:
        ContextParallelError: The inputs do not fit each other, or the plan did not cut them.
    """
    *tokens, beta, positions, scale = x
    return operator(tokens, beta, plan, positions, scale)


@torch.library.custom_op("longshard::linear_attention", mutates_args=())
def operator(
    tokens: Sequence[Tensor],
    beta: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `linear_attention`; a collective over the plan's mesh.

    Args:
        tokens: q, k, v and log_decay, shaped as in `Tokens`: (B, S, H, K) twice, (B, S, G, V), (B, S, G) or (B, S, G,
            K).
        beta: (B, S, G); None if absent.
        plan: The handle, (B,) int64; None if the rows are the whole sequence.
        positions: (B, S); None if absent.
        scale: The factor of the outputs.

    Returns:
        As `linear_attention`: the outputs, the bytes that the backward needs, the last state.
    """
    x = Tokens(*tokens, beta, positions, scale)
    place, local = _local(x, plan)
    maps = local.maps() if place.has_maps else None
    transitions = [] if maps is None else [maps[..., x.v.shape[3] :]]
    out, entries, last = local.forward(place.ends(local, maps, reverse=False))
    kept = torch.cat([part.reshape(-1) for part in (entries, *transitions)])
    return out.to(x.v.dtype), kept.view(torch.uint8), last.clone()


@torch.library.custom_op("longshard::linear_attention_backward", mutates_args=())
def _operator_backward(
    dout: Tensor,
    tokens: Sequence[Tensor],
    beta: Tensor | None,
    plan: Tensor | None,
    positions: Tensor | None,
    kept: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay and beta ((0,) if absent); a collective over the plan's mesh.

    kept: the bytes that the forward returned.
    """
    x = Tokens(*tokens, beta, positions, scale)
    place, local = _local(x, plan)
    kept = kept.view(wide_type(x.v.dtype))
    size = math.prod(local.shape)
    local.begin_backward(dout, kept[:size].view(local.shape))
    maps = None
    if place.has_maps:
        *shape, k_dim, _ = local.shape
        transitions = kept[size:].view(*shape, k_dim, 1 if beta is None else k_dim)
        maps = torch.cat((local.biases(), transitions), -1)
    *wide_gradients, dbeta = local.backward(place.ends(local, maps, reverse=True))
    gradients = [
        x.to(y.dtype).view(y.shape) for x, y in zip(wide_gradients, tokens, strict=True)
    ]
    dbeta = dout.new_empty(0) if beta is None else dbeta.to(beta.dtype).view(beta.shape)
    return *gradients, dbeta


def _local(x: Tokens, plan: Tensor | None) -> tuple[Place, ChunkedPass | KernelPass]:
    """Return this rank's fragments and the pass that computes them. Raise ContextParallelError if inputs do not fit."""
    q, k, v, log_decay, beta, _, _ = x
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
            f"{tuple(log_decay.shape)} and beta {None if beta is None else tuple(beta.shape)}. Give "
            "(B, S, H, K) twice, (B, S, G, V) with H dividing G, (B, S, G) or (B, S, G, K), and (B, "
            "S, G)"
        )
    place = Place.of(plan, q)
    return place, KernelPass(x, place.lengths) if runs_kernels(x) else ChunkedPass(x, place)


@operator.register_fake
def _(tokens, beta, plan, positions, scale):
    q, _, v, _ = tokens
    dtype = wide_type(v.dtype)
    last = v.new_empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    size = math.prod(last.shape) * last.itemsize  # symbolic sizes have no `nbytes`
    size = size if plan is None else torch.library.get_ctx().new_dynamic_size()
    return v.new_empty(v.shape), v.new_empty(size, dtype=torch.uint8), last


@_operator_backward.register_fake
def _(dout, tokens, beta, plan, positions, kept, scale):
    dbeta = dout.new_empty(0) if beta is None else beta.new_empty(beta.shape)
    return *(x.new_empty(x.shape) for x in tokens), dbeta


def _save(ctx, inputs, output) -> None:
    tokens, *others, ctx.scale = inputs
    ctx.save_for_backward(*tokens, *others, output[1])


def _differentiate(ctx, dout, _dkept, _dlast):
    *tokens, beta, plan, positions, kept = ctx.saved_tensors
    *gradients, dbeta = _operator_backward(dout, tokens, beta, plan, positions, kept, ctx.scale)
    return gradients, None if beta is None else dbeta, None, None, None


operator.register_autograd(_differentiate, setup_context=_save)

add_autocast_rules(torch.ops.longshard.linear_attention.default)
add_autocast_rules(torch.ops.longshard.linear_attention_backward.default)

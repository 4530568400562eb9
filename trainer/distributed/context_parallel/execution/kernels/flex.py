"""Compiled FlexAttention as a kernel of one tile. Interface and shapes: see `base.py`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from trainer.distributed.context_parallel.execution.kernels.cuda import padded
from trainer.distributed.context_parallel.planning.capabilities import CAPABILITIES
from trainer.distributed.context_parallel.planning.mask import Relation

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Relation, float], tuple[torch.Tensor, torch.Tensor]]
"""q, k, v, relation, scale -> output, log-sum-exp, differentiable."""


class Flex:
    """Compiled FlexAttention. It takes no statistics of the whole, so its backward is autograd over a second forward.

    With out and lse of the whole attention and the weight w = exp(lse_t - lse) of this tile, out is the sum of w out_t
    over tiles. Therefore d out_t = w dout and d lse_t = w dout . (out_t - out).
    """

    name = "flex"
    capabilities = CAPABILITIES["flex"]

    def __init__(self, attention: Attention | None = None) -> None:
        self._attention = attention or _compiled_attention

    def forward(self, q, k, v, *, relation, scale):
        out, lse = self._attention(*(padded(x, 16) for x in (q, k, v)), relation, scale)
        return out[..., : q.shape[3]], lse

    def backward(self, dout, q, k, v, out, lse, *, relation, scale):
        with _autograd():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            part, part_lse = self.forward(*leaves, relation=relation, scale=scale)
            with torch.no_grad():
                weight = (part_lse - lse).exp()[..., None]
                dout = weight * dout.to(weight.dtype)
                dlse = (dout * (part.to(dout.dtype) - out.to(dout.dtype))).sum(-1)
            return torch.autograd.grad((part, part_lse), leaves, (dout.to(part.dtype), dlse.to(part_lse.dtype)))


@contextmanager
def _autograd() -> Iterator[None]:
    """Enable autograd inside a `torch.library` operator, where the dispatcher skips it in any gradient mode."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    with guard, torch.enable_grad():
        yield


def _compiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, relation: Relation, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = None if relation is Relation.FULL else block_mask(relation, q.shape[2], k.shape[2], q.device)
    options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1], "return_aux": AuxRequest(lse=True)}
    with torch.compiler.config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=_SHAPES):
        out, aux = _compiled()(q, k, v, block_mask=mask, **options)
    return out, aux.lse


_SHAPES = 1024  # that may be compiled; a plan has tiles of more shapes than PyTorch's limit, 8


@cache
def _compiled() -> Callable[..., Any]:
    # With fullgraph, one shape above the limit raises, instead of running uncompiled with all scores in memory.
    return torch.compile(flex_attention, fullgraph=True)


@lru_cache(maxsize=64)
def block_mask(relation: Relation, n: int, m: int, device: torch.device, block: int = 128) -> BlockMask:
    """Return the relation of n queries and m keys for FlexAttention, by blocks, without a dense mask."""
    extra = torch.tensor(m - n, device=device)  # a tensor, so that another length does not recompile
    lowest, highest = 0 if relation.lower else -(n + m), m - n if relation.upper else n + m
    q_first, kv_first = (torch.arange(0, length, block, device=device) for length in (n, m))
    q_last, kv_last = ((first + block).clamp(max=length) - 1 for first, length in ((q_first, n), (kv_first, m)))
    # key - query takes each value from `least` to `most` in a block
    least, most = kv_first[None] - q_last[:, None], kv_last[None] - q_first[:, None]
    some = (least <= highest) & (most >= lowest)
    whole = (q_last - q_first == block - 1)[:, None] & (kv_last - kv_first == block - 1)[None]
    whole &= (least >= lowest) & (most <= highest)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=block, mask_mod=_MASKS[relation](extra), seq_lengths=(n, m)
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for (Q, K) bool the number of key blocks of each query block, (1, 1, Q), and these first, (1, 1, Q, K)."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


_MASKS: dict[Relation, Callable[[torch.Tensor], Callable[..., torch.Tensor]]] = {
    Relation.CAUSAL: lambda extra: lambda b, h, query, key: key <= query + extra,
    Relation.BI_CAUSAL: lambda extra: lambda b, h, query, key: (key >= query) & (key <= query + extra),
    Relation.INV_CAUSAL: lambda extra: lambda b, h, query, key: key >= query,
}

"""Checks of the inputs of a context and of its attention."""

import torch

from trainer.distributed.context_parallel.planning.heads import check_heads
from trainer.distributed.context_parallel.planning.mask import Mask
from trainer.distributed.context_parallel.planning.options import ContextParallelError


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lengths: tuple[int, int],
    sequences: int,
    head_degree: int,
    method: str,
) -> None:
    """Check the inputs of one attention call.

    lengths: this rank's rows of queries and of keys; sequences: of the batch, 0 for any number; head_degree: how many
    ranks divide the heads.

    Raises:
        ContextParallelError: the context did not cut the inputs, or the method cannot divide the heads.
    """
    alike = q.ndim == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype
    if not alike or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % max(k.shape[1], 1):
        raise ContextParallelError(
            f"context-parallel attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of types "
            f"{q.dtype}, {k.dtype}, {v.dtype}; give (B, H, S, D) and twice (B, K, T, D) of one type, K dividing H"
        )
    for x, length in zip((q, k), lengths, strict=True):
        if x.shape[2] != length:
            raise ContextParallelError(
                f"context-parallel attention got {x.shape[2]} rows of the sequence and its plan has {length} for this "
                "rank; cut the inputs by naming them in `context_parallel(buffers=...)`"
            )
    if sequences and sequences != q.shape[0]:
        raise ContextParallelError(
            f"context-parallel attention got {q.shape[0]} sequences and a plan for {sequences}; pass the handle's "
            "entries of the same sequences"
        )
    try:
        check_heads(q.shape[1], head_degree, method)
    except ValueError as error:
        raise ContextParallelError(str(error)) from None


def check_mask(mask: Mask | None, q_len: int, kv_len: int, sequences: int | None) -> None:
    """Check that a mask is for sequences of these lengths, and for this number of them (None: any number)."""
    if mask is None:
        return
    if (mask.q_len, mask.kv_len) != (q_len, kv_len) or mask.sequences not in (1, sequences or mask.sequences):
        raise ContextParallelError(
            f"the mask is for {mask.sequences} x {mask.q_len} queries and {mask.kv_len} keys, and there are "
            f"{sequences or 'any number of'} sequences of {q_len} queries and {kv_len} keys; make it for them, or "
            "one for all sequences"
        )

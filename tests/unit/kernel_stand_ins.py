"""Stand-ins of the attention operators of GPUs, and the kernels over them.

A stand-in has the schema of the operator of the installed PyTorch, so that the dispatcher checks every argument. It
computes by definition, in float64, what the operator's source says, and refuses what the operator reads wrongly:
rows that are not aligned, statistics that are not contiguous, heads that are no multiple of 8.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional as F

from longshard.context.execution.kernels.cuda import (
    CudaFlash,
    Cudnn,
    CudnnVarlen,
    Efficient,
    Varlen,
)
from longshard.context.planning.lowering import Call, Launch, batch_calls
from tests.unit.test_kernels import BI_CAUSAL, CAUSAL, FULL, INV_CAUSAL

# ---- plain attention of one sequence: q (S, H, D), k and v (T, H or fewer, D), lse (H, S)


def scores_of(q, k, hidden, scale):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (torch.einsum("shd,thd->hst", q, k) * scale).masked_fill(hidden, -torch.inf)


def attend(q, k, v, hidden, scale):
    assert not hidden.all(-1).any(), "a query that sees nothing"
    scores = scores_of(q, k, hidden, scale)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hst,thd->shd", scores.softmax(-1), v), scores.logsumexp(-1)


def differentiate(dout, q, k, v, out, lse, hidden, scale):
    ratio = q.shape[1] // k.shape[1]
    p = (scores_of(q, k, hidden, scale) - lse[..., None]).exp()
    dp = torch.einsum("shd,thd->hst", dout, v.repeat_interleave(ratio, dim=1))
    ds = p * (dp - (dout * out).sum(-1).t()[..., None]) * scale
    dq = torch.einsum("hst,thd->shd", ds, k.repeat_interleave(ratio, dim=1))
    dk, dv = torch.einsum("hst,shd->thd", ds, q), torch.einsum("hst,shd->thd", p, dout)
    return dq, *(x.unflatten(1, (-1, ratio)).sum(2) for x in (dk, dv))


def aligned(*tensors: torch.Tensor) -> None:
    """Check that the operators can read the tensors: heads of a multiple of 8, and rows aligned to 16 bytes."""
    for x in tensors:
        step = 16 // x.element_size()
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert x.storage_offset() % step == 0
        assert all(stride % step == 0 for stride, length in zip(x.stride()[:-1], x.shape, strict=False) if length > 1)


# ---- stand-ins


def window_hidden(n, m, longest_k, causal, left, right):
    """FlashAttention-2 counts both windows from the diagonal that ends at the last key; -1 is no bound."""
    left, right = (-1 if side is None or side >= longest_k else side for side in (left, right))
    right = 0 if causal else right
    distance = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return hidden


def flash_sequences(q, k, cum_q, cum_k, max_q, max_k):
    """(rows of the queries, rows of the keys) of each sequence; of the batch if there are no cumulative lengths."""
    if cum_q is None:
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        return None
    for ends, x, longest in ((cum_q, q, max_q), (cum_k, k, max_k)):
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert x.ndim == 3
        assert (ends[0], ends[-1]) == (0, x.shape[0])
        assert ends.diff().max() == longest
        assert ends.diff().min() > 0
    pairs = [[slice(a, b) for a, b in zip(e.tolist(), e.tolist()[1:], strict=False)] for e in (cum_q, cum_k)]
    return list(zip(*pairs, strict=True))


def flash_forward(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left=None,
    window_size_right=None, **unused,
):  # fmt: skip
    counts["flash_forward"] += 1
    aligned(q, k, v)
    assert q.shape[-1] <= 256
    assert not any(value is not None for value in unused.values())
    sequences = flash_sequences(q, k, cum_q, cum_k, max_q, max_k)
    windows = max_k, causal, window_size_left, window_size_right
    if sequences is None:
        hidden = window_hidden(q.shape[1], k.shape[1], *windows)
        outs, lses = zip(*(attend(*row, hidden, scale) for row in zip(q, k, v, strict=True)), strict=True)
        out, lse = torch.stack(outs), torch.stack(lses)
    else:
        out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[1::-1], torch.nan)
        for rows, keys in sequences:
            hidden = window_hidden(rows.stop - rows.start, keys.stop - keys.start, *windows)
            out[rows], lse[:, rows] = attend(q[rows], k[keys], v[keys], hidden, scale)
    return out, lse, *(q.new_empty(0) for _ in range(3))


def flash_backward(
    dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused, *, scale,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    counts["flash_backward"] += 1
    aligned(dout, q, k, v, out)
    assert lse.is_contiguous()
    sequences = flash_sequences(q, k, cum_q, cum_k, max_q, max_k)
    windows = max_k, causal, window_size_left, window_size_right
    if sequences is None:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        hidden = window_hidden(q.shape[1], k.shape[1], *windows)
        rows = zip(dout, q, k, v, out, lse, strict=True)
        return tuple(map(torch.stack, zip(*(differentiate(*row, hidden, scale) for row in rows), strict=True)))
    assert lse.shape == q.shape[1::-1]
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for rows, keys in sequences:
        hidden = window_hidden(rows.stop - rows.start, keys.stop - keys.start, *windows)
        parts = differentiate(dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], hidden, scale)
        for grad, place, part in zip(grads, (rows, keys, keys), parts, strict=True):
            grad[place] = part
    return tuple(grads)


def efficient_scores_mask(q, k, bias, mask_type):
    """(H, S, T) to be added for each sequence of the batch."""
    b, n, h, _ = q.shape
    m = k.shape[1]
    added = q.new_zeros(b, h, n, m)
    if bias is not None:
        assert bias.shape == added.shape
        assert bias.dtype == q.dtype
        assert bias.stride(3) == 1
        assert bias.stride(2) % 16 == 0
        added = added + bias
    if mask_type:
        diagonal = {1: 1, 2: m - n + 1}[mask_type]
        added = added.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(diagonal), -torch.inf)
    return added.isneginf()


def efficient_forward(q, k, v, bias, cum_q, cum_k, max_q, max_k, dropout, mask_type, with_lse, *, scale, **unused):
    counts["efficient_forward"] += 1
    aligned(q, k, v)
    assert with_lse
    assert q.shape[2] == k.shape[2] == v.shape[2]
    hidden = efficient_scores_mask(q, k, bias, mask_type)
    outs, lses = zip(*(attend(*row, scale) for row in zip(q, k, v, hidden, strict=True)), strict=True)
    lse = F.pad(torch.stack(lses), (0, -q.shape[1] % 32), value=torch.nan)
    return torch.stack(outs), lse, *(torch.zeros((), dtype=torch.int64) for _ in range(2)), max_q, max_k


def efficient_backward(
    dout, q, k, v, bias, out, cum_q, cum_k, max_q, max_k, lse, dropout, seed, offset, mask_type, bias_grad, *, scale,
    **unused,
):  # fmt: skip
    counts["efficient_backward"] += 1
    aligned(q, k, v)
    assert dout.is_contiguous()
    assert out.is_contiguous()
    assert q.shape[2] == k.shape[2] == v.shape[2]
    n = q.shape[1]
    assert lse.shape[-1] == math.ceil(n / 32) * 32
    assert lse[..., n:].isposinf().all()
    hidden = efficient_scores_mask(q, k, bias, mask_type)
    rows = zip(dout, q, k, v, out, lse[..., :n], hidden, strict=True)
    grads = map(torch.stack, zip(*(differentiate(*row, scale) for row in rows), strict=True))
    return *grads, q.new_empty(0)


def by_sequence(*tensors):
    """(B, H, S, D) each -> (S, H, D) of each sequence of the batch."""
    return zip(*(x.transpose(1, 2) for x in tensors), strict=True)


def cudnn_forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale):
    counts["cudnn_forward"] += 1
    aligned(q, k, v)
    n, m = q.shape[2], k.shape[2]
    assert with_lse
    assert k.shape[1] == v.shape[1]
    assert q.shape[1] % k.shape[1] == 0
    assert 1 not in (n, m)
    assert not causal or n == m
    hidden = window_hidden(n, m, m, causal, None, None)
    outs, lses = zip(*(attend(*row, hidden, scale) for row in by_sequence(q, k, v)), strict=True)
    seed = torch.zeros((), dtype=torch.int64)
    out = torch.stack(outs).transpose(1, 2).contiguous()
    return out, torch.stack(lses)[..., None], None, None, n, m, seed, seed.clone(), None


def cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
):  # fmt: skip
    counts["cudnn_backward"] += 1
    aligned(dout, q, k, v, out)
    n, m = q.shape[2], k.shape[2]
    assert (max_q, max_k) == (n, m)
    assert dout.stride() == out.stride()
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    hidden = window_hidden(n, m, m, causal, None, None)
    rows = by_sequence(dout, q, k, v, out)
    grads = (differentiate(*row, part[..., 0], hidden, scale) for row, part in zip(rows, lse, strict=True))
    return tuple(torch.stack(x).transpose(1, 2).contiguous() for x in zip(*grads, strict=True))


STAND_INS: dict[str, Callable] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_efficient_attention_forward": efficient_forward,
    "_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
counts: Counter[str] = Counter()
library = torch.library.Library("attention_stand_in", "FRAGMENT")
for operator, stand_in in STAND_INS.items():
    library.define(str(getattr(torch.ops.aten, operator).default._schema).removeprefix("aten::"))
    library.impl(operator, stand_in, "CompositeExplicitAutograd")
OPS = torch.ops.attention_stand_in


def cudnn_for_tiles(large: int) -> CudnnVarlen:
    """Return `cudnn_varlen` with another smallest large tile."""
    kernel = CudnnVarlen(OPS)
    kernel.capabilities = replace(kernel.capabilities, large=large)
    return kernel


KERNELS = [CudaFlash(OPS), Efficient(OPS), Cudnn(OPS), Varlen(OPS), cudnn_for_tiles(5)]

# ---- many tiles in one launch


def launches_of(calls: tuple[Call, ...]) -> list[Launch]:
    return [Launch(group) for group in batch_calls(calls)]


def by_call(launch: Launch, parts: tuple[torch.Tensor, ...]) -> Iterator[tuple[Call, tuple[torch.Tensor, ...]]]:
    """Yield each call of a launch with its own rows of the results of `forward_many` or `backward_many`."""
    offsets = [0] * len(parts)
    for call in launch.calls:
        spans = (call.q, call.q) if len(parts) == 2 else (call.q, call.kv, call.kv)
        lengths = [stop - start for start, stop in spans]
        yield call, tuple(x[:, :, o : o + n] for x, o, n in zip(parts, offsets, lengths, strict=True))
        offsets = [o + n for o, n in zip(offsets, lengths, strict=True)]
    assert offsets == [x.shape[2] for x in parts]


CALLS = (
    Call((0, 3), (0, 3), CAUSAL, True),
    Call((3, 7), (3, 7), CAUSAL, True),
    Call((7, 9), (2, 9), FULL, True),
    Call((9, 12), (4, 12), CAUSAL, True),
    Call((0, 5), (12, 13), FULL, False),
    Call((4, 8), (1, 7), BI_CAUSAL, False),
    Call((0, 2), (5, 9), BI_CAUSAL, False),
    Call((2, 3), (5, 9), INV_CAUSAL, False),
    Call((9, 12), (6, 8), FULL, False),
)

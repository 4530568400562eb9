"""Kernels of GPUs: without a GPU over plain stand-ins of their operators, with one against softmax written out.

A stand-in has the schema of the operator of the installed PyTorch, so that the dispatcher checks every argument. It
computes by definition, in float64, what the operator's source says, and refuses what the operator reads wrongly:
rows that are not aligned, statistics that are not contiguous, heads that are no multiple of 8.
"""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.unit.test_kernels import (
    BI_CAUSAL,
    CAUSAL,
    FULL,
    INV_CAUSAL,
    TILE_IDS,
    TILES,
    can,
    definition,
    error,
    inputs,
    parts_of_a_whole,
    run,
    visible,
)
from trainer.distributed.context_parallel.execution.kernels import cuda, flex
from trainer.distributed.context_parallel.execution.kernels.base import BackwardInputs, Kernel
from trainer.distributed.context_parallel.execution.kernels.choose import CUDA_KERNELS
from trainer.distributed.context_parallel.execution.kernels.cuda import CudaFlash, Cudnn, Efficient, Varlen
from trainer.distributed.context_parallel.execution.kernels.flex import Flex
from trainer.distributed.context_parallel.planning.lowering import Call, split
from trainer.distributed.context_parallel.planning.mask import Relation
from trainer.distributed.context_parallel.planning.tiles import Tile

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
    """What all of these operators read: heads of a multiple of 8, 16 bytes at a time."""
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
    assert q.shape[1] == k.shape[1] == v.shape[1]
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


def plain_attention(q, k, v, relation, scale):
    """What FlexAttention is asked for, differentiable."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores.masked_fill(~visible(relation, q.shape[2], k.shape[2]).to(q.device), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


KERNELS = [CudaFlash(OPS), Efficient(OPS), Cudnn(OPS), Varlen(OPS), Flex(plain_attention)]
by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@by_name
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=TILE_IDS)
def test_a_tile_alone(kernel: Kernel, tile: tuple[Relation, int, int], heads: tuple[int, int]):
    """Whatever a tile is cut into, each call is right."""
    relation, n, m = tile
    if relation.lower and not (kernel.capabilities.bands or kernel.capabilities.masks):
        pytest.skip("a sliding window is refused for this kernel")
    for part in split(Tile((0, n), (0, m), relation), kernel.capabilities):
        rows, keys = part.q[1] - part.q[0], part.kv[1] - part.kv[0]
        assert run(kernel, (part.relation, rows, keys), heads) < 1e-12


@by_name
@pytest.mark.parametrize("head_dim", [4, 5, 16, 33, 64, 80, 128, 256])
def test_heads_of_any_size_it_declares(kernel: Kernel, head_dim: int):
    limits = kernel.capabilities
    if head_dim > limits.max_head_dim or head_dim % limits.head_dim_multiple:
        pytest.skip("beyond what the kernel declares; choose_kernel refuses it")
    assert run(kernel, (CAUSAL, 9, 9), head_dim=head_dim) < 1e-12


@by_name
@pytest.mark.parametrize(
    "whole", [(FULL, 40, 25), (CAUSAL, 33, 70), (BI_CAUSAL, 70, 90), (INV_CAUSAL, 70, 100)], ids=str
)
def test_tiles_are_parts_of_a_whole(kernel: Kernel, whole: tuple[Relation, int, int]):
    """Cut by keys, then into what the kernel can do: merged they are the whole, and their gradients add up."""
    relation, n, m = whole
    if relation.lower and not (kernel.capabilities.bands or kernel.capabilities.masks):
        pytest.skip("a sliding window is refused for this kernel")
    if relation is FULL:
        tiles = [Tile((0, 40), (0, 11)), Tile((0, 40), (11, 25))]
    elif relation is CAUSAL:
        tiles = [Tile((0, n), (0, 20)), Tile((0, n), (20, m), CAUSAL)]
    else:
        tiles = [Tile((0, n), (0, m), relation)]
    parts = [part for tile in tiles for part in split(tile, kernel.capabilities)]
    assert all(can(kernel, p.relation, p.q[1] - p.q[0], p.kv[1] - p.kv[0]) for p in parts if not p.relation.lower)
    parts_of_a_whole(kernel, whole, parts, bound=1e-11)


@by_name
@pytest.mark.parametrize("offset", [0, 1])
def test_any_layout_of_the_inputs(kernel: Kernel, offset: int):
    """Rows of one buffer, as keys and values travel; the operator's stand-in refuses what is not aligned."""
    n, m = 6, 6
    q, k, v, cotangent = inputs(4, 2, n, m)
    buffer = torch.zeros(m * 2 * 2 * 2 * 8 + offset, dtype=torch.float64)[offset:].view(m, 2, 2, 2, 8)
    held_k, held_v = buffer.permute(1, 2, 3, 0, 4)  # (rows, 2, B, K, D), as the ring holds them
    held_k.copy_(k)
    held_v.copy_(v)
    rows = F.pad(q.transpose(1, 2), (0, offset))[..., : q.shape[3]].transpose(1, 2)
    wanted, wanted_lse, wanted_grads = definition(q, k, v, cotangent, CAUSAL, 0.3)
    out, lse = kernel.forward(rows, held_k, held_v, relation=CAUSAL, scale=0.3)
    expanded = cotangent[:, :, :1].expand_as(out)
    grads = kernel.backward(cotangent, rows, held_k, held_v, out, lse, relation=CAUSAL, scale=0.3)
    for got, wish in zip((out, lse, *grads), (wanted, wanted_lse, *wanted_grads), strict=True):
        assert error(got, wish) < 1e-12
    dq = kernel.backward(expanded, rows, held_k, held_v, out, lse, relation=CAUSAL, scale=0.3)[0]
    assert error(dq, definition(q, k, v, expanded, CAUSAL, 0.3)[2][0]) < 1e-12


def test_what_is_aligned_is_not_copied():
    buffer = torch.zeros(6, 2, 2, 2, 8, dtype=torch.bfloat16)
    k, _ = buffer.permute(1, 2, 3, 0, 4)
    assert cuda._rows(k).data_ptr() == buffer.data_ptr()
    assert cuda._gathered(k[:1], ((0, 2), (2, 5))).data_ptr() == buffer.data_ptr()
    assert cuda._aligned(torch.zeros(9, dtype=torch.bfloat16)[1:].view(1, 8)).storage_offset() == 0


def test_single_rows_do_not_reach_cudnn():
    counts.clear()
    for tile in ((FULL, 1, 5), (FULL, 5, 1), (CAUSAL, 1, 1), (FULL, 2, 2)):
        assert run(Cudnn(OPS), tile) < 1e-12
    assert counts == {"flash_forward": 3, "flash_backward": 3, "cudnn_forward": 1, "cudnn_backward": 1}


@pytest.mark.parametrize(("relation", "n", "m"), [(BI_CAUSAL, 4, 6), (INV_CAUSAL, 4, 4), (CAUSAL, 3, 5)])
def test_cudnn_refuses_what_it_would_get_wrong(relation: Relation, n: int, m: int):
    q, k, v, cotangent = inputs(4, 2, n, m)
    with pytest.raises(ValueError, match=f"{relation.value} of {n} queries and {m} keys"):
        Cudnn(OPS).forward(q, k, v, relation=relation, scale=0.3)
    with pytest.raises(ValueError, match="use another"):
        Cudnn(OPS).backward(cotangent, q, k, v, q, q[..., 0], relation=relation, scale=0.3)


# ---- many tiles in one launch

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


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("head_dim", [8, 5])
def test_many_calls_are_as_one_after_another(batch: int, head_dim: int):
    """By value, and in one launch for each relation; windows of another width are another launch."""
    kernel = Varlen(OPS)
    q, k, v, cotangent = (x[:batch] for x in inputs(4, 2, 12, 13, head_dim))
    counts.clear()
    results = kernel.forward_many(q, k, v, CALLS, scale=0.3)
    # FULL, CAUSAL, INV_CAUSAL, and BI_CAUSAL with 2 keys more than queries, of which both calls are
    assert counts == {"flash_forward": 4}
    whole_out, whole_lse = torch.randn_like(q), torch.randn_like(q[..., 0]) + 4
    grads = kernel.backward_many(BackwardInputs(cotangent, q, k, v, whole_out, whole_lse), CALLS, scale=0.3)
    assert counts == {"flash_forward": 4, "flash_backward": 4}
    assert len(results) == len(grads) == len(CALLS)
    single = CudaFlash(OPS)
    for call, result, grad in zip(CALLS, results, grads, strict=True):
        dout, rows, out, lse = (x[:, :, slice(*call.q)] for x in (cotangent, q, whole_out, whole_lse))
        keys, values = (x[:, :, slice(*call.kv)] for x in (k, v))
        options = {"relation": call.relation, "scale": 0.3}
        wanted = (
            *single.forward(rows, keys, values, **options),
            *single.backward(dout, rows, keys, values, out, lse, **options),
        )
        for got, wish in zip((*result, *grad), wanted, strict=True):
            assert error(got, wish) < 1e-12


def test_windows_of_another_width_are_another_launch():
    q, k, v, _ = inputs(4, 2, 6, 9)
    calls = (
        Call((0, 3), (0, 4), BI_CAUSAL, True),
        Call((3, 6), (3, 8), BI_CAUSAL, True),
        Call((0, 3), (5, 9), BI_CAUSAL, False),
    )
    counts.clear()
    Varlen(OPS).forward_many(q, k, v, calls, scale=0.3)
    assert counts == {"flash_forward": 2}


def test_packed_documents_are_gathered_without_a_copy():
    """Documents of one sequence, one behind another, are read where they lie."""
    q, k, v, _ = (x[:1].transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(4, 2, 12, 12))
    spans = (0, 3), (3, 7), (7, 12)
    assert cuda._gathered(q, spans).data_ptr() == q.data_ptr()
    results = Varlen(OPS).forward_many(q, k, v, tuple(Call(s, s, CAUSAL, True) for s in spans), scale=0.3)
    for (start, stop), (out, lse) in zip(spans, results, strict=True):
        parts = (x[:, :, start:stop] for x in (q, k, v))
        wanted, wanted_lse, _ = definition(*parts, q[:, :, start:stop], CAUSAL, 0.3)
        assert error(out, wanted) < 1e-12
        assert error(lse, wanted_lse) < 1e-12


# ---- flex


@pytest.mark.parametrize(
    ("relation", "n", "m"),
    [
        (CAUSAL, 70, 70),
        (CAUSAL, 33, 90),
        (BI_CAUSAL, 70, 75),
        (BI_CAUSAL, 40, 100),
        (INV_CAUSAL, 64, 64),
        (INV_CAUSAL, 50, 97),
        (BI_CAUSAL, 1, 9),
    ],
)
def test_block_mask_is_the_relation(relation: Relation, n: int, m: int):
    """The blocks are those that PyTorch finds by looking at every pair, and FlexAttention with them is attention."""
    mask = flex.block_mask(relation, n, m, torch.device("cpu"), block=16)
    wanted = create_block_mask(mask.mask_mod, None, None, n, m, device="cpu", BLOCK_SIZE=16)
    for kind in ("kv", "full_kv", "q", "full_q"):
        numbers, indices = (getattr(mask, f"{kind}_{x}") for x in ("num_blocks", "indices"))
        wanted_numbers, wanted_indices = (getattr(wanted, f"{kind}_{x}") for x in ("num_blocks", "indices"))
        assert torch.equal(numbers, wanted_numbers)
        for row, count in enumerate(numbers.flatten().tolist()):
            assert sorted(indices[0, 0, row, :count]) == sorted(wanted_indices[0, 0, row, :count])
    pairs = mask.mask_mod(0, 0, torch.arange(n)[:, None], torch.arange(m))
    assert torch.equal(pairs.expand(n, m), visible(relation, n, m))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("tile", TILES, ids=TILE_IDS)
def test_flex_forward(monkeypatch: pytest.MonkeyPatch, tile: tuple[Relation, int, int]):
    """FlexAttention itself, not compiled."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    relation, n, m = tile
    q, k, v, cotangent = inputs(4, 2, n, m, 20, torch.float32)
    out, lse = Flex().forward(q, k, v, relation=relation, scale=0.3)
    wanted, wanted_lse, _ = definition(q, k, v, cotangent, relation, 0.3)
    assert out.shape == q.shape
    assert error(out, wanted) < 1e-6
    assert error(lse, wanted_lse) < 1e-6


@torch.library.custom_op("attention_stand_in::flex_backward", mutates_args=())
def flex_backward_inside(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> list[torch.Tensor]:
    return [*Flex(plain_attention).backward(dout, q, k, v, out, lse, relation=CAUSAL, scale=0.3)]


@pytest.mark.parametrize("grad", [False, True])
def test_flex_backward_runs_inside_an_operator(grad: bool):
    """There the dispatcher skips autograd, and `enable_grad` alone does not bring it back."""
    q, k, v, cotangent = inputs(4, 2, 5, 9)
    out, lse, grads = definition(q, k, v, cotangent, CAUSAL, 0.3)
    with torch.set_grad_enabled(grad):
        for got, wanted in zip(flex_backward_inside(cotangent, q, k, v, out, lse), grads, strict=True):
            assert error(got, wanted) < 1e-12


# ---- operators of this PyTorch, by their shapes


@pytest.mark.parametrize("kernel", CUDA_KERNELS[:4], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "tile", [(FULL, 40, 25), (FULL, 1, 7), (CAUSAL, 33, 33), (CAUSAL, 3, 70), (BI_CAUSAL, 7, 9)], ids=str
)
def test_shapes_by_the_meta_kernels(kernel: Kernel, tile: tuple[Relation, int, int], dtype: torch.dtype):
    relation, n, m = tile
    if not kernel.capabilities.bottom_right and relation.upper and n != m:
        pytest.skip("no call of this kernel")
    if kernel.name == "cudnn" and 1 in (n, m):
        pytest.skip("done by cuda_flash")
    head_dim = 24 if kernel.name == "cudnn" else 20
    q = torch.empty(2, 4, n, head_dim, dtype=dtype, device="meta")
    k, v = (torch.empty(2, 2, m, head_dim, dtype=dtype, device="meta") for _ in range(2))
    out, lse = kernel.forward(q, k, v, relation=relation, scale=0.3)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    if kernel.name == "efficient":
        return  # torch's meta kernel of its backward lacks the argument `out`; the stand-in's schema checks the call
    grads = kernel.backward(out, q, k, v, out, lse, relation=relation, scale=0.3)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]


# ---- on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def on_gpu(heads: int, kv_heads: int, n: int, m: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(n + m)
    shapes = [(2, heads, n, head_dim), *[(2, kv_heads, m, head_dim)] * 2, (2, heads, n, head_dim)]
    return [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]


def plain_errors(q, k, v, cotangent, relation, scale, wanted) -> list[float]:
    """Errors of output and gradients of attention written out, every step in q's type."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = plain_attention(*leaves, relation, scale)
    grads = torch.autograd.grad(out, leaves, cotangent)
    return [error(a, b) for a, b in zip((out, *grads), wanted, strict=True)]


@needs_gpu
@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 2), 16), ((4, 1), 20), ((4, 4), 64), ((4, 1), 128), ((4, 2), 256)], ids=str
)
@pytest.mark.parametrize(
    "tile",
    [
        (FULL, 200, 333),
        (FULL, 1, 77),
        (CAUSAL, 333, 333),
        (CAUSAL, 70, 333),
        (BI_CAUSAL, 100, 333),
        (INV_CAUSAL, 200, 300),
    ],
    ids=str,
)
def test_on_a_gpu(kernel: Kernel, tile: tuple[Relation, int, int], head_dim: int, heads, dtype: torch.dtype):
    """A tile alone, and parts of a whole: at most twice the error of attention written out in this type."""
    limits, scale, (relation, n, m) = kernel.capabilities, head_dim**-0.5, tile
    if str(dtype).removeprefix("torch.") not in limits.dtypes or head_dim > limits.max_head_dim:
        pytest.skip("beyond what the kernel declares")
    if head_dim % limits.head_dim_multiple or (relation.lower and not (limits.bands or limits.masks)):
        pytest.skip("beyond what the kernel declares")
    q, k, v, cotangent = on_gpu(*heads, n, m, head_dim, dtype)
    out, lse, grads = definition(q, k, v, cotangent, relation, scale)
    bounds = plain_errors(q, k, v, cotangent, relation, scale, (out, *grads))
    merged, merged_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    sums = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    halves = [Tile((0, n), (0, m), relation)]
    if relation is FULL:
        halves = [Tile((0, n), (0, 30)), Tile((0, n), (30, m))]
    for part in (p for half in halves for p in split(half, limits)):
        rows, keys = (slice(None), slice(None), slice(*part.q)), (slice(None), slice(None), slice(*part.kv))
        part_out, part_lse = kernel.forward(q[rows], k[keys], v[keys], relation=part.relation, scale=scale)
        merged[rows] += part_out * (part_lse - lse[rows]).exp()[..., None]
        merged_lse[rows] = torch.logaddexp(merged_lse[rows], part_lse.double())
        statistics = out[rows].to(dtype), lse[rows].float()
        found = kernel.backward(
            cotangent[rows], q[rows], k[keys], v[keys], *statistics, relation=part.relation, scale=scale
        )
        for total, place, grad in zip(sums, (rows, keys, keys), found, strict=True):
            total[place] += grad
    assert error(merged_lse, lse) < 1e-3
    for got, wanted, bound in zip((merged, *sums), (out, *grads), bounds, strict=True):
        assert error(got, wanted) <= 2 * bound + 1e-6


@needs_gpu
def test_many_calls_on_a_gpu():
    kernel, single = next(x for x in CUDA_KERNELS if x.name == "varlen"), CudaFlash()
    q, k, v, cotangent = on_gpu(4, 2, 12, 13, 64, torch.bfloat16)
    out, lse = torch.randn_like(q), torch.randn_like(q[..., 0], dtype=torch.float32) + 4
    results = kernel.forward_many(q, k, v, CALLS, scale=0.125)
    grads = kernel.backward_many(BackwardInputs(cotangent, q, k, v, out, lse), CALLS, scale=0.125)
    for call, result, grad in zip(CALLS, results, grads, strict=True):
        rows, keys = slice(*call.q), slice(*call.kv)
        parts = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        options = {"relation": call.relation, "scale": 0.125}
        wanted = single.forward(*parts, **options)
        wanted += single.backward(cotangent[:, :, rows], *parts, out[:, :, rows], lse[:, :, rows], **options)
        for got, wish in zip((*result, *grad), wanted, strict=True):
            assert error(got, wish.double()) < 2e-2

"""Law: each kernel of GPUs, over stand-ins of its operators, is attention written out, by tile and by launch."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional as F

from longshard.context.execution.kernels import cuda
from longshard.context.execution.kernels.base import BackwardInputs, Kernel
from longshard.context.execution.kernels.cuda import CudaFlash, Cudnn, Varlen
from longshard.context.planning.lowering import Call, Launch, split
from longshard.context.planning.mask import Relation
from longshard.context.planning.tiles import Tile
from tests.unit.kernel_stand_ins import CALLS, KERNELS, OPS, by_call, counts, launches_of
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
)

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
    """Tiles are cut by keys, then into calls that the kernel supports. Merged results and gradients equal the whole."""
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
    """Inputs are rows of one buffer, as keys and values are sent; the operator's stand-in refuses unaligned inputs."""
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
    grads = kernel.backward(BackwardInputs(cotangent, rows, held_k, held_v, out, lse), relation=CAUSAL, scale=0.3)
    for got, wish in zip((out, lse, *grads), (wanted, wanted_lse, *wanted_grads), strict=True):
        assert error(got, wish) < 1e-12
    dq = kernel.backward(BackwardInputs(expanded, rows, held_k, held_v, out, lse), relation=CAUSAL, scale=0.3)[0]
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
        Cudnn(OPS).backward(BackwardInputs(cotangent, q, k, v, q, q[..., 0]), relation=relation, scale=0.3)


# ---- many tiles in one launch


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("head_dim", [8, 5])
def test_many_calls_are_as_one_after_another(batch: int, head_dim: int):
    """By value, and in one launch for each relation; windows of another width are another launch."""
    kernel = Varlen(OPS)
    q, k, v, cotangent = (x[:batch] for x in inputs(4, 2, 12, 13, head_dim))
    counts.clear()
    launches, results, grads = launches_of(CALLS), {}, {}
    for launch in launches:
        results |= by_call(launch, kernel.forward_many(q, k, v, launch, scale=0.3))
    # FULL, CAUSAL, INV_CAUSAL, and BI_CAUSAL: both BI_CAUSAL calls have 2 keys more than queries
    assert counts == {"flash_forward": 4}
    whole_out, whole_lse = torch.randn_like(q), torch.randn_like(q[..., 0]) + 4
    inputs_of_backward = BackwardInputs(cotangent, q, k, v, whole_out, whole_lse)
    for launch in launches:
        grads |= by_call(launch, kernel.backward_many(inputs_of_backward, launch, scale=0.3))
    assert counts == {"flash_forward": 4, "flash_backward": 4}
    assert results.keys() == grads.keys() == {*CALLS}
    same_one_by_one(CALLS, inputs_of_backward, (results, grads))


def same_one_by_one(calls: Sequence[Call], inputs_of_backward: BackwardInputs, results: tuple[dict, dict]) -> None:
    """Check results and gradients of each call against a kernel that computes the call alone."""
    single = CudaFlash(OPS)
    for call in calls:
        dout, rows, out, lse = (
            x[:, :, slice(*call.q)]
            for x in (inputs_of_backward.dout, inputs_of_backward.q, inputs_of_backward.out, inputs_of_backward.lse)
        )
        keys, values = (x[:, :, slice(*call.kv)] for x in (inputs_of_backward.k, inputs_of_backward.v))
        options = {"relation": call.relation, "scale": 0.3}
        wanted = (
            *single.forward(rows, keys, values, **options),
            *single.backward(BackwardInputs(dout, rows, keys, values, out, lse), **options),
        )
        for got, wish in zip((*results[0][call], *results[1][call]), wanted, strict=True):
            assert error(got, wish) < 1e-12


def test_windows_of_another_width_are_another_launch():
    calls = (
        Call((0, 3), (0, 4), BI_CAUSAL, True),
        Call((0, 3), (5, 9), BI_CAUSAL, False),
        Call((3, 6), (3, 7), BI_CAUSAL, True),
    )
    assert [launch.q for launch in launches_of(calls)] == [((0, 3), (0, 3), (3, 6))]
    wider = Call((3, 6), (3, 8), BI_CAUSAL, True)
    assert [len(launch.calls) for launch in launches_of((*calls[:2], wider))] == [2, 1]


def test_packed_documents_are_gathered_without_a_copy():
    """Documents of one sequence, one behind another, are read where they lie."""
    q, k, v, _ = (x[:1].transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(4, 2, 12, 12))
    spans = (0, 3), (3, 7), (7, 12)
    assert cuda._gathered(q, spans).data_ptr() == q.data_ptr()
    launch = Launch(tuple(Call(span, span, CAUSAL, True) for span in spans))
    for call, (out, lse) in by_call(launch, Varlen(OPS).forward_many(q, k, v, launch, scale=0.3)):
        parts = (x[:, :, slice(*call.q)] for x in (q, k, v))
        wanted, wanted_lse, _ = definition(*parts, q[:, :, slice(*call.q)], CAUSAL, 0.3)
        assert error(out, wanted) < 1e-12
        assert error(lse, wanted_lse) < 1e-12


@pytest.mark.parametrize("tile", [(BI_CAUSAL, 4, 5), (BI_CAUSAL, 3, 5), (INV_CAUSAL, 4, 6)], ids=str)
def test_kernels_without_windows_take_queries_alone(tile: tuple[Relation, int, int]):
    """Adjacent documents of one token are a tile with two diagonals, in a run without windows."""
    relation, n, m = tile
    kernel = Cudnn(OPS)
    parts_of_a_whole(kernel, tile, [*split(Tile((0, n), (0, m), relation), kernel.capabilities)], bound=1e-11)

"""Law: results of tiles merge to attention over all keys; the result of a lone tile is the kernel's own."""

import pytest
import torch

from trainer.distributed.context_parallel.execution.stages import Merged
from trainer.distributed.context_parallel.planning.lowering import Call
from trainer.distributed.context_parallel.planning.tiles import Relation

B, H, S, D = 2, 4, 6, 8
HEADS = slice(0, H)


def call(q: tuple[int, int], *, fresh: bool) -> Call:
    return Call(q, (0, S), next(iter(Relation)), fresh)


def part(rows: int, keys: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of random scores over some keys."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, H, rows, keys, dtype=torch.float64, generator=generator)
    values = torch.randn(B, H, keys, D, dtype=torch.float64, generator=generator)
    lse_type = torch.promote_types(dtype, torch.float32)
    out = (scores.softmax(-1) @ values).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)  # as kernels return it
    return out, scores.logsumexp(-1).to(lse_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_of_a_lone_tile_is_the_kernels_own(dtype: torch.dtype) -> None:
    out, lse = part(S, 5, dtype)
    total = Merged(torch.empty(B, H, S, D, dtype=dtype))
    total.add(HEADS, call((0, S), fresh=True), out, lse)
    assert total.result[0].data_ptr() == out.data_ptr()
    assert total.result[1].data_ptr() == lse.data_ptr()


def test_a_lone_result_in_another_order_is_brought_into_that_of_sums() -> None:
    out, lse = part(S, 5)
    total = Merged(torch.empty(B, H, S, D))
    total.add(HEADS, call((0, S), fresh=True), out.contiguous(), lse.transpose(1, 2).contiguous().transpose(1, 2))
    got, got_lse = total.result
    assert torch.equal(got, out)
    assert torch.equal(got_lse, lse)
    assert got.transpose(1, 2).is_contiguous()
    assert got_lse.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [[(0, S)], [(0, 2), (2, S)]], ids=["one tile", "two tiles"])
def test_later_tiles_merge_as_they_do_into_filled_memory(dtype: torch.dtype, first: list[tuple[int, int]]) -> None:
    """The first stage in one tile, which is kept as it is, or in two, which are copied: the same bits."""
    (out, lse), (more, more_lse) = part(S, 5, dtype), part(4, 3, dtype, seed=1)
    total = Merged(torch.empty(B, H, S, D, dtype=dtype))
    for start, stop in first:
        total.add(HEADS, call((start, stop), fresh=True), out[:, :, start:stop], lse[:, :, start:stop])
    total.add(HEADS, call((2, S), fresh=False), more, more_lse)
    got, got_lse = total.result
    wide = torch.promote_types(dtype, torch.float32)
    assert got.dtype == got_lse.dtype == wide
    assert torch.equal(got[:, :, :2], out[:, :, :2].to(wide))
    weights = torch.stack([lse[:, :, 2:], more_lse]).softmax(0).to(wide)
    wanted = weights[0, ..., None] * out[:, :, 2:].to(wide) + weights[1, ..., None] * more.to(wide)
    torch.testing.assert_close(got[:, :, 2:], wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_lse[:, :, 2:], torch.logaddexp(lse[:, :, 2:], more_lse))


def test_some_heads_alone_are_not_the_whole() -> None:
    out, lse = part(S, 5)
    total = Merged(torch.empty(B, H, S, D))
    total.add(slice(0, 2), call((0, S), fresh=True), out[:, :2], lse[:, :2])
    got, got_lse = total.result
    assert torch.equal(got[:, :2], out[:, :2])
    assert not got[:, 2:].any()
    assert torch.isinf(got_lse[:, 2:]).all()


def test_queries_without_keys_are_zero() -> None:
    got, got_lse = Merged(torch.empty(B, H, S, D)).result
    assert not got.any()
    assert torch.isinf(got_lse).all()

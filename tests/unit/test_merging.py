"""Law: results of tiles merge to attention over all keys; the result of a lone tile is the kernel's own."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longshard.context.execution import merging
from longshard.context.execution.stages import Merged
from tests.interpreted.process import ENVIRONMENT, ROOT, needs_triton

pytestmark = pytest.mark.about("longshard/context/execution/merge_kernel.py")

B, H, S, D = 2, 4, 6, 8
HEADS, ALL = slice(0, H), slice(0, S)


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
    total.add(HEADS, ALL, out, lse, fresh=True)
    assert total.result[0].data_ptr() == out.data_ptr()
    assert total.result[1].data_ptr() == lse.data_ptr()


def test_a_lone_result_in_another_order_is_brought_into_that_of_sums() -> None:
    out, lse = part(S, 5)
    total = Merged(torch.empty(B, H, S, D))
    total.add(HEADS, ALL, out.contiguous(), lse.transpose(1, 2).contiguous().transpose(1, 2), fresh=True)
    got, got_lse = total.result
    assert torch.equal(got, out)
    assert torch.equal(got_lse, lse)
    assert got.transpose(1, 2).is_contiguous()
    assert got_lse.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [[(0, S)], [(0, 2), (2, S)]], ids=["one tile", "two tiles"])
def test_later_tiles_merge_as_they_do_into_filled_memory(dtype: torch.dtype, first: list[tuple[int, int]]) -> None:
    """The first stage in one tile, which is kept as it is, or in two, which are copied: the same bits."""
    (out, lse), (later, more_lse) = part(S, 5, dtype), part(4, 3, dtype, seed=1)
    total = Merged(torch.empty(B, H, S, D, dtype=dtype))
    for start, stop in first:
        total.add(HEADS, slice(start, stop), out[:, :, start:stop], lse[:, :, start:stop], fresh=True)
    total.add(HEADS, slice(2, S), later, more_lse, fresh=False)
    got, got_lse = total.result
    wide = torch.promote_types(dtype, torch.float32)
    assert got.dtype == got_lse.dtype == wide
    assert torch.equal(got[:, :, :2], out[:, :, :2].to(wide))
    weights = torch.stack([lse[:, :, 2:], more_lse]).softmax(0).to(wide)
    wanted = weights[0, ..., None] * out[:, :, 2:].to(wide) + weights[1, ..., None] * later.to(wide)
    torch.testing.assert_close(got[:, :, 2:], wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_lse[:, :, 2:], torch.logaddexp(lse[:, :, 2:], more_lse))


def test_some_heads_alone_are_not_the_whole() -> None:
    out, lse = part(S, 5)
    total = Merged(torch.empty(B, H, S, D))
    total.add(slice(0, 2), ALL, out[:, :2], lse[:, :2], fresh=True)
    got, got_lse = total.result
    assert torch.equal(got[:, :2], out[:, :2])
    assert not got[:, 2:].any()
    assert torch.isinf(got_lse[:, 2:]).all()


def test_queries_without_keys_are_zero() -> None:
    got, got_lse = Merged(torch.empty(B, H, S, D)).result
    assert not got.any()
    assert torch.isinf(got_lse).all()


# ---- one merge


def case(dtype: torch.dtype, rows: slice, heads: slice, device: str = "cpu") -> list[torch.Tensor]:
    """Return totals, in which every third query saw no key yet, and a part to merge."""
    (total, total_lse), (out, lse) = part(S, 5, torch.promote_types(dtype, torch.float32)), part(S, 3, dtype, seed=1)
    total[:, :, ::3], total_lse[:, :, ::3] = 0, -torch.inf
    return [x.to(device) for x in (total, total_lse, out[:, heads, rows], lse[:, heads, rows])]


def by_weights(total, total_lse, out, lse) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results by their shares of the sum of exponentials, in float64."""
    total, total_lse, out, lse = (x.double() for x in (total, total_lse, out, lse))
    new = torch.logaddexp(total_lse, lse)
    return total * (total_lse - new).exp()[..., None] + out * (lse - new).exp()[..., None], new


@pytest.mark.parametrize("heads", [HEADS, slice(1, 3)], ids=["all heads", "some heads"])
@pytest.mark.parametrize("rows", [ALL, slice(1, 5)], ids=["all rows", "some rows"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
def test_a_merge_is_the_weighted_sum(dtype: torch.dtype, bound: float, rows: slice, heads: slice) -> None:
    total, total_lse, out, lse = case(dtype, rows, heads)
    before = total.clone()
    place = total[:, heads, rows], total_lse[:, heads, rows]
    wanted = by_weights(*place, out, lse)
    merging.merge(*place, out, lse)
    for got, wish in zip(place, wanted, strict=True):
        assert (got.double() - wish).norm() / wish.norm() < bound
    assert torch.equal(total[:, :1], before[:, :1]) == (heads != HEADS)


def test_operators_and_bytes_of_a_merge() -> None:
    """Two operators over the output, of 18 bytes for each element, and six over the log-sum-exp."""
    seen: list[tuple[str, int]] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if not func.is_view:
                tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor)]
                large = [x for x in tensors if x.shape == out.shape]
                seen.append((func.overloadpacket.__name__, sum(x.nbytes for x in large)))
            return result

    total, total_lse, out, lse = case(torch.bfloat16, ALL, HEADS)
    with Log():
        merging.merge_eagerly(total, total_lse, out, lse)
    bytes_by_operator = {name: size / out.numel() for name, size in seen if size}
    assert bytes_by_operator == {"mul_": 4 + 4, "addcmul_": 4 + 2 + 4}
    assert len(seen) == 2 + 6


_INTERPRETED = """
import torch
from tests.unit.test_merging import ALL, HEADS, by_weights, case
from longshard.context.execution.merging import fused_merge, merge_eagerly
for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
    for rows in (ALL, slice(1, 5)):
        for heads in (HEADS, slice(1, 3)):
            for order in (lambda x: x, torch.Tensor.contiguous):
                total, total_lse, out, lse = case(dtype, rows, heads)
                before = total.clone()
                place = total[:, heads, rows], total_lse[:, heads, rows]
                copies = [x.clone() for x in place]
                fused_merge()(*place, order(out), lse)
                merge_eagerly(*copies, out, lse)
                for got, wanted in zip(place, copies, strict=True):
                    assert ((got - wanted).norm() / wanted.norm()).item() < bound
                assert torch.equal(total[:, :1], before[:, :1]) == (heads != HEADS)
print("equal")
"""


@needs_triton
def test_the_fused_kernel_interpreted_is_the_eager_merge() -> None:
    """On a CPU, by Triton's interpreter, in a process of its own: the interpreter is chosen when Triton is imported."""
    command = [sys.executable, "-c", _INTERPRETED]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
def test_the_fused_kernel_on_a_gpu(dtype: torch.dtype, bound: float) -> None:
    """By value, without falling back, and inside an operator."""
    total, total_lse, out, lse = case(dtype, ALL, HEADS, "cuda")
    wanted = by_weights(total, total_lse, out, lse)
    merge_inside(total, total_lse, out, lse)
    assert not merging._without_kernel
    for got, wish in zip((total, total_lse), wanted, strict=True):
        assert (got.double() - wish).norm() / wish.norm() < bound


@torch.library.custom_op("merging_test::merge", mutates_args=("total", "total_lse"))
def merge_inside(total: torch.Tensor, total_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    merging.merge(total, total_lse, out, lse)


class OnAGpu(torch.Tensor):
    """A tensor of this machine that says it is on a GPU."""

    device = torch.device("cuda")


def test_a_kernel_that_fails_is_told_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def missing() -> merging.Merge:
        tried.append(1)
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(merging, "_without_kernel", set())
    monkeypatch.setattr(merging, "fused_merge", missing)
    for _ in range(2):
        total, total_lse, out, lse = case(torch.float64, ALL, HEADS)
        wanted = by_weights(total, total_lse, out, lse)
        merging.merge(total.as_subclass(OnAGpu), total_lse, out, lse)
        torch.testing.assert_close((total, total_lse), wanted)
    assert tried == [1]
    assert [record.message for record in caplog.records] == [
        "partial results of attention are merged without a fused kernel (ImportError: No module named 'triton')"
    ]


def test_a_fused_kernel_is_used_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(merging, "fused_merge", lambda: lambda *tensors: used.append(tensors))
    total, total_lse, out, lse = case(torch.float32, ALL, HEADS)
    merging.merge(total.as_subclass(OnAGpu), total_lse, out, lse)
    assert len(used) == 1
    merging.merge(total, total_lse, out, lse)
    assert len(used) == 1

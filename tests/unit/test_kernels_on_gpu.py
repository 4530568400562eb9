"""Law: the operators of this PyTorch have the shapes that kernels expect and, on a GPU, their values."""

import pytest
import torch

from longshard.context.execution.kernels.base import BackwardInputs, Kernel
from longshard.context.execution.kernels.choose import CUDA_KERNELS
from longshard.context.execution.kernels.cuda import CudaFlash
from longshard.context.planning.lowering import split
from longshard.context.planning.mask import Relation
from longshard.context.planning.tiles import Tile
from tests.unit.kernel_stand_ins import CALLS, by_call, launches_of
from tests.unit.test_kernels import BI_CAUSAL, CAUSAL, FULL, INV_CAUSAL, definition, error

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
    grads = kernel.backward(BackwardInputs(out, q, k, v, out, lse), relation=relation, scale=0.3)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]


# ---- on a GPU


def on_gpu(heads: int, kv_heads: int, n: int, m: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(n + m)
    shapes = [(2, heads, n, head_dim), *[(2, kv_heads, m, head_dim)] * 2, (2, heads, n, head_dim)]
    return [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]


def plain_errors(q, k, v, cotangent, relation, scale, wanted) -> list[float]:
    """Errors of output and gradients of attention written out, every step in q's type."""
    out, _, grads = definition(q, k, v, cotangent, relation, scale, q.dtype)
    return [error(a, b) for a, b in zip((out, *grads), wanted, strict=True)]


@pytest.mark.gpu
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
        gradients = kernel.backward(
            BackwardInputs(cotangent[rows], q[rows], k[keys], v[keys], *statistics),
            relation=part.relation,
            scale=scale,
        )
        for total, place, grad in zip(sums, (rows, keys, keys), gradients, strict=True):
            total[place] += grad
    assert error(merged_lse, lse) < 1e-3
    for got, wanted, bound in zip((merged, *sums), (out, *grads), bounds, strict=True):
        assert error(got, wanted) <= 2 * bound + 1e-6


@pytest.mark.gpu
def test_many_calls_on_a_gpu():
    kernel, single = next(x for x in CUDA_KERNELS if x.name == "varlen"), CudaFlash()
    q, k, v, cotangent = on_gpu(4, 2, 12, 13, 64, torch.bfloat16)
    out, lse = torch.randn_like(q), torch.randn_like(q[..., 0], dtype=torch.float32) + 4
    inputs_of_backward, results, grads = BackwardInputs(cotangent, q, k, v, out, lse), {}, {}
    for launch in launches_of(CALLS):
        results |= by_call(launch, kernel.forward_many(q, k, v, launch, scale=0.125))
        grads |= by_call(launch, kernel.backward_many(inputs_of_backward, launch, scale=0.125))
    for call in CALLS:
        rows, keys = slice(*call.q), slice(*call.kv)
        parts = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        options = {"relation": call.relation, "scale": 0.125}
        wanted = single.forward(*parts, **options)
        wanted += single.backward(cotangent[:, :, rows], *parts, out[:, :, rows], lse[:, :, rows], **options)
        for got, wish in zip((*results[call], *grads[call]), wanted, strict=True):
            assert error(got, wish.double()) < 2e-2

"""Every kernel that runs on a CPU, against softmax written out: one tile alone, and tiles as parts of a whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshard.context.execution.kernels.base import BackwardInputs, Kernel, repeated, summed
from longshard.context.execution.kernels.choose import CUDA_KERNELS, KernelNeeds, choose_kernel
from longshard.context.execution.kernels.cpu import CpuFlash, Math
from longshard.context.planning.capabilities import (
    Capabilities,
)
from longshard.context.planning.lowering import split
from longshard.context.planning.mask import Relation
from longshard.context.planning.tiles import Tile
from longshard.sharding.errors import OptionError

FULL, CAUSAL, BI_CAUSAL, INV_CAUSAL = Relation.FULL, Relation.CAUSAL, Relation.BI_CAUSAL, Relation.INV_CAUSAL
KERNELS = [CpuFlash(), Math()]
TILES = [
    (FULL, 5, 9),
    (FULL, 9, 3),
    (FULL, 1, 1),
    (CAUSAL, 7, 7),
    (CAUSAL, 1, 1),
    (CAUSAL, 4, 11),
    (CAUSAL, 1, 6),
    (BI_CAUSAL, 5, 5),
    (BI_CAUSAL, 5, 8),
    (BI_CAUSAL, 8, 10),
    (INV_CAUSAL, 6, 6),
    (INV_CAUSAL, 4, 9),
    (INV_CAUSAL, 1, 5),
]
TILE_IDS = [f"{relation.value}-{n}x{m}" for relation, n, m in TILES]
by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def visible(relation: Relation, n: int, m: int) -> torch.Tensor:
    """(n, m) bool, by the words of `Relation`, pair by pair."""
    i, j = torch.arange(n)[:, None], torch.arange(m)
    return {FULL: j >= 0, CAUSAL: j <= i + m - n, BI_CAUSAL: (i <= j) & (j <= i + m - n), INV_CAUSAL: j >= i}[
        relation
    ].expand(n, m)


def inputs(
    heads: int, kv_heads: int, queries: int, keys: int, head_dim: int = 8, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """q, k, v, cotangent."""
    generator = torch.Generator().manual_seed(heads + 31 * queries + 7 * keys)
    shapes = [(2, heads, queries, head_dim), *[(2, kv_heads, keys, head_dim)] * 2, (2, heads, queries, head_dim)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]


def definition(
    q, k, v, cotangent, relation: Relation, scale: float, dtype: torch.dtype = torch.float64, softcap: float = 0.0
):
    """Output, log-sum-exp, gradients of q, k, v; every step in `dtype`, by autograd."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~visible(relation, q.shape[2], k.shape[2]).to(q.device), -torch.inf)
    out = scores.softmax(-1) @ v
    return out.detach(), scores.logsumexp(-1).detach(), torch.autograd.grad(out, leaves, cotangent.to(dtype))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative norm of the difference."""
    assert got.shape == wanted.shape
    return ((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-12)).item()


def run(
    kernel: Kernel,
    tile: tuple[Relation, int, int],
    heads=(4, 2),
    head_dim=8,
    dtype=torch.float64,
    scale=0.3,
    softcap=0.0,
):
    """Largest error of output, log-sum-exp and gradients of a tile alone."""
    relation, n, m = tile
    q, k, v, cotangent = inputs(*heads, n, m, head_dim, dtype)
    wanted, wanted_lse, wanted_grads = definition(q, k, v, cotangent, relation, scale, softcap=softcap)
    out, lse = kernel.forward(q, k, v, relation=relation, scale=scale)
    assert out.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    grads = kernel.backward(BackwardInputs(cotangent, q, k, v, out, lse), relation=relation, scale=scale)
    assert all(grad.dtype == dtype for grad in grads)
    pairs = zip((out, lse, *grads), (wanted, wanted_lse, *wanted_grads), strict=True)
    # Gradients that are zero in exact numbers, as of a query with one key, have no relative error.
    return max(error(a, b) if b.norm() > 1e-9 else a.double().norm().item() for a, b in pairs)


def can(kernel: Kernel, relation: Relation, n: int, m: int) -> bool:
    """Whether it is one call by the kernel's own words."""
    return [*split(Tile((0, n), (0, m), relation), kernel.capabilities)] == [Tile((0, n), (0, m), relation)]


@by_name
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=TILE_IDS)
def test_a_tile_alone(kernel: Kernel, tile: tuple[Relation, int, int], heads: tuple[int, int]):
    """Bottom-right diagonals too, which the CPU kernel does by a mask."""
    assert run(kernel, tile, heads) < 1e-12


@by_name
@pytest.mark.parametrize("head_dim", [4, 5, 16, 33, 64, 80, 128, 256])
@pytest.mark.parametrize("relation", [CAUSAL, BI_CAUSAL])
def test_heads_of_any_size(kernel: Kernel, relation: Relation, head_dim: int):
    assert run(kernel, (relation, 9, 9 if relation is CAUSAL else 12), head_dim=head_dim) < 1e-12


@by_name
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_any_scale(kernel: Kernel, scale: float):
    assert run(kernel, (CAUSAL, 9, 9), scale=scale) < 1e-11


@by_name
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("tile", [(FULL, 40, 70), (CAUSAL, 70, 70), (BI_CAUSAL, 60, 80), (INV_CAUSAL, 50, 90)], ids=str)
def test_types(kernel: Kernel, tile: tuple[Relation, int, int], dtype: torch.dtype, bound: float):
    assert run(kernel, tile, head_dim=32, dtype=dtype) < bound


@pytest.mark.parametrize("tile", TILES, ids=TILE_IDS)
def test_a_soft_cap_is_that_of_autograd(tile: tuple[Relation, int, int]):
    """Only this kernel has it: `auto` takes it, and another one is refused by name."""
    kernel = choose_kernel("cpu", torch.float64, 8, needs=KernelNeeds(softcap=0.7))
    assert run(kernel, tile, scale=1.0, softcap=0.7) < 1e-12
    assert run(Math(), (CAUSAL, 9, 9), scale=1.0, softcap=0.7) > 0.01
    with pytest.raises(OptionError, match=r"kernel = 'cpu_flash' cannot do a soft-cap of scores; .* 'math'"):
        choose_kernel("cpu", torch.float64, 8, "cpu_flash", needs=KernelNeeds(softcap=0.7))


def test_half_precision_runs_by_the_definition():
    assert run(Math(), (CAUSAL, 70, 70), head_dim=32, dtype=torch.float16) < 2e-3


@by_name
@pytest.mark.parametrize(
    ("whole", "tiles"),
    [
        ((FULL, 6, 10), [Tile((0, 6), (0, 4)), Tile((0, 6), (4, 10))]),
        ((CAUSAL, 6, 10), [Tile((0, 6), (0, 4)), Tile((0, 6), (4, 10), CAUSAL)]),
        ((CAUSAL, 8, 8), [Tile((0, 3), (0, 3), CAUSAL), Tile((3, 8), (0, 3)), Tile((3, 8), (3, 8), CAUSAL)]),
        ((BI_CAUSAL, 4, 9), [Tile((0, 4), (0, 4), INV_CAUSAL), Tile((0, 4), (4, 5)), Tile((0, 4), (5, 9), CAUSAL)]),
        ((INV_CAUSAL, 6, 8), [Tile((0, 2), (0, 8), INV_CAUSAL), Tile((2, 6), (2, 8), INV_CAUSAL)]),
    ],
    ids=lambda case: case[0].value if isinstance(case, tuple) else "",
)
def test_tiles_are_parts_of_a_whole(kernel: Kernel, whole: tuple[Relation, int, int], tiles: list[Tile]):
    """Merged by their log-sum-exp the tiles give the whole; with its statistics, their gradients add up to its own."""
    parts_of_a_whole(kernel, whole, tiles, bound=1e-12)


def parts_of_a_whole(kernel: Kernel, whole: tuple[Relation, int, int], tiles: list[Tile], bound: float) -> None:
    relation, n, m = whole
    q, k, v, cotangent = inputs(4, 2, n, m)
    out, lse, grads = definition(q, k, v, cotangent, relation, 0.3)
    merged, merged_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for tile in tiles:
        rows, keys = (slice(None), slice(None), slice(*tile.q)), (slice(None), slice(None), slice(*tile.kv))
        part, part_lse = kernel.forward(q[rows], k[keys], v[keys], relation=tile.relation, scale=0.3)
        merged[rows] += part * (part_lse - lse[rows]).exp()[..., None]
        merged_lse[rows] = torch.logaddexp(merged_lse[rows], part_lse)
        arguments = cotangent[rows], q[rows], k[keys], v[keys], out[rows], lse[rows]
        parts = kernel.backward(BackwardInputs(*arguments), relation=tile.relation, scale=0.3)
        for total, place, part in zip(sums, (rows, keys, keys), parts, strict=True):
            total[place] += part
    for got, wanted in zip((merged, merged_lse, *sums), (out, lse, *grads), strict=True):
        assert error(got, wanted) < bound


@by_name
def test_statistics_of_the_tile_alone_would_be_wrong(kernel: Kernel):
    """The control of the law above: gradients of halves, each with its own statistics, do not add up."""
    q, k, v, cotangent = inputs(4, 2, 6, 10)
    wanted = definition(q, k, v, cotangent, FULL, 0.3)[2][0]
    dq = 0
    for part in (slice(0, 4), slice(4, 10)):
        keys, values = k[:, :, part], v[:, :, part]
        out, lse = kernel.forward(q, keys, values, relation=FULL, scale=0.3)
        dq = dq + kernel.backward(BackwardInputs(cotangent, q, keys, values, out, lse), relation=FULL, scale=0.3)[0]
    assert error(dq, wanted) > 0.1


def test_repeated_and_summed_are_adjoint():
    x, y = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, 6, 5, 4, dtype=torch.float64)
    assert torch.allclose((repeated(x, 6) * y).sum(), (x * summed(y, 3)).sum())
    assert repeated(x, 3) is x
    assert summed(x, 3) is x


# ---- tiles cut to what a kernel can do


@given(
    relation=st.sampled_from(Relation),
    q_start=st.integers(0, 5),
    kv_start=st.integers(0, 5),
    n=st.integers(1, 200),
    m=st.integers(1, 400),
    flags=st.tuples(*[st.booleans()] * 3),
)
def test_a_tile_is_cut_into_what_the_kernel_can_do(relation, q_start, kv_start, n, m, flags):
    """Every pair of the tile once and no other, by relations that the capabilities allow."""
    m = max(n, m) if relation is not FULL else m
    bottom_right, bands, masks = flags
    capabilities = Capabilities(None, frozenset({"float32"}), bottom_right=bottom_right, bands=bands, masks=masks)
    tile = Tile((q_start, q_start + n), (kv_start, kv_start + m), relation)
    times = np.zeros((q_start + n, kv_start + m), dtype=int)
    for part in split(tile, capabilities):
        rows, keys = part.q[1] - part.q[0], part.kv[1] - part.kv[0]
        assert rows > 0
        assert keys > 0
        shown = visible(part.relation, rows, keys).numpy()
        assert shown.any(axis=1).all()
        times[slice(*part.q), slice(*part.kv)] += shown
        assert part.pairs == shown.sum()
        assert part.relation is not CAUSAL or rows == keys or bottom_right
        if part.relation.lower and not bands:
            assert rows <= 512
            assert keys <= 2 * rows
    wanted = np.zeros_like(times)
    wanted[q_start:, kv_start:] = visible(relation, n, m).numpy()
    np.testing.assert_array_equal(times, wanted)


@pytest.mark.parametrize("kernel", [CpuFlash(), *CUDA_KERNELS, Math()], ids=lambda kernel: kernel.name)
def test_what_can_do_bands_is_left_whole(kernel: Kernel):
    tile = Tile((0, 300), (0, 700), BI_CAUSAL)
    assert ([*split(tile, kernel.capabilities)] == [tile]) == kernel.capabilities.bands

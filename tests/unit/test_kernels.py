"""Every kernel that runs on a CPU, against softmax written out: one tile alone, and tiles as parts of a whole."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.distributed.context_parallel.execution.kernels import choose
from trainer.distributed.context_parallel.execution.kernels.base import Kernel, repeated, summed
from trainer.distributed.context_parallel.execution.kernels.choose import CUDA_KERNELS, choose_kernel
from trainer.distributed.context_parallel.execution.kernels.cpu import CpuFlash, Math
from trainer.distributed.context_parallel.planning.capabilities import (
    FLASH_PACKAGES,
    Capabilities,
    auto_kernel,
    kernel_words,
)
from trainer.distributed.context_parallel.planning.lowering import split
from trainer.distributed.context_parallel.planning.mask import Relation
from trainer.distributed.context_parallel.planning.tiles import Tile
from trainer.distributed.sharding.errors import OptionError

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
    grads = kernel.backward(cotangent, q, k, v, out, lse, relation=relation, scale=scale)
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
    kernel = choose_kernel("cpu", torch.float64, 8, softcap=0.7)
    assert run(kernel, tile, scale=1.0, softcap=0.7) < 1e-12
    assert run(Math(), (CAUSAL, 9, 9), scale=1.0, softcap=0.7) > 0.01
    with pytest.raises(OptionError, match=r"kernel = 'cpu_flash' cannot do a soft-cap of scores; .* 'math'"):
        choose_kernel("cpu", torch.float64, 8, "cpu_flash", softcap=0.7)


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
        parts = kernel.backward(*arguments, relation=tile.relation, scale=0.3)
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
        dq = dq + kernel.backward(cotangent, q, keys, values, out, lse, relation=FULL, scale=0.3)[0]
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


# ---- the choice


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "name"),
    [
        ("cpu", torch.float64, 64, "cpu_flash"),
        ("cpu", torch.bfloat16, 7, "cpu_flash"),
        ("cpu", torch.float16, 64, "cpu_flash"),
        ("cuda", torch.bfloat16, 128, "cuda_flash"),
        ("cuda", torch.float16, 20, "cuda_flash"),
        ("cuda", torch.bfloat16, 320, "efficient"),
        ("cuda", torch.float32, 128, "efficient"),
        ("cuda", torch.float64, 128, "math"),
        ("mps", torch.float32, 64, "math"),
    ],
    ids=str,
)
@pytest.mark.parametrize("bands", [False, True], ids=["causal", "bands"])
def test_the_choice(device: str, dtype: torch.dtype, head_dim: int, name: str, bands: bool):
    assert choose_kernel(device, dtype, head_dim, bands=bands).name == name


@pytest.mark.parametrize(
    ("device", "dtype", "calls", "name"),
    [
        ("cuda", torch.bfloat16, 4, "cuda_flash"),
        ("cuda", torch.bfloat16, 5, "varlen"),
        ("cuda", torch.float32, 500, "efficient"),
        ("cpu", torch.float32, 500, "cpu_flash"),
    ],
)
def test_auto_takes_one_launch_for_many_calls_where_a_kernel_has_it(
    device: str, dtype: torch.dtype, calls: int, name: str
) -> None:
    assert choose_kernel(device, dtype, 64, calls=calls).name == name


_CUDA_HALVES = ["cuda_flash", "efficient", "cudnn", "varlen", "math"]


@pytest.mark.parametrize(
    ("able", "calls", "machine", "name"),
    [
        # 1: many tiles, whatever the GPU
        (_CUDA_HALVES, 5, {"capability": (9, 0), "fixed": True}, "varlen"),
        (_CUDA_HALVES, 5, {"capability": (9, 0), "fixed": False, "newer_flash": True}, "varlen"),
        (["efficient", "math"], 5, {"capability": (9, 0), "fixed": True}, "efficient"),
        # 2: cuDNN for fixed masks on Hopper and later
        (_CUDA_HALVES, 4, {"capability": (9, 0), "fixed": True}, "cudnn"),
        (_CUDA_HALVES, 1, {"capability": (10, 0), "fixed": True}, "cudnn"),
        (_CUDA_HALVES, 1, {"capability": (12, 1), "fixed": True}, "cudnn"),
        (_CUDA_HALVES, 1, {"capability": (8, 9), "fixed": True}, "cuda_flash"),
        (_CUDA_HALVES, 1, {"capability": (9, 0), "fixed": False}, "cuda_flash"),
        (_CUDA_HALVES, 1, {"capability": (9, 0), "fixed": True, "newer_flash": True}, "cuda_flash"),
        (["cuda_flash", "math"], 1, {"capability": (9, 0), "fixed": True}, "cuda_flash"),
        # 3: nothing known of the GPU, or a CPU
        (_CUDA_HALVES, 1, {"fixed": True}, "cuda_flash"),
        (["cpu_flash", "math"], 500, {"fixed": True}, "cpu_flash"),
        (["math"], 500, {}, "math"),
    ],
)
def test_the_rule_of_auto(able: list[str], calls: int, machine: dict, name: str) -> None:
    assert auto_kernel(able, calls, **machine) == name


@pytest.mark.parametrize(
    ("capability", "package", "fixed", "name"),
    [
        (None, None, True, "cuda_flash"),
        ((9, 0), None, True, "cudnn"),
        ((9, 0), None, False, "cuda_flash"),
        ((9, 0), FLASH_PACKAGES[0], True, "cuda_flash"),
    ],
)
def test_auto_looks_at_the_gpu(monkeypatch: pytest.MonkeyPatch, capability, package, fixed: bool, name: str):
    monkeypatch.setattr(choose, "gpu_capability", lambda: capability)
    monkeypatch.setattr(choose, "newer_flash", lambda _: package)
    assert choose_kernel("cuda", torch.bfloat16, 64, fixed=fixed).name == name
    assert choose_kernel("cpu", torch.bfloat16, 64, fixed=fixed).name == "cpu_flash"
    assert choose_kernel("cuda", torch.bfloat16, 320, fixed=fixed).name == "efficient"


@pytest.mark.parametrize(
    ("name", "capability", "package", "deterministic", "words"),
    [
        (
            "varlen",
            (9, 0),
            None,
            False,
            ["is varlen", "computed by FlashAttention-2; ", "FlashAttention-3 (build"],
        ),
        ("varlen", (10, 0), None, False, ["faster here would be FlashAttention-4 (pip install flash-attn-4)"]),
        ("cuda_flash", (9, 0), FLASH_PACKAGES[0], False, ["9.0, computed by FlashAttention-3"]),
        ("varlen", (9, 0), None, True, ["computed by FlashAttention-2"]),
        ("varlen", (8, 0), None, False, ["computed by FlashAttention-2"]),
        ("cudnn", (9, 0), None, False, ["kernel is cudnn, on compute capability 9.0"]),
    ],
)
def test_a_choice_on_a_gpu_in_words(name: str, capability, package, deterministic: bool, words: list[str]) -> None:
    text = kernel_words(name, capability, package, deterministic=deterministic)
    assert all(part in text for part in words), text
    assert ("faster" in text) == (capability >= (9, 0) and name != "cudnn" and not package and not deterministic)


def test_a_choice_on_a_gpu_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(choose, "gpu_capability", lambda: (9, 0))
    choose._log_once.cache_clear()
    with caplog.at_level("INFO", "trainer"):
        for calls in (5, 6, 7):
            choose_kernel("cuda", torch.bfloat16, 64, calls=calls)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["attention's kernel is varlen"]


def test_deterministic_runs_do_not_use_cudnn(monkeypatch: pytest.MonkeyPatch):
    """Its backward is not deterministic, and PyTorch's own choice excludes it then."""
    monkeypatch.setattr(choose, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_kernel("cuda", torch.bfloat16, 64, fixed=True).name == "cuda_flash"
    with pytest.raises(OptionError, match=r"'cudnn' cannot do training.deterministic; kernels that can: 'cuda_flash'"):
        choose_kernel("cuda", torch.bfloat16, 64, "cudnn")


def test_names_are_unique_and_found():
    kernels = [CpuFlash(), *CUDA_KERNELS, Math()]
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    for kernel, dtype in itertools.product(kernels, (torch.bfloat16, torch.float32)):
        if str(dtype).removeprefix("torch.") in kernel.capabilities.dtypes:
            device = kernel.capabilities.device or "cpu"
            assert choose_kernel(device, dtype, 64, kernel.name).name == kernel.name


@pytest.mark.parametrize(
    ("arguments", "bands", "says"),
    [
        (("cpu", torch.float32, 64, "cuda_flash"), False, ["tensors on cpu", "float32", "'cpu_flash', 'math'"]),
        (("cuda", torch.bfloat16, 64, "cpu_flash"), False, ["tensors on cuda", "'cuda_flash'"]),
        (("cuda", torch.float32, 64, "cuda_flash"), False, ["cannot do float32;", "'efficient', 'math'"]),
        (("cuda", torch.bfloat16, 320, "cuda_flash"), False, ["heads of size 320", "'efficient', 'math'"]),
        (("cuda", torch.bfloat16, 20, "cudnn"), False, ["heads of size 20", "'cuda_flash'"]),
        (("cuda", torch.bfloat16, 64, "cudnn"), True, ["a sliding window", "'cuda_flash'"]),
        (("cuda", torch.float64, 64, "efficient"), False, ["cannot do float64;", "can: 'math'"]),
        (("cuda", torch.float32, 64, "flex"), False, ["'flex' is none of 'auto', 'cpu_flash'"]),
        (("cpu", torch.float32, 64, "flash5"), False, ["'flash5' is none of 'auto', 'cpu_flash', 'cuda_flash'"]),
    ],
)
def test_a_kernel_that_cannot_is_refused_with_those_that_can(arguments: tuple, bands: bool, says: list[str]):
    with pytest.raises(OptionError, match=r"^kernel = ") as refusal:
        choose_kernel(*arguments, bands=bands)
    for words in says:
        assert words in str(refusal.value)

"""Which kernel a tile gets: by its name, or the choice of `auto` and its reason."""

import itertools

import pytest
import torch

from longshard.context.execution.kernels import choose
from longshard.context.execution.kernels.choose import CUDA_KERNELS, KernelNeeds, choose_kernel
from longshard.context.execution.kernels.cpu import CpuFlash, Math
from longshard.context.planning.capabilities import (
    CAPABILITIES,
    FLASH_PACKAGES,
    INDEX_LIMIT,
    able_kernels,
    auto_kernel,
    call_elements,
    head_groups,
    kernel_words,
)
from longshard.sharding.errors import OptionError


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
    assert choose_kernel(device, dtype, head_dim, needs=KernelNeeds(bands=bands)).name == name


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
    assert choose_kernel(device, dtype, 64, needs=KernelNeeds(calls=calls)).name == name


_CUDA_HALVES = ["cuda_flash", "efficient", "cudnn", "varlen", "cudnn_varlen", "math"]
_HOPPER = {"capability": (9, 0)}


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
        # 3: cuDNN for the large tiles of other masks, or of many tiles
        (_CUDA_HALVES, 1, _HOPPER | {"largest": 8192}, "cudnn_varlen"),
        (_CUDA_HALVES, 64, _HOPPER | {"largest": 131_072}, "cudnn_varlen"),
        (_CUDA_HALVES, 5, _HOPPER | {"fixed": True, "largest": 131_072}, "cudnn_varlen"),
        (_CUDA_HALVES, 4, _HOPPER | {"fixed": True, "largest": 131_072}, "cudnn"),
        (_CUDA_HALVES, 64, _HOPPER | {"largest": 8191}, "varlen"),
        (_CUDA_HALVES, 1, _HOPPER | {"largest": 8191}, "cuda_flash"),
        (_CUDA_HALVES, 64, _HOPPER | {"largest": 131_072, "newer_flash": True}, "varlen"),
        (_CUDA_HALVES, 64, {"capability": (8, 0), "largest": 131_072}, "varlen"),
        (["cuda_flash", "varlen", "math"], 64, _HOPPER | {"largest": 131_072}, "varlen"),
        # 4: nothing known of the GPU, or a CPU
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
    gpu = choose.GpuKernels(lambda _: package)
    assert choose_kernel("cuda", torch.bfloat16, 64, gpu=gpu, needs=KernelNeeds(fixed=fixed)).name == name
    assert choose_kernel("cpu", torch.bfloat16, 64, needs=KernelNeeds(fixed=fixed)).name == "cpu_flash"
    assert choose_kernel("cuda", torch.bfloat16, 320, needs=KernelNeeds(fixed=fixed)).name == "efficient"


@pytest.mark.parametrize(
    ("name", "capability", "package", "deterministic", "words"),
    [
        (
            "varlen",
            (9, 0),
            None,
            False,
            ["is varlen", "computed by FlashAttention-2; ", "FlashAttention-3 (pip install flash-attn-3 --index-url"],
        ),
        (
            "cudnn_varlen",
            (9, 0),
            None,
            False,
            ["by cuDNN for tiles of 8,192 tokens or more and FlashAtten"],
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
    with caplog.at_level("INFO", "longshard"):
        for calls in (5, 6, 7):
            choose_kernel("cuda", torch.bfloat16, 64, needs=KernelNeeds(calls=calls))
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["attention's kernel is varlen"]


def test_deterministic_runs_do_not_use_cudnn(monkeypatch: pytest.MonkeyPatch):
    """Its backward is not deterministic, and PyTorch's own choice excludes it then."""
    monkeypatch.setattr(choose, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_kernel("cuda", torch.bfloat16, 64, needs=KernelNeeds(fixed=True)).name == "cuda_flash"
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
    ("head_dim", "calls", "name"),
    [(128, 1, "cuda_flash"), (144, 1, "efficient"), (160, 9, "efficient"), (192, 9, "varlen")],
)
def test_flash_attention_is_left_out_for_heads_that_its_backward_pads_too_far(head_dim: int, calls: int, name: str):
    """By 129 to 160 it writes outside of its memory (pytorch issue 173953)."""
    assert auto_kernel(able_kernels("auto", "cuda", "bfloat16", head_dim, bands=False), calls) == name


@pytest.mark.parametrize(
    ("arguments", "bands", "says"),
    [
        (("cpu", torch.float32, 64, "cuda_flash"), False, ["tensors on cpu", "float32", "'cpu_flash', 'math'"]),
        (("cuda", torch.bfloat16, 64, "cpu_flash"), False, ["tensors on cuda", "'cuda_flash'"]),
        (("cuda", torch.float32, 64, "cuda_flash"), False, ["cannot do float32;", "'efficient', 'math'"]),
        (("cuda", torch.bfloat16, 320, "cuda_flash"), False, ["heads of size 320", "'efficient', 'math'"]),
        (("cuda", torch.bfloat16, 129, "cuda_flash"), False, ["heads of size 129", "'efficient', 'math'"]),
        (("cuda", torch.bfloat16, 160, "varlen"), True, ["heads of size 160", "'efficient', 'math'"]),
        (("cuda", torch.bfloat16, 20, "cudnn"), False, ["heads of size 20", "'cuda_flash'"]),
        (("cuda", torch.bfloat16, 64, "cudnn"), True, ["a sliding window", "'cuda_flash'"]),
        (("cuda", torch.float64, 64, "efficient"), False, ["cannot do float64;", "can: 'math'"]),
        (("cuda", torch.float32, 64, "flex"), False, ["'flex' is none of 'auto', 'cpu_flash'"]),
        (("cpu", torch.float32, 64, "flash5"), False, ["'flash5' is none of 'auto', 'cpu_flash', 'cuda_flash'"]),
    ],
)
def test_a_kernel_that_cannot_is_refused_with_those_that_can(arguments: tuple, bands: bool, says: list[str]):
    with pytest.raises(OptionError, match=r"^kernel = ") as refusal:
        choose_kernel(*arguments, needs=KernelNeeds(bands=bands))
    for words in says:
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        # batch, rows, heads, key/value heads, head size -> query heads of each call
        ((1, 131_072, 32, 8, 128), [32]),
        ((1, 520_000, 32, 8, 128), [32]),
        ((1, 524_288, 32, 8, 128), [28, 4]),
        ((2, 524_288, 32, 8, 128), [12, 12, 8]),
        ((1, 4_194_304, 4, 1, 128), [3, 1]),
        ((1, 1_048_576, 32, 32, 96), [15, 15, 2]),
        ((1, 1_048_448, 32, 32, 64), [31, 1]),  # all heads have 2^31 elements
        ((1, 16_000_000, 8, 4, 128), [1] * 8),
    ],
    ids=str,
)
def test_calls_that_32_bits_cannot_address_have_fewer_heads(shape: tuple[int, ...], groups: list[int]) -> None:
    batch, rows, heads, kv_heads, head_dim = shape
    elements = call_elements(batch, rows, 1, head_dim)
    head_slices = head_groups(heads, kv_heads, elements, INDEX_LIMIT)
    assert [q.stop - q.start for q, _ in head_slices] == groups
    assert all((q.stop - q.start) * elements < 2**31 for q, _ in head_slices)
    served = [(head, head // (heads // kv_heads)) for head in range(heads)]
    assert [
        (q, kv) for q_slice, kv_slice in head_slices for q in range(heads)[q_slice] for kv in [q * kv_heads // heads]
    ] == served
    assert all(q.start * kv_heads // heads == kv.start and kv.stop <= kv_heads for q, kv in head_slices)


def test_a_head_that_32_bits_cannot_address_is_refused() -> None:
    elements = call_elements(1, 1 << 24, 1, 128)
    with pytest.raises(OptionError, match=r"has 2,147,500,032 elements .* fewer than 2,147,483,648; use a larger"):
        head_groups(1, 1, elements, INDEX_LIMIT)


def test_every_kernel_of_gpus_has_the_limit() -> None:
    limits = {name: each.elements for name, each in CAPABILITIES.items()}
    assert {name for name, limit in limits.items() if limit == 2**31} == {
        name for name, each in CAPABILITIES.items() if each.device == "cuda"
    }

"""Law: FlashAttention-3 or -4 is activated where it can run, once; plain attention asks for the fastest back end."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, list_flash_attention_impls
from torch.utils.checkpoint import checkpoint

from longshard.context.execution.kernels import flash
from longshard.context.execution.kernels.flash import activated, is_installed
from longshard.context.planning.capabilities import FLASH_PACKAGES, FlashPackage
from tests.unit.kernel_stand_ins import OPS, counts
from trainer.models import attention
from trainer.models.attention import InnerAttention

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def backends() -> list[SDPBackend]:
    """The back ends that are enabled now, in the order of their priority."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)


HOPPER, BLACKWELL, BOTH = (9, 0), (10, 0), {"FA3", "FA4"}


@pytest.mark.parametrize(
    ("capability", "deterministic", "installed", "active"),
    [
        (HOPPER, False, {"FA3"}, "FA3"),
        (HOPPER, False, {"FA4"}, "FA4"),
        (HOPPER, False, BOTH, "FA3"),
        (HOPPER, False, set(), None),
        (HOPPER, True, BOTH, None),
        (BLACKWELL, False, {"FA3"}, None),
        (BLACKWELL, False, BOTH, "FA4"),
        ((8, 0), False, BOTH, None),
        ((12, 0), False, BOTH, None),
        (None, False, BOTH, None),
    ],
)
def test_where_it_is_activated(monkeypatch, capability, deterministic: bool, installed: set[str], active) -> None:
    names: list[str] = []
    modules = {package.module for package in FLASH_PACKAGES if package.implementation in installed}
    monkeypatch.setattr(flash, "activate_flash_attention_impl", names.append)
    monkeypatch.setattr(flash, "try_out", lambda _: None)
    package = activated(capability, 64, deterministic=deterministic, installed=modules.__contains__)
    assert (package and package.implementation) == active
    assert names == [active] * (active is not None)


def test_an_implementation_that_this_pytorch_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "list_flash_attention_impls", lambda: ["FA3"])
    names: list[str] = []
    monkeypatch.setattr(flash, "activate_flash_attention_impl", names.append)
    monkeypatch.setattr(flash, "try_out", lambda _: None)
    assert activated(BLACKWELL, 64, deterministic=False, installed=lambda _: True) is None
    assert names == []


@pytest.mark.parametrize(
    "error", [ImportError("libcudart.so"), RuntimeError("no FA3 kernels\nmore"), AssertionError("local on 9.x")]
)
@pytest.mark.parametrize("fails", ["activate_flash_attention_impl", "try_out"])
def test_a_package_that_cannot_be_used_is_one_warning(
    error: Exception, fails: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried out, too; then the next one is taken, or PyTorch's own operators are restored."""
    restored: list[bool] = []
    monkeypatch.setattr(flash, "current_flash_attention_impl", lambda: "FA3")
    monkeypatch.setattr(flash, "restore_flash_attention_impl", lambda: restored.append(True))

    def fail(_: object) -> None:
        raise error

    for name in ("activate_flash_attention_impl", "try_out"):
        monkeypatch.setattr(flash, name, fail if name == fails else lambda _: None)
    for installed in (lambda _: True, lambda module: module == "flash_attn_interface"):
        assert activated(HOPPER, 64, deterministic=False, installed=installed) is None
    first = str(error).partition("\n")[0]
    assert f"flash_attn_interface is installed and cannot be used ({first}); FlashAttention-3 is" in caplog.text
    assert len(caplog.records) == len(restored) == 3


def test_the_head_of_the_model_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(head_dim: int) -> None:
        assert head_dim <= 128, "heads of 256"

    monkeypatch.setattr(flash, "activate_flash_attention_impl", lambda _: None)
    monkeypatch.setattr(flash, "try_out", attempt)
    options = {"deterministic": False, "installed": lambda _: True}
    assert activated(BLACKWELL, 128, **options) is not None
    assert activated(BLACKWELL, 256, **options) is None


def test_it_is_activated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(flash, "activated", lambda *_, **__: calls.append(1) or FLASH_PACKAGES[0])
    flash.newer_flash.cache_clear()
    assert [flash.newer_flash(64), flash.newer_flash(64)] == [FLASH_PACKAGES[0]] * 2
    assert len(calls) == 1
    flash.newer_flash.cache_clear()


def test_this_pytorch_knows_them() -> None:
    assert {package.implementation for package in FLASH_PACKAGES} <= {*list_flash_attention_impls()}


@pytest.mark.parametrize("package", FLASH_PACKAGES, ids=lambda package: package.name)
def test_it_needs_its_package(package: FlashPackage) -> None:
    if is_installed(package.module):
        pytest.skip("it would be activated")
    with pytest.raises(ImportError, match=package.module.partition(".")[0]):
        activate_flash_attention_impl(package.implementation)


def test_a_module_with_a_broken_parent_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its error is shown; a parent without the module is not."""
    broken = {"broken_flash": "raise ImportError('undefined symbol')", "bare_flash": "import no_einops"}
    for name, text in (*broken.items(), ("older_flash", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    missing = ("older_flash.cute", "older_flash.cute.interface", "no_flash", "no_flash.cute")
    assert not any(map(is_installed, missing))
    there = ("broken_flash.cute.interface", "bare_flash.cute.interface", "json")
    assert all(map(is_installed, there))


@pytest.mark.parametrize("head_dim", [64, 36])
def test_the_attempt_is_ragged_attention_that_a_kernel_can_do(head_dim: int) -> None:
    """The operators' stand-ins check each argument."""
    counts.clear()
    flash.try_out(head_dim, "cpu", OPS)
    assert counts == {"flash_forward": 1, "flash_backward": 1}


def test_an_attempt_without_finite_gradients_fails() -> None:
    broken = SimpleNamespace(_flash_attention_forward=OPS._flash_attention_forward)
    broken._flash_attention_backward = lambda *args, **_: [torch.full_like(x, torch.nan) for x in args[1:4]]
    with pytest.raises(RuntimeError, match="not finite"):
        flash.try_out(64, "cpu", broken)


# ---- plain attention


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[SDPBackend]]:
    """The back ends at each call of plain attention."""
    calls: list[list[SDPBackend]] = []
    record = SimpleNamespace(scaled_dot_product_attention=lambda *_, **__: calls.append(backends()))
    monkeypatch.setattr(attention, "F", record)
    return calls


@pytest.mark.parametrize("package", [None, *FLASH_PACKAGES])
def test_plain_attention_on_a_gpu_asks_for_the_fastest(seen, monkeypatch, package: FlashPackage | None) -> None:
    monkeypatch.setattr(attention, "newer_flash", {16: package}.get)
    before = backends()
    q = SimpleNamespace(device=torch.device("cuda"), shape=(1, 4, 8, 16), requires_grad=False)
    InnerAttention()(q, q, q)
    assert seen == [[FLASH, CUDNN, *OTHERS] if package else [CUDNN, FLASH, *OTHERS]]
    assert backends() == before


@pytest.mark.parametrize("head_dim", [128, 129, 160, 161])
def test_plain_attention_leaves_out_what_is_broken_for_its_heads(seen, monkeypatch, head_dim: int) -> None:
    monkeypatch.setattr(attention, "newer_flash", lambda _: None)
    q = SimpleNamespace(device=torch.device("cuda"), shape=(1, 4, 8, head_dim), requires_grad=False)
    InnerAttention()(q, q, q)
    assert seen == [[CUDNN, *OTHERS] if head_dim in (129, 160) else [CUDNN, FLASH, *OTHERS]]


def test_plain_attention_on_a_cpu_is_left_alone(seen) -> None:
    q = torch.zeros(1, 4, 8, 16)
    InnerAttention()(q, q, q)
    assert seen == [backends()]


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_order_is_traced_as_one_graph(monkeypatch: pytest.MonkeyPatch, recomputed: bool) -> None:
    """With this machine's CPU as the GPU: values and gradients match, and the activation runs when it is traced."""
    calls: list[type] = []  # of a tensor that it computes: real, not of the compiler
    monkeypatch.setattr(attention, "_GPU", "cpu")
    monkeypatch.setattr(attention, "newer_flash", lambda _: calls.append(type(torch.zeros(1) + 1)))
    inner = InnerAttention()
    forward = partial(checkpoint, inner, use_reentrant=False) if recomputed else inner
    leaves = [torch.randn(1, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2)]
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).sum(), leaves)
    before, compiled = backends(), torch.compile(forward, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(*leaves).sum(), leaves), wanted)
    assert calls == [torch.Tensor]
    assert backends() == before

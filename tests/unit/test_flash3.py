"""Law: FlashAttention-3 is activated where it can run, once; plain attention on GPUs asks for the fastest back end."""

import importlib.util
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, list_flash_attention_impls
from torch.utils.checkpoint import checkpoint

from trainer.models.common import attention
from trainer.models.common.attention import InnerAttention
from trainer.runtime import flash3
from trainer.runtime.flash3 import activated

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def backends() -> list[SDPBackend]:
    """The back ends that are enabled now, in the order of their priority."""
    return torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)


@pytest.mark.parametrize(
    ("capability", "deterministic", "installed", "active"),
    [
        ((9, 0), False, True, True),
        ((9, 0), False, False, False),
        ((9, 0), True, True, False),
        ((8, 0), False, True, False),
        ((10, 0), False, True, False),
        (None, False, True, False),
    ],
)
def test_where_it_is_activated(capability, deterministic: bool, installed: bool, active: bool) -> None:
    names: list[str] = []
    options = {"deterministic": deterministic, "installed": lambda: installed, "activate": names.append}
    assert activated(capability, **options) == active
    assert names == ["FA3"] * active


@pytest.mark.parametrize("error", [ImportError("libcudart.so"), RuntimeError("no FA3 kernels"), ValueError("unknown")])
def test_a_package_that_cannot_be_used_is_told(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str) -> None:
        raise error

    assert not activated((9, 0), deterministic=False, installed=lambda: True, activate=fail)
    assert f"cannot be used ({error}); FlashAttention-2 is used" in caplog.text


def test_it_is_activated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(flash3, "activated", lambda *_, **__: bool(calls.append(1)) or True)
    flash3.flash3.cache_clear()
    assert [flash3.flash3(), flash3.flash3()] == [True, True]
    assert len(calls) == 1
    flash3.flash3.cache_clear()


def test_this_pytorch_knows_it() -> None:
    assert "FA3" in list_flash_attention_impls()


@pytest.mark.skipif(importlib.util.find_spec("flash_attn_interface") is not None, reason="it would be activated")
def test_it_needs_its_package() -> None:
    with pytest.raises(ImportError, match="flash_attn_interface"):
        activate_flash_attention_impl("FA3")


# ---- plain attention


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[SDPBackend]]:
    """The back ends at each call of plain attention."""
    found: list[list[SDPBackend]] = []
    record = SimpleNamespace(scaled_dot_product_attention=lambda *_, **__: found.append(backends()))
    monkeypatch.setattr(attention, "F", record)
    return found


@pytest.mark.parametrize("has_flash3", [False, True])
def test_plain_attention_on_a_gpu_asks_for_the_fastest(seen, monkeypatch, has_flash3: bool) -> None:
    monkeypatch.setattr(attention, "flash3", lambda: has_flash3)
    before = backends()
    q = SimpleNamespace(device=torch.device("cuda"), shape=(1, 4, 8, 16))
    InnerAttention()(q, q, q)
    assert seen == [[FLASH, CUDNN, *OTHERS] if has_flash3 else [CUDNN, FLASH, *OTHERS]]
    assert backends() == before


def test_plain_attention_on_a_cpu_is_left_alone(seen) -> None:
    q = torch.zeros(1, 4, 8, 16)
    InnerAttention()(q, q, q)
    assert seen == [backends()]


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_order_is_traced_as_one_graph(monkeypatch: pytest.MonkeyPatch, recomputed: bool) -> None:
    """With this machine's CPU as the GPU: values and gradients match, and the activation runs when it is traced."""
    calls: list[int] = []
    monkeypatch.setattr(attention, "_GPU", "cpu")
    monkeypatch.setattr(attention, "flash3", lambda: bool(calls.append(1)))
    inner = InnerAttention()
    forward = partial(checkpoint, inner, use_reentrant=False) if recomputed else inner
    leaves = [torch.randn(1, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2)]
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).sum(), leaves)
    before, compiled = backends(), torch.compile(forward, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(*leaves).sum(), leaves), wanted)
    assert calls == [1]
    assert backends() == before

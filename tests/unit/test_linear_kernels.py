"""Law: kernels of flash-linear-attention compute linear attention where they can, and they compute what it is."""

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longshard.context.execution import linear_kernels
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.planning.capabilities import runs_fla
from tests.interpreted.process import assert_cases_pass, needs_triton


@needs_triton
def test_kernels_are_the_recurrence() -> None:
    assert_cases_pass("not slow and not wide")


@pytest.mark.parametrize(
    ("kind", "deterministic", "runs"),
    [
        (("cuda", "bfloat16", 128), False, True),
        (("cuda", "float16", 256), False, True),
        (("cuda", "float32", 128), False, False),
        (("cuda", "bfloat16", 512), False, False),
        (("cuda", "bfloat16", 128), True, False),
        (("cpu", "bfloat16", 128), False, False),
    ],
)
def test_they_run_on_gpus_in_half_precision(kind: tuple[str, str, int], deterministic: bool, runs: bool) -> None:
    assert runs_fla(*kind, deterministic=deterministic) is runs


def tokens(device: str, *, channel_decays: bool = False, beta: bool = True) -> Tokens:
    x = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16, device=device)
    return Tokens(x, x, x, x if channel_decays else x[..., 0], x[..., 0] if beta else None, None, 1.0)


def test_an_installed_package_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for fake tensors, with which memory is planned, and for inputs that have no kernel in the package."""
    monkeypatch.setattr(linear_kernels, "_has_package", lambda: True)
    monkeypatch.setattr(linear_kernels, "runs_fla", lambda *_, deterministic: not deterministic)
    assert linear_kernels.runs_kernels(tokens("cpu"))
    assert linear_kernels.runs_kernels(tokens("cpu", channel_decays=True))
    assert linear_kernels.runs_kernels(tokens("cpu", beta=False))
    assert not linear_kernels.runs_kernels(tokens("cpu", channel_decays=True, beta=False))
    with FakeTensorMode():
        assert not linear_kernels.runs_kernels(tokens("cpu"))


@pytest.mark.parametrize("missing", ["fla", "no_einops"])
def test_a_package_that_cannot_be_imported_is_logged_once_with_the_reason(
    missing: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is missing, or a package that it needs is."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    if missing == "fla":
        monkeypatch.setitem(sys.modules, "fla", None)
    else:
        (tmp_path / "fla").mkdir()
        (tmp_path / "fla" / "__init__.py").write_text(f"import {missing}")
        monkeypatch.syspath_prepend(tmp_path)
    linear_kernels._has_package.cache_clear()
    with caplog.at_level("INFO", logger="longshard"):
        assert not linear_kernels._has_package()
        assert not linear_kernels._has_package()
    linear_kernels._has_package.cache_clear()
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("linear attention is computed by PyTorch in chunks (")
    assert missing in message
    assert message.endswith("; faster here: pip install fla-core")

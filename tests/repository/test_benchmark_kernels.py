"""Law: the benchmark of kernels measures what runs here, and a kernel that fails is a row with its error."""

import json
import sys

import pytest

from scripts.benchmarks import attention_kernels as benchmark

SMALL = ["--device", "cpu", "--lengths", "32", "--repeats", "1", "--heads", "4", "--head-dim", "16", "--json"]


def rows(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["attention_kernels.py", *SMALL, *arguments])
    assert benchmark.main() == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_merging_is_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def fail() -> benchmark.Merge:
        raise ImportError("no Triton")

    monkeypatch.setitem(benchmark.MERGES, "fused", fail)
    eager, fused = rows(["--merging"], monkeypatch, capsys)
    assert eager["kernel"] == "merge_eager"
    assert eager["forward_ms"] > 0
    assert eager["error"] < 1e-6
    assert fused == {"kernel": "merge_fused", "relation": "-", "length": 32, "note": "ImportError: no Triton"}


def test_a_kernel_that_a_compiler_refuses_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Compilers raise more than RuntimeError."""

    class LimitHit(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise LimitHit("recompile limit\nand more")

    monkeypatch.setattr(benchmark.CpuFlash, "forward", fail)
    table = rows(["--kernels", "cpu_flash", "math", "--relations", "causal"], monkeypatch, capsys)
    assert table[0]["note"] == "LimitHit: recompile limit"
    assert table[1]["forward_ms"] > 0

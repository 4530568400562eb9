"""Law: every GPU path runs on a simulated GPU, without a host read, with the recorded launches.

`machine.py` lists the checks of every operation; a row that breaks a rule is an error of that row. The counts belong to
the pinned PyTorch: `python -m tests.fake_cuda --write` replaces them. Review its difference.
"""

import re
from pathlib import Path

import pytest
import torch

from lct_planner import shim
from tests.fake_cuda import table
from tests.fake_cuda.__main__ import Found, expected, run
from tests.slow import slow

NAMES = [row.name for row in (*table.jobs(), *table.calls())]
ROWS = [*(name for name in NAMES if name not in table.WHOLE_ONLY), *slow(*table.WHOLE_ONLY)]
PINNED = re.search(r"^torch==(\S+)", Path("requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]

needs_compiler = pytest.mark.skipif(bool(shim.why_not()), reason=shim.why_not())
needs_pinned = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != PINNED, reason=f"the committed counts are those of torch {PINNED}"
)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of the rows of this run."""
    quick = ["--quick"] if "not slow" in request.config.option.markexpr else []
    return run(tmp_path_factory.mktemp("fake_cuda"), *quick)


@needs_compiler
@pytest.mark.parametrize("name", ROWS)
def test_a_row_runs_and_its_host_never_waits(results: Found, name: str) -> None:
    """Results are as promised, messages have the bytes of the plan, and no copy makes the host wait."""
    assert "error" not in results[name], results[name]["error"]
    assert not results[name].get("waits"), f"copies that make the host wait: {results[name]['waits']}"


@needs_pinned
@needs_compiler
@pytest.mark.parametrize("name", ROWS)
def test_launches_messages_and_memory_are_those_committed(results: Found, name: str) -> None:
    wanted = expected()
    assert results[name] == wanted[name], "python -m tests.fake_cuda shows what changed"


@needs_pinned
@needs_compiler
def test_twelve_peaks_are_committed() -> None:
    """Peaks of live bytes include 8B at 131,072 and at 1,048,576 tokens; no committed row lacks its case."""
    wanted = expected()
    assert set(wanted) == set(NAMES)
    assert set(NAMES) > table.WHOLE_ONLY
    peaks = {name for name, counts in wanted.items() if "peak" in counts}
    assert len(peaks) >= 12
    assert {"ring 8, 8B at 131,072", "1M tokens, 8"} <= peaks


@needs_compiler
def test_the_machine_sees_faults(tmp_path: Path) -> None:
    """Each of these faults, planted in a copy of a GPU path, gets its own error."""
    faults = run(tmp_path, "--kind", "faults")
    assert {name: counts.get("error", "")[: len(_FAULTS[name])] for name, counts in faults.items()} == _FAULTS


_FAULTS = {
    "a host read of a device value": "DataDependentOutputException",
    "strides that are not those promised": "AssertionError: longshard::context_parallel_attention result 0",
    "a data type that is not promised": "AssertionError: longshard::context_parallel_attention result 1",
    "more bytes than the plan has": "AssertionError: context_parallel_attention sent",
    "a tensor on the host": "FakeTensorDeviceMismatchError",
    "a kernel that reads unaligned rows": "AssertionError",
}


def test_every_method_mask_and_parallelism_is_in_the_table() -> None:
    calls, jobs = list(table.calls()), list(table.jobs())
    assert {call.ranks for call in calls} == {2, 4, 8, 64}
    assert {(call.method, call.mask) for call in calls} >= {(m, k) for m in table.METHODS for k in table.MASKS}
    assert {call.kernel for call in calls} == {"auto", *table.KERNELS}
    assert {call.flash for call in calls} == {"", "FA3", "FA4"}
    families = {row.key("model.name", "llama3") for row in jobs}
    dense, hybrids = {"llama3", "qwen2", "qwen3", "mistral"}, {"qwen3_next", "kimi_linear", "granitemoehybrid"}
    assert families == {*dense, *hybrids, "qwen3_moe", "gpt_oss", "deepseek_v3", "unet", "nat"}
    modes = {row.key("activation_checkpoint.mode", "none") for row in jobs}
    assert modes == {"none", "full", "selective", "memory_budget"}
    for name in ("pipeline_parallel", "tensor_parallel", "expert_parallel", "data_parallel_replicate"):
        assert any(int(row.key(f"parallelism.{name}_degree", "1")) > 1 for row in jobs), name
    assert any(row.key("training.enable_cpu_offload", "") for row in jobs)
    assert any(row.lora for row in jobs)

"""Laws of scripts/gpu_check.py: no block stops the others, what was found is kept, mistakes are found."""

import gzip
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from unittest import mock

import pytest
import torch

from longshard.context import attention
from longshard.context.execution.kernels.base import Kernel
from longshard.context.execution.kernels.cpu import Math
from longshard.context.planning.mask import Relation
from scripts import gpu_check
from scripts.gpu_blocks import kernels, large, steps, training
from scripts.gpu_blocks.block import Check, largest
from scripts.gpu_blocks.mfu import busy_share
from scripts.gpu_check import BLOCKS, CALLS, ROOT, Block, check, main, run_block
from tests.unit.kernel_stand_ins import KERNELS as STAND_INS
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import LLAMA3
from trainer.job import resolve

_FAULTS = "tests.repository.gpu_check_faults"
_HEAD = {
    "command",
    "commit",
    "device",
    "torch",
    "python",
    "cuda",
    "torch_git",
    "gpus_memory_driver",
    "date",
    "seconds",
    "text",
}
_KEYS = {"name", "seconds", "limit", "verdict", "headline", "problems", "facts"}


def faulty(name: str, limit: float = 60.0) -> Block:
    return Block(name, f"{_FAULTS}:{name}", limit)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Whether a process ends within a few seconds: a signal takes its time."""
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


# ---- blocks in processes of their own


def test_what_a_block_notes() -> None:
    result = run_block(faulty("passes"), "cpu")
    assert result.keys() == _KEYS
    assert (result["verdict"], result["headline"], result["problems"]) == ("passed", "all is well", [])
    assert result["facts"] == {"device": "cpu", "infinite": "inf", "nested": {"a": [1, 2.5]}}


def test_no_block_stops_the_others_and_the_file_has_all(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ("expects", "raises", "dies", "skips", "passes")
    out, lengths, write = tmp_path / "found.json", [], gpu_check.write

    def counted(path: Path, content: dict) -> None:
        write(path, content)
        lengths.append(len(json.loads(out.read_text())["blocks"]))

    with mock.patch.object(gpu_check, "write", counted):
        check([faulty(name) for name in names], {"torch": "x"}, "cpu", out)
    assert lengths == [1, 2, 3, 4, 5], "the file is written after each block"
    written = json.loads(out.read_text())
    verdicts = {block["name"]: block["verdict"] for block in written["blocks"]}
    assert verdicts == dict(zip(names, ("failed", "failed", "died (SIGSEGV)", "skipped", "passed"), strict=True))
    expects, raises, dies, skips, _ = written["blocks"]
    assert expects["problems"] == ["2 is not 3"]
    assert "RuntimeError: a planted error" in raises["log"]
    assert raises["facts"] == dies["facts"] == {"before": 1}
    assert skips["headline"] == "nothing to do here"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*names]
    assert "2 is not 3" in lines[0]
    assert written["torch"] == "x"


def test_a_block_is_killed_at_its_limit_with_its_processes() -> None:
    started = time.monotonic()
    result = run_block(faulty("hangs", limit=4.0), "cpu", scale=0.5)
    assert time.monotonic() - started < 60
    assert result["verdict"] == "over its limit of 2 s"
    assert ends(result["facts"]["child"])
    assert not Path(result["facts"]["folder"]).exists()


def test_processes_of_a_block_that_has_ended_are_killed_too() -> None:
    result = run_block(faulty("leaves_a_process"), "cpu")
    assert (result["verdict"], result["facts"]["exists"]) == ("passed", True)
    assert ends(result["facts"]["child"])


def test_the_exit_code_says_whether_a_block_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    for names, code in ((("passes", "skips"), 0), (("passes", "raises"), 1)):
        monkeypatch.setattr(gpu_check, "BLOCKS", tuple(map(faulty, names)))
        assert main(["--device", "cpu", "--out", str(out)]) == code
        written = json.loads(out.read_text())
        assert written.keys() == _HEAD | {"blocks"}
        assert written["command"].startswith("python scripts/gpu_check.py --device cpu")
        assert [block["name"] for block in written["blocks"]] == [*names]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--blocks", "kernels,fast"], "'fast' is none of first, second, last, versions, two_ranks"),
        (["--limit-scale", "0"], "must be above 0"),
        (["--out", "nowhere/a.json"], "its folder does not exist"),
    ],
)
def test_wrong_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_limits_of_a_call_and_what_matters_most_comes_first() -> None:
    limits = {name: sum(block.limit for block in blocks) for name, blocks in CALLS.items()}
    assert limits["first"] <= 590
    assert limits["second"] <= 200
    assert [block.name for block in BLOCKS[:3]] == ["versions", "two_ranks", "large"]
    assert [block for blocks in CALLS.values() for block in blocks] == [*BLOCKS]
    assert gpu_check.parse(["--blocks", "second,versions"]).blocks == [BLOCKS[0], *CALLS["second"]]


def test_files_of_a_block_lie_beside_the_result_unless_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_MOST_BYTES", 10)
    result = run_block(faulty("leaves_files"), "cpu", out=tmp_path / "found.json")
    assert result["files"] == ["large is not kept: 11 bytes", "found_small"]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"found_small": "10 letters"}
    assert "files" not in run_block(faulty("leaves_files"), "cpu")


# ---- the blocks


def test_a_dry_run_of_light_blocks(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--blocks", "versions,kernels", "--out", str(out), "--commit", "4a5b6c"]
    assert main(["--device", "cpu", *words]) == 0
    written = json.loads(out.read_text())
    assert written["commit"] == "4a5b6c"
    versions, tiles = (block["facts"] for block in written["blocks"])
    assert versions["torch"] == torch.__version__
    assert set(versions["sdpa"].values()) == {"FLASH_ATTENTION"}
    assert (tiles["done"], tiles["left_out_for_time"]) == (48, 0)
    assert tiles["same_bits_twice"] == {"cpu_flash": True, "math": True}


def on_a_bare_machine(*command: str) -> str:
    """Run Python with PyTorch, NumPy, Triton and the standard library alone; return the output."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "assets" / "bare_machine")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_is_imported_and_one_trains_on_a_bare_machine(tmp_path: Path) -> None:
    modules = ", ".join(sorted({block.entry.partition(":")[0] for block in BLOCKS}))
    out = tmp_path / "found.json"
    arguments = ["--device", "cpu", "--blocks", "syncs", "--limit-scale", "4", "--out", str(out)]
    program = (
        "from importlib.util import find_spec\n"
        "assert not any(map(find_spec, ('tomli_w', 'tiktoken', 'tokenizers', 'pytest')))\n"
        f"import sys, {modules}, tests.thread_attention, tests.distributed.attention_cases\n"
        f"from scripts.gpu_check import main\nsys.exit(main({arguments!r}))"
    )
    assert "no block failed" in on_a_bare_machine("-c", program)
    assert json.loads(out.read_text())["text"] == "bytes: tiktoken is not installed"


@pytest.mark.slow
def test_a_dry_run_of_all_blocks_on_a_bare_machine(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    on_a_bare_machine("scripts/gpu_check.py", "--device", "cpu", "--out", str(out), "--limit-scale", "4")
    blocks = {block["name"]: block for block in json.loads(out.read_text())["blocks"]}
    assert [*blocks] == [block.name for block in BLOCKS]
    assert {name for name, block in blocks.items() if block["verdict"] == "skipped"} == {"several", "float8"}
    assert blocks["two_ranks"]["facts"]["differences"].keys() == {"fsdp", "ring", "resumed"}
    assert blocks["two_ranks"]["facts"]["time_out"]["records"] == ["rank_0"]
    assert (
        max(max(errors.values()) for name, errors in blocks["large"]["facts"]["errors"].items() if name != "elements")
        == 0
    )
    assert {row["kernel"] for row in blocks["documents"]["facts"]["rows"]} == {"math", "cpu_flash"}
    assert [row["vocabulary"] for row in blocks["vocabulary"]["facts"]["rows"]] == [33_000, 33_000]
    assert len(blocks["optimizers"]["facts"]["rows"]) == 5
    assert blocks["program"]["facts"]["largest_relative_difference"].keys() == {"bfloat16", "resumed"}
    (trace,) = blocks["mfu"]["files"]
    with gzip.open(tmp_path / trace) as file:
        assert json.load(file)["traceEvents"]
    facts = blocks["mfu"]["facts"]
    assert (facts["work"]["vocab_size"], facts["loss_chunk_tokens"], facts["long"]["tokens"]) == (33_000, 16, 64)
    assert facts["long"]["tokens_per_second"] > 0
    assert [row["tokens"] for row in blocks["layer"]["facts"]["rows"]] == [64, 128]
    assert len(blocks["nccl"]["facts"]["recorded"]) == 2
    ways = ("gradients in the forward", "logits twice")
    rows = {*ways, *(f"a chunk with a large vocabulary, {way}" for way in ways)}
    assert blocks["speed"]["facts"]["loss_ms"].keys() == rows
    assert {row["method"] for row in blocks["tiles"]["facts"]["tiles"]} == {"ring", "all_gather", "all_to_all"}
    assert blocks["ranks"]["facts"]["done"] == blocks["ranks"]["facts"]["of"]


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "measurements").glob("gpu_check_h100*.json")), ids=str)
def test_the_page_tells_the_commit_of_each_file_and_every_failed_block(file: Path) -> None:
    written, page = json.loads(file.read_text()), (ROOT / "docs" / "gpu_check.md").read_text()
    assert written["command"].startswith("python scripts/gpu_check.py")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| [{file.name}]")]
    assert written["commit"] in row
    for block in written["blocks"]:
        assert {"name", "verdict", "facts"} <= block.keys()
        if block["verdict"] not in ("passed", "skipped"):
            rows = [line for line in page.splitlines() if line.startswith("| `") and f"`{block['name']}`" in line]
            assert any("**" in line or "failed" in line for line in rows), f"{block['name']} failed"


# ---- what they find

by_name = pytest.mark.parametrize("kernel", STAND_INS, ids=lambda kernel: kernel.name)
_TILES = [(Relation.FULL, 9, 14), (Relation.FULL, 1, 7), (Relation.CAUSAL, 6, 14), (Relation.BI_CAUSAL, 9, 12)]


def shares(kernel: Kernel, tile: tuple[Relation, int, int], is_strided: bool = False) -> dict[str, float]:
    return kernels._shares(kernel, torch.float32, (4, 2, 16), tile, is_strided, "cpu")


@by_name
@pytest.mark.parametrize("tile", _TILES, ids=str)
def test_tiles_of_right_kernels_are_within_their_bounds(kernel: Kernel, tile: tuple[Relation, int, int]) -> None:
    if tile[0].lower and not (kernel.capabilities.bands or kernel.capabilities.masks):
        pytest.skip("a window is refused for this kernel")
    for is_strided in (False, True):
        error_shares = shares(kernel, tile, is_strided)
        assert error_shares.keys() == {"out", "lse", "dq", "dk", "dv"}
        assert largest(*error_shares.values()) <= 1


@pytest.mark.parametrize(("method", "wrong"), [("forward", {"out", "lse"}), ("backward", {"dq", "dk"})])
def test_tiles_of_a_wrong_kernel_are_beyond_them(method: str, wrong: set[str]) -> None:
    kernel = STAND_INS[0]
    right = getattr(kernel, method)
    with mock.patch.object(kernel, method, lambda *args, scale, **options: right(*args, scale=1.01 * scale, **options)):
        error_shares = shares(kernel, _TILES[2])
    assert wrong <= {name for name, share in error_shares.items() if share > 1}


def test_synchronisations_are_counted_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    places: Counter[str] = Counter()
    with training._waits(places):
        assert modes == ["warn"]
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("does not yet detect all synchronizing operations", stacklevel=1)
    assert places == {"outside of the project": 2}
    assert modes == ["warn", "default"]


def test_the_calls_of_attention_over_ranks_are_watched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that each rank has in its second call counts for the second call."""
    events: list[str] = []
    open_places: list[Counter[str]] = []
    calls: Counter[int] = Counter()
    right = attention.context_parallel_attention

    @contextmanager
    def watch(places: Counter[str]) -> Iterator[None]:
        events.append("open")
        open_places.append(places)
        yield
        open_places.pop()
        events.append("closed")

    def planted(*args: object) -> object:
        calls[get_ident()] += 1
        if calls[get_ident()] == 2:
            open_places[0]["planted"] += 1
        return right(*args)

    monkeypatch.setattr(attention, "context_parallel_attention", planted)
    assert training.documents_on_ranks("cpu", "ring", watch) == (Counter(), Counter(planted=4))
    assert events == ["open", "closed"] * 2


def test_the_watched_step_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the watch opens before the step and closes after it."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", events.append)

    def train(config: object, device: torch.device, steps: int, pace: object) -> None:
        for step in range(1, steps + 1):
            pace(step)
            events.append(f"step {step}")

    monkeypatch.setattr(training.train_loops, "train", train)
    training._train_watched([], torch.device("cuda", 0), Counter())
    assert events == ["step 1", "step 2", "step 3", "warn", "step 4", "default", "step 5", "step 6"]


def test_the_busy_share_of_a_trace() -> None:
    def event(ts: float, dur: float, cat: str = "kernel", ph: str = "X") -> dict[str, object]:
        return {"ph": ph, "cat": cat, "ts": ts, "dur": dur}

    overlapping = [event(10, 4), event(12, 4), event(18, 2, "gpu_memcpy"), event(0, 100, "cpu_op"), {"ph": "M"}]
    assert busy_share(overlapping) == 0.8
    assert busy_share([event(0, 100, "cpu_op")]) is None


@pytest.mark.parametrize("name", ["float32", "bfloat16", *training.FEATURES, "resumed"])
def test_runs_of_the_program_are_valid_on_a_gpu(name: str) -> None:
    runs, resumed = training.program_runs(10, training.FEATURES)
    # Without the step to load, which the first run has not saved here.
    options = [word for word in (runs | {"resumed": resumed})[name] if "load_step" not in word]
    config = parse_command_line(["--job.config_file=debug_model", *options]).config
    assert resolve(config, 1, "cuda").compute_dtype == ("float32" if name == "float32" else "bfloat16")


def test_missing_steps_are_a_difference() -> None:
    assert training._difference([2.0, 1.1], [2.0, 1.0], 2) == pytest.approx(0.1)
    assert training._difference([2.0], [2.0], 2) == float("inf")


def test_a_result_that_is_no_number_is_not_right(tmp_path: Path) -> None:
    """`max(0.5, nan)` is 0.5: NaN would pass every bound."""
    assert largest(0.5, 0.2) == 0.5
    assert largest() == 0.0
    assert math.isnan(largest(0.5, math.nan))
    assert not training._difference([2.0, math.nan], [2.0, 1.0], 2) <= 1e9
    checked = Check("cpu", tmp_path / "notes.json", 60.0)
    with mock.patch.object(Math, "forward", lambda self, q, *_args, **_: (q * math.nan, q[..., 0])):
        large.large(checked)
    assert [problem.split(":")[0] for problem in checked.problems] == ["math", "math, far rows"]


def test_rows_that_fail_are_problems_of_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "is_installed", lambda _: True)
    monkeypatch.setattr(steps, "train", mock.Mock(side_effect=RuntimeError("no kernel")))
    checked = Check("cpu", tmp_path / "notes.json", 60.0)
    steps.float8(checked)
    assert len(checked.problems) == 2
    assert "RuntimeError: no kernel" in checked.problems[0]
    assert not [name for name in LLAMA3 if ":" in name], "flavors of the check stay in the process"

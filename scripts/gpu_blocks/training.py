"""The trainer on one GPU: the places at which a step makes the host wait, and runs of the program with its features."""

import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from threading import Barrier
from typing import Any

import torch

from scripts.benchmarks import train_loops
from scripts.gpu_blocks.block import Check, largest
from trainer.config.loader import parse_command_line

ROOT = Path(__file__).resolve().parents[2]
Steps = list[dict[str, Any]]

# ---- synchronisations

_MASKS = {"causal": [], "documents": ["--training.attention_mask=document"]}
_STEP = 4  # the step that is watched; earlier steps fill caches
_MOST_SYNCS = 1
_RANKS = 4  # threads
_SECONDS = 15.0  # time limit of a call of all ranks
_METHODS = ("ring", "all_gather", "all_to_all")


def syncs(check: Check) -> None:
    """Run a training step in which PyTorch warns of every synchronisation; note the lines that cause them.

    Causal and with documents; then attention of documents over 4 ranks as threads.

    What must hold: at most one synchronisation in a step; none in a later call of attention.

    Args:
        check: The run of the block.
    """
    device = torch.device("cuda", 0) if check.device == "cuda" else torch.device("cpu")
    if check.is_dry:
        check.note(left_out="PyTorch warns of synchronisations on GPUs only; the step is run without")
    else:
        planted: Counter[str] = Counter()
        with _waits(planted):
            torch.ones(1, device=device).item()
        check.expect(planted.total() == 1, f"a planted synchronisation is counted {planted.total()} times")
    counts = {}
    for name, options in _MASKS.items():
        places: Counter[str] = Counter()
        _train_watched(options, device, places)
        counts[name] = places.total()
        check.note(**{name: dict(places)})
        check.expect(counts[name] <= _MOST_SYNCS, f"{name}: {counts[name]} synchronisations in a step: {dict(places)}")
    for method in _METHODS:
        watch = nullcontext if check.is_dry else _waits
        first, later = (dict(places) for places in documents_on_ranks(check.device, method, watch))
        check.note(**{f"documents over {_RANKS} ranks, {method}": {"first call": first, "later call": later}})
        check.expect(not later, f"{method}: attention of documents waits in every layer: {later}")
    check.headline("not counted on a CPU" if check.is_dry else f"synchronisations in a step: {counts}")


def _train_watched(options: list[str], device: torch.device, places: Counter[str]) -> None:
    """Train a few steps, and count the places at which step `_STEP` waits."""
    words = ["--model.flavor=debugmodel", "--training.seq_len=256", "--training.local_batch_size=2"]
    words.append("--training.data_streams=4")  # fewer files to read
    config = parse_command_line([*words, "--metrics.log_freq=100", *options]).config
    watch = _waits(places) if device.type == "cuda" else None

    def pace(step: int) -> None:
        if watch is not None and step == _STEP:
            watch.__enter__()
        elif watch is not None and step == _STEP + 1:
            watch.__exit__(None, None, None)

    train_loops.train(config, device, _STEP + 2, pace)


def documents_on_ranks(
    device: str, method: str, watch: Callable[[Counter[str]], AbstractContextManager]
) -> tuple[Counter[str], Counter[str]]:
    """Run attention of packed documents twice in one context, forward and backward, over ranks that are threads.

    Args:
        device: "cuda" or "cpu".
        method: The method of context parallelism.
        watch: Returns a context that fills a counter of places.

    Returns:
        The places at which each of the two calls waits. The first call computes and copies the data of the documents.
    """
    from longshard.context.attention import context_parallel_attention
    from longshard.context.attention_inputs import AttentionSettings
    from longshard.context.live import LivePlan, opened
    from longshard.context.planning.options import ContextParallelOptions
    from tests.distributed.attention_cases import BATCH, Case
    from tests.thread_ranks import ThreadMesh, run_ranks

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = Case(512, (8, 4), 64, dtype, ContextParallelOptions(method), mask="documents")
    layout = case.options.layout(case.seq_len, _RANKS, case.batch_mask)
    settings = AttentionSettings(case.head_dim**-0.5, case.is_causal, case.window)
    counters: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    phases = iter(counters)
    watched = ExitStack()

    def next_phase() -> None:
        watched.close()
        for places in islice(phases, 1):
            watched.enter_context(watch(places))

    barrier = Barrier(_RANKS, next_phase, timeout=_SECONDS)

    def attend(rank: int, mesh: ThreadMesh) -> None:
        own = torch.from_numpy(layout.indices(rank))
        *leaves, cotangent = (x[:, :, own].to(device) for x in case.inputs())
        leaves = [x.requires_grad_() for x in leaves]
        with opened(LivePlan(mesh, layout, case.batch_mask, case.options), BATCH) as handle:
            barrier.wait()
            for _ in counters:
                out, *_ = context_parallel_attention(*leaves, handle, settings)
                torch.autograd.grad(out, leaves, cotangent)
                barrier.wait()

    with watched:
        run_ranks(_RANKS, attend, device=device, limit=2 * _SECONDS)
    return counters


@contextmanager
def _waits(places: Counter[str]) -> Iterator[None]:
    """Yield; count the operators that make the host wait, by the innermost lines of the project that called them."""

    def noted(message: Warning | str, category: type[Warning], *_: object) -> None:
        if "called a synchronizing" in str(message):  # PyTorch also warns once that the mode is a prototype
            places[_place(traceback.extract_stack())] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    packages = (ROOT / "longshard", ROOT / "trainer")
    ours = [frame for frame in stack if any(Path(frame.filename).is_relative_to(p) for p in packages)]
    text = (f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} {frame.name}" for frame in ours[-2:])
    return " -> ".join(text) or "outside of the project"


# ---- the program

# Number of concurrent runs on one device: most of their time is start, reading and compilation.
_SIDE_BY_SIDE = min(max((os.cpu_count() or 1) // 2, 1), 8)
_NEAR = 0.02  # relative difference of a loss in bfloat16 from the loss in float32, or of two runs in bfloat16
FEATURES = {
    "compile": ["--compile.enable"],
    "memory_budget": ["--activation_checkpoint.mode=memory_budget", "--compile.enable"],
    "selective": ["--activation_checkpoint.mode=selective"],
    "full": ["--activation_checkpoint.mode=full"],
    "documents": ["--training.attention_mask=document"],
    "deterministic": ["--training.deterministic"],
    "deterministic again": ["--training.deterministic"],
}
_FLOAT32 = [
    "--training.mixed_precision_param=float32"
]  # on the same device, because another device draws other weights


def program(check: Check) -> None:
    """Run the real program on real text, and compare losses: bfloat16, float32, features, a resumed run. Check a trace.

    The features are compile, activation checkpointing, documents, a trace, and a deterministic run twice.

    What must hold: losses within 2 % of each other, step by step; deterministic losses are equal.

    Args:
        check: The run of the block.
    """
    half = 3 if check.is_dry else 10
    runs, resumed = program_runs(half, {} if check.is_dry else FEATURES)
    losses: dict[str, list[float]] = {}

    def run(name: str) -> None:
        losses[name] = _losses(check, name, runs[name])
        if name == "bfloat16":
            losses["resumed"] = _losses(check, "resumed", resumed, folder="bfloat16")

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        list(pool.map(run, runs))
    # A run that starts from step 0 would move the metrics of the earlier run to another file.
    files = list(Path(tempfile.gettempdir(), "bfloat16").glob("metrics*.jsonl"))
    check.expect(len(files) == 1, "the second run started from step 0 and did not resume")
    worst = {}
    for name in losses:
        other = "float32" if name == "bfloat16" else "bfloat16"
        if name not in ("float32", "documents") and losses[name] and losses[other]:
            worst[name] = _difference(losses[name], losses[other], 2 * half)
            check.expect(worst[name] <= _NEAR, f"{name}: losses differ from {other} by {worst[name]:.2%}")
    once, again = (losses.get(name) for name in ("deterministic", "deterministic again"))
    check.expect(once == again, f"deterministic: losses {once}, and in another run {again}")
    if documents := losses.get("documents"):
        falls = all(map(math.isfinite, documents)) and documents[-1] < documents[0]
        check.expect(falls, f"documents: losses do not fall: {documents}")
    traces = list(Path(tempfile.gettempdir(), "bfloat16").glob("profile_trace/*/rank0_trace.json"))
    check.expect(len(traces) == 1, f"{len(traces)} profiler traces instead of one")
    check.note(largest_relative_difference=worst)
    if check.is_dry:
        check.note(left_out="compile and activation checkpointing: their tests run on CPUs")
    shown = ", ".join(f"{name} {difference:.1e}" for name, difference in worst.items())
    check.headline(f"{len(losses)} runs; largest relative differences of losses: {shown}")


def program_runs(half: int, features: Mapping[str, list[str]]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the options of each run by its name, and the options of the run that resumes `bfloat16` half way.

    Args:
        half: Half the number of steps.
        features: Name of a run -> its options.
    """
    # At the preset's rate, which is four times as high, losses rise from step 14 on, and rounding changes them by 2 %.
    base = ["--training.mixed_precision_param=bfloat16", f"--training.steps={2 * half}", "--optimizer.lr=1e-3"]
    trace = ["--profiling.enable_profiling", f"--profiling.profile_freq={half}", "--profiling.profiler_warmup=1"]
    saving = ["--checkpoint.enable", f"--checkpoint.interval={half}"]
    runs = {"bfloat16": saving, **features, "float32": _FLOAT32}
    return {name: [*base, *options] for name, options in runs.items()}, [
        *base,
        *saving,
        *trace,
        f"--checkpoint.load_step={half}",
    ]


def _losses(check: Check, name: str, options: list[str], folder: str | None = None) -> list[float]:
    """Return the losses of a run by step. If the run fails, note a problem and return an empty list."""
    small = [f"--training.seq_len={32 if check.is_dry else 512}", "--training.data_streams=4"]
    rows = ["--training.local_batch_size=4", "--training.global_batch_size=4"]
    steps = train(check, folder or name, ["--metrics.log_freq=1", *small, *rows, *options])
    if isinstance(steps, str):
        check.expect(False, f"{name}: {steps}")
        return []
    losses = [step["loss"] for step in steps]
    check.note(**{f"losses of {name}": losses})
    return losses


def train(check: Check, folder: str, options: list[str], ngpu: int = 1) -> Steps | str:
    """Run `python -m trainer train` on the debug preset.

    Args:
        check: The run of the block.
        folder: The name of the dump folder.
        options: Settings, as words of a command line.
        ngpu: Number of ranks.

    Returns:
        The lines of `metrics.jsonl`, or why the run failed.
    """
    dump = Path(tempfile.gettempdir(), folder)
    command = [sys.executable, "-m", "trainer", "train", "debug_model", "--ngpu", str(ngpu)]
    command += [f"--job.dump_folder={dump}", "--metrics.no-enable_tensorboard", *options]
    if check.is_dry:
        command.append("--job.device=cpu")
    ours = ("NGPU", "CONFIG_FILE", "LOG_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment |= {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // _SIDE_BY_SIDE, 1))}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=check.left() or 1
        )
    except subprocess.TimeoutExpired:
        return "it did not end in the time that the block had left"
    if done.returncode:
        return f"exit code {done.returncode}: " + " | ".join((done.stdout + done.stderr).splitlines()[-5:])
    return [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]


def _difference(losses: list[float], expected: list[float], count: int) -> float:
    """Return the largest relative difference of the losses of a step; infinite if steps are missing."""
    if not len(losses) == len(expected) == count:
        return math.inf
    return largest(*(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)))

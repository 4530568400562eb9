"""Model FLOPs utilisation (as PaLM counts it) of a few layers as wide as those of 8 billion parameters."""

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from scripts.benchmarks import train as benchmark
from scripts.benchmarks.train_loops import WARMUP, Work, free, train
from scripts.gpu_blocks.block import Check
from trainer.config.loader import parse_command_line

_GIB_OF_A_LAYER = 12  # both loops: float32 weights, gradients and Adam's states, bfloat16 copies, activations
_GIB_BESIDE = 14  # embedding, output, and what FSDP and the profiler take
_MOST_LAYERS = 8
_TRACED = 3  # steps


def mfu(check: Check) -> None:
    """The trainer alone: peak memory, busy share; then bare loop, trainer and compiled trainer in turn."""
    args = argparse.Namespace(device=check.device, json=None, steps=2, rounds=2 if check.is_dry else 3, rows=1)
    if check.is_dry:
        args.flavor, args.layers, args.seq_len = "debugmodel", 1, 32
    else:
        available = torch.cuda.mem_get_info()[0] / 2**30
        args.flavor, args.seq_len = "8B", 8192
        args.layers = max(min(int((available - _GIB_BESIDE) / _GIB_OF_A_LAYER), _MOST_LAYERS), 1)
    work, base = benchmark.settled_work(args, ["--training.data_streams=4"])
    check.note(work=benchmark.described(work, [], "scripts/gpu_check.py"))
    check.note(alone=_alone(work))
    free(work.device)
    variants = {"trainer": work.config}
    if not check.is_dry:
        variants["compile"] = parse_command_line([*base, "--compile.enable"]).config
    found: list[dict[str, Any]] = []
    for row in benchmark.rows(work, variants, memory=False):
        found.append(row)
        check.note(rows=found)
        check.expect("error" not in row, f"{row['variant']}: {row.get('error')}")
    numbers = {row["variant"]: row.get("mfu") for row in found}
    ratios = {row["variant"]: row.get("ratio") for row in found[1:]}
    alone = check.facts["alone"]
    check.headline(
        f"{args.layers} layers: MFU {numbers}, time to the bare loop's {ratios}, "
        f"GPU busy {alone['busy_share']}, peak {alone['peak_gib']} GiB"
    )


def _alone(work: Work) -> dict[str, Any]:
    """Train without the bare loop: the peak of its memory, and the share of time in which the GPU works, by a trace."""
    on_gpu = work.device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])

    def pace(step: int) -> None:
        if step == WARMUP + 1:
            profiler.start()
        elif step == WARMUP + 1 + _TRACED:
            if on_gpu:
                torch.cuda.synchronize()
            profiler.stop()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    train(work.config, work.device, WARMUP + 1 + _TRACED, pace)
    path = Path(tempfile.gettempdir(), "trace.json")
    profiler.export_chrome_trace(str(path))
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None
    return {"busy_share": busy_share(json.loads(path.read_text())["traceEvents"]), "peak_gib": peak}


_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def busy_share(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of the time from the first to the last GPU event in which some stream works; None: no event."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e.get("cat") in _WORK)
    if not spans:
        return None
    busy, reached = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(stop - max(start, reached), 0)
        reached = max(reached, stop)
    return round(busy / (reached - spans[0][0]), 4)

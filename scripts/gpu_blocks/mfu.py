"""Model FLOPs utilisation, as PaLM counts it, of a few layers of the width of an 8B model."""

import argparse
import gzip
import json
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from scripts.benchmarks import train as benchmark
from scripts.benchmarks.train_loops import WARMUP, Block, Work, free, train
from scripts.gpu_blocks.block import Check
from scripts.gpu_blocks.layer import memory_found, reset_memory
from trainer.config.loader import parse_command_line
from trainer.job import language

_GIB_OF_A_LAYER = 12  # both loops: float32 weights, gradients and Adam's states, bfloat16 copies, activations
_GIB_RESERVED = 14  # memory of FSDP, the profiler and a small vocabulary
_GIB_OF_VOCABULARY = 61  # both loops: embedding and output as above, and all logits of the bare loop
VOCABULARY = 128_256
DRY_VOCABULARY = 33_000
_MOST_LAYERS = 8
_TRACED = 3  # steps
_LONG = 65_536  # tokens
_LONG_STEPS = 3  # the first one fills caches
_COMPILATION = 45.0  # seconds


def mfu(check: Check) -> None:
    """Measure the trainer alone; then the bare loop, the trainer and the compiled trainer in turn; and a long row.

    Layers as wide as 8B's, up to the memory of the GPU, with Llama 3's vocabulary and the loss in chunks. The long row
    has 65,536 tokens of packed documents with full recomputation. What must hold: they run.

    Args:
        check: The run of the block.
    """
    args = argparse.Namespace(device=check.device, json=None, steps=2, rounds=2 if check.is_dry else 3, rows=1)
    options = ["--training.data_streams=4"]
    vocabulary = VOCABULARY
    if check.is_dry:
        args.flavor = "debugmodel"
        args.layers = 1
        args.seq_len = 32
        vocabulary = DRY_VOCABULARY
        options.append("--training.loss_chunk_tokens=16")  # for a few tokens with few logits
    else:
        left = torch.cuda.mem_get_info()[0] / 2**30 - _GIB_RESERVED - _GIB_OF_VOCABULARY
        if left < _GIB_OF_A_LAYER:
            vocabulary = None
            left = left + _GIB_OF_VOCABULARY
        args.flavor = "8B"
        args.seq_len = 8192
        args.layers = max(min(int(left / _GIB_OF_A_LAYER), _MOST_LAYERS), 1)
    # The shipped tokenizer has few tokens; the model gets rows for tokens that no text has.
    known = language.vocab_size_of
    with mock.patch.object(language, "vocab_size_of", lambda path: vocabulary or known(path)):
        _measure(check, args, options)


def _measure(check: Check, args: argparse.Namespace, options: list[str]) -> None:
    work, base = benchmark.settled_work(args, options)
    job = work.job
    check.note(work=benchmark.described(work, [], "scripts/gpu_check.py"))
    check.note(loss_chunk_tokens=job.loss_chunk_tokens, alone=_alone(check, work))
    free(work.device)
    check.note(long=long_row(check, base, work.device))
    free(work.device)
    variants = {"trainer": work.config}
    if not check.is_dry and check.left() > _COMPILATION:
        variants["compile"] = parse_command_line([*base, "--compile.enable"]).config
    rows: list[dict[str, Any]] = []
    for row in benchmark.rows(work, variants, memory=False):
        rows.append(row)
        check.note(rows=rows)
        check.expect("error" not in row, f"{row['variant']}: {row.get('error')}")
    numbers = {row["variant"]: row.get("mfu") for row in rows}
    ratios = {row["variant"]: row.get("ratio") for row in rows[1:]}
    alone = check.facts["alone"]
    check.headline(
        f"{args.layers} layers: MFU {numbers}, at {check.facts['long']['tokens']:,} tokens "
        f"{check.facts['long'].get('mfu')}, time to the bare loop's {ratios}, "
        f"GPU busy {alone['busy_share']}, peak {alone['peak_gib']} GiB"
    )


def long_row(check: Check, base: list[str], device: torch.device) -> dict[str, Any]:
    """Train on one long sequence of packed documents with full recomputation.

    Args:
        check: The run of the block.
        base: Settings of the run, as words of a command line.
        device: The device.

    Returns:
        Speed and memory; without speed if the run failed.
    """
    tokens = 64 if check.is_dry else _LONG
    options = [f"--training.seq_len={tokens}", "--training.attention_mask=document"]
    config = parse_command_line([*base, *options, "--activation_checkpoint.mode=full"]).config
    work = Work(config, device, steps=1, rounds=1)
    times: list[float] = []

    def pace(_: int) -> None:
        if check.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    reset_memory(check.device)
    try:
        train(config, work.device, _LONG_STEPS + 1, pace)
    except RuntimeError as error:
        check.expect(False, f"{tokens:,} tokens: {type(error).__name__}: {str(error)[:200]}")
        return {"tokens": tokens, "memory": memory_found(check.device)}
    seconds = min(after - before for before, after in pairwise(times[1:]))
    speed = benchmark.speed(work, [Block(seconds, 0.0)])
    return {"tokens": tokens, **speed, "memory": memory_found(check.device)}


def _alone(check: Check, work: Work) -> dict[str, Any]:
    """Train without the bare loop. Return the peak memory, and the share of time in which the GPU works, by a trace."""
    on_gpu = work.device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])

    def pace(step: int) -> None:
        if step == WARMUP + 1:
            profiler.start()
        elif step == WARMUP + 1 + _TRACED:
            if on_gpu:
                torch.cuda.synchronize()
            profiler.stop()

    reset_memory(work.device.type)
    train(work.config, work.device, WARMUP + 1 + _TRACED, pace)
    path = check.file("trace.json.gz")
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as trace:
        busy = busy_share(json.load(trace)["traceEvents"])
    memory = memory_found(work.device.type)
    return {"busy_share": busy, "peak_gib": memory.get("allocated_gib"), "memory": memory}


_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def busy_share(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of time in which some stream works, from the first to the last GPU event; None without events.

    Args:
        events: The events of a trace of PyTorch's profiler.
    """
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e.get("cat") in _WORK)
    if not spans:
        return None
    busy = 0.0
    reached = spans[0][0]
    for start, stop in spans:
        busy += max(stop - max(start, reached), 0)
        reached = max(reached, stop)
    return round(busy / (reached - spans[0][0]), 4)

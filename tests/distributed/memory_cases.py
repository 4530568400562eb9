"""Memory of a step by the allocator of a CPU rank, and the planner's prediction for the same job."""

import gc
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lct_planner.tracing import trace
from tests.distributed.harness import BASE, Record, RecordingTrainer, resolved
from trainer.config.loader import parse_command_line
from trainer.job.record import ResolvedJob
from trainer.runtime.process_group import Process, process_group

_STEP, _STEPS = "a measured step", 4


def arguments_of(arguments: list[str], folder: str) -> list[str]:
    return [*BASE, f"--training.steps={_STEPS}", f"--job.dump_folder={folder}", *arguments]


def job_of(arguments: list[str], folder: str, process: Process) -> ResolvedJob:
    """Resolve a job, whose adapters may be of weights that no file has."""
    without = [x for x in arguments if not x.startswith("--lora")]
    config, asked = (parse_command_line(arguments_of(x, folder)).config for x in (without, arguments))
    job = resolved(config, process)
    return replace(job, config=replace(job.config, lora=asked.lora))


_topk = torch.Tensor.topk


def choose_evenly(scores: torch.Tensor, k: int, **options: Any) -> Any:
    """Stand in for `topk` of a router: the same number of tokens for each expert and rank, as the planner assumes.

    Scores of keys, (B, S, T), are compared as ever.
    """
    if scores.ndim > 2:
        return _topk(scores, k, **options)
    experts = scores.shape[-1]
    first = torch.arange(len(scores)).unsqueeze(1)
    return SimpleNamespace(indices=(first + torch.arange(k) * (experts // k)) % experts)


_wait = torch._C._distributed_c10d.Work.wait


def wait_for_threads(work: torch._C._distributed_c10d.Work, *args: Any) -> bool:
    """Wait for a message, and until the thread of gloo lets go of it, whose frees the profiler does not see."""
    done = _wait(work, *args)
    time.sleep(0.003)
    return done


def measured_case(arguments: list[str]) -> int:
    """On each rank: return the most bytes that PyTorch's allocator has given in a step after the first.

    The least of several steps: a thread of gloo may still be late.
    """
    process = Process.from_environment()
    evenly = mock.patch.object(torch.Tensor, "topk", choose_evenly)
    waiting = mock.patch.object(torch._C._distributed_c10d.Work, "wait", wait_for_threads)
    with tempfile.TemporaryDirectory() as folder, evenly, waiting:
        job = job_of(arguments, folder, process)
        config = job.config
        with process_group(process, config.comm, cpu_tensors=config.training.enable_cpu_offload):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                trainer = RecordingTrainer(job, process.device, record=Record())
                trainer.optimizer_step = super(RecordingTrainer, trainer).optimizer_step  # which copies no gradients
                gc.collect()
                gc.disable()
                trainer.train_step(1)
                for step in range(2, _STEPS + 1):
                    with record_function(_STEP):
                        trainer.train_step(step)
                gc.enable()
            trainer.metrics.close()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == _STEP]
    # What a thread of gloo has freed is counted until its address is given again, not for ever as the profiler does.
    live: dict[int, int] = {}
    peaks, total = dict.fromkeys(steps, 0), 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], max(event["args"]["Bytes"], 0)
        total += size - live.pop(address, 0)
        live[address] = size
        for begin, end in steps:
            if begin <= event["ts"] <= end:
                peaks[begin, end] = max(peaks[begin, end], total)
    return min(peaks.values())


def predicted(arguments: list[str], world_size: int, rank: int) -> int:
    """Return the planner's peak of the same step, in a process without a process group."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(arguments, folder, Process(rank, rank, world_size, "cpu"))
        return trace(job, rank, None, steps=2).peak(2)[0]


def predicted_case(arguments: list[str], world_size: int, rank: int) -> int:
    """On one rank of the pool: see `predicted`."""
    return predicted(arguments, world_size, rank)

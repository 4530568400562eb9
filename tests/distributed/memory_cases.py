"""What the allocator of a CPU rank reports of a step, beside what the planner predicts for the same job."""

import gc
import json
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from tests.distributed.harness import BASE, Record, RecordingTrainer, resolved
from trainer.config.loader import parse_command_line
from trainer.planner.tracing import trace
from trainer.runtime.process_group import Process, process_group

_STEP, _STEPS = "a measured step", 6


def arguments_of(arguments: list[str], folder: str) -> list[str]:
    return [*BASE, f"--training.steps={_STEPS}", f"--job.dump_folder={folder}", *arguments]


def measured_case(arguments: list[str]) -> int:
    """On each rank: return the most bytes that PyTorch's allocator has given in a step after the first.

    The least of several steps: gloo's threads free what a message took some time after it.
    """
    process = Process.from_environment()
    with tempfile.TemporaryDirectory() as folder:
        config = parse_command_line(arguments_of(arguments, folder)).config
        with process_group(process, config.comm, cpu_tensors=config.training.enable_cpu_offload):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                trainer = RecordingTrainer(resolved(config, process), process.device, record=Record())
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
    # The profiler's own total counts what gloo's threads free for ever, so that it is added up again by address.
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
    """Return what the planner says of the same step, in a process without a process group."""
    with tempfile.TemporaryDirectory() as folder:
        config = parse_command_line(arguments_of(arguments, folder)).config
        job = resolved(config, Process(rank, rank, world_size, "cpu"))
        return trace(job, rank, None, steps=2).peak(2)[0]


def predicted_case(arguments: list[str], world_size: int, rank: int) -> int:
    """On one rank of the pool: see `predicted`."""
    return predicted(arguments, world_size, rank)

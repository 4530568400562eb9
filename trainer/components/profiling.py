"""Traces of time and memory, one file per rank, every `profiling.profile_freq` steps.

dump_folder/profile_trace/iteration_100/rank0_trace.json              chrome://tracing, ui.perfetto.dev
dump_folder/memory_snapshot/iteration_100/rank0_snapshot.pickle       pytorch.org/memory_viz
dump_folder/memory_snapshot/iteration_137_exit/rank0_snapshot.pickle  when memory ran out in step 138
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from trainer.components.console import logger
from trainer.config.errors import ConfigError
from trainer.config.schema import Profiling
from trainer.runtime.out_of_memory import is_out_of_memory

_MAX_ALLOCATIONS = 100_000


def region(name: str) -> torch.profiler.record_function:
    """Context that shows under `name` in traces, such as `with region("forward"):`; next to free without a profiler."""
    return torch.profiler.record_function(name)


def check_memory_snapshot(settings: Profiling, device: torch.device) -> None:
    """Refuse memory snapshots where there is nothing to record.

    Raises:
        ConfigError: the device is no GPU.
    """
    if settings.enable_memory_snapshot and device.type != "cuda":
        raise ConfigError(
            f"profiling.enable_memory_snapshot = true records the allocations on a GPU, and this run is on the "
            f"{device.type}; leave it out, and read memory_gib in metrics.jsonl"
        )


@contextmanager
def profiling(settings: Profiling, dump_folder: Path, rank: int, device: torch.device) -> Iterator["StepProfiler"]:
    """Profile the steps inside, as table `[profiling]` says; tell it when each step is over."""
    profiler = StepProfiler(
        _Traces(settings, dump_folder, rank, device) if settings.enable_profiling else None,
        _Snapshots(settings, dump_folder, rank) if settings.enable_memory_snapshot else None,
    )
    try:
        yield profiler
    except RuntimeError as error:
        if profiler.snapshots is not None and is_out_of_memory(error):
            profiler.snapshots.write_last()
        raise
    finally:
        profiler.close()


class StepProfiler:
    """What is written of the steps; nothing, where both are None."""

    def __init__(self, traces: "_Traces | None", snapshots: "_Snapshots | None") -> None:
        self.traces, self.snapshots = traces, snapshots

    def step(self, step: int) -> None:
        """Call it after optimizer step `step`, counted from 1."""
        for part in (self.traces, self.snapshots):
            if part is not None:
                part.step(step)

    def close(self) -> None:
        for part in (self.traces, self.snapshots):
            if part is not None:
                part.close()


class _Traces:
    """Chrome traces of `profiler_active` steps, the last of them step freq, 2 freq, ... since the start."""

    def __init__(self, settings: Profiling, dump_folder: Path, rank: int, device: torch.device) -> None:
        self.folder, self.rank = dump_folder / settings.save_traces_folder, rank
        self.last_step = 0
        warmup, active = settings.profiler_warmup, settings.profiler_active
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
            schedule=torch.profiler.schedule(
                wait=settings.profile_freq - warmup - active, warmup=warmup, active=active
            ),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")  # as wanted
        self.profiler.start()

    def step(self, step: int) -> None:
        self.last_step = step
        self.profiler.step()

    def close(self) -> None:
        # A trace that is cut short is not written: it would pass for a whole one.
        self.profiler.on_trace_ready = None
        self.profiler.stop()

    def _write(self, profiler: torch.profiler.profile) -> None:
        path = self.folder / f"iteration_{self.last_step}" / f"rank{self.rank}_trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info(f"trace of the steps up to {self.last_step}: {path}")


class _Snapshots:
    """The CUDA allocator's history, every `freq` steps and at the end of a run that ran out of memory."""

    def __init__(self, settings: Profiling, dump_folder: Path, rank: int) -> None:
        self.folder, self.rank = dump_folder / settings.save_memory_snapshot_folder, rank
        self.freq = settings.profile_freq
        self.last_step = 0
        torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)

    def step(self, step: int) -> None:
        self.last_step = step
        if step % self.freq == 0:
            self._write(f"iteration_{step}")

    def write_last(self) -> None:
        self._write(f"iteration_{self.last_step}_exit")

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, name: str) -> None:
        path = self.folder / name / f"rank{self.rank}_snapshot.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info(f"memory snapshot: {path}")

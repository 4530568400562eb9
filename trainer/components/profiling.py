"""Traces of time and memory, one file per rank, every `profiling.profile_freq` steps.

dump_folder/profile_trace/iteration_100/rank0_trace.json              chrome://tracing, ui.perfetto.dev
dump_folder/memory_snapshot/iteration_100/rank0_snapshot.pickle       pytorch.org/memory_viz
dump_folder/memory_snapshot/iteration_137_exit/rank0_snapshot.pickle  when memory ran out in step 138
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from trainer.components.out_of_memory import is_out_of_memory
from trainer.config.errors import ConfigError
from trainer.config.schema import Profiling
from trainer.runtime.console import logger

_MAX_ALLOCATIONS = 100_000


def region(name: str) -> torch.profiler.record_function:
    """Return a context that traces show under `name`, as in `with region("forward"):`; cheap without a profiler."""
    return torch.profiler.record_function(name)


def check_memory_snapshot(settings: Profiling, device: torch.device) -> None:
    """Check that memory snapshots have something to record.

    Raises:
        ConfigError: they are on, and the device is no GPU.
    """
    if settings.enable_memory_snapshot and device.type != "cuda":
        raise ConfigError(
            f"profiling.enable_memory_snapshot = true records the allocations on a GPU, and this run is on the "
            f"{device.type}; leave it out, and read memory_gib in metrics.jsonl"
        )


@contextmanager
def profiling(settings: Profiling, dump_folder: Path, rank: int, device: torch.device) -> Iterator["StepProfiler"]:
    """Profile the steps inside, as table `[profiling]` says. Call `step` of the profiler after each step."""
    traces = [_Traces(settings, dump_folder, rank, device)] if settings.enable_profiling else []
    snapshots = [_Snapshots(settings, dump_folder, rank)] if settings.enable_memory_snapshot else []
    try:
        yield StepProfiler((*traces, *snapshots))
    except RuntimeError as error:
        if is_out_of_memory(error):
            for snapshot in snapshots:
                snapshot.write_last()
        raise
    finally:
        for writer in (*traces, *snapshots):
            writer.close()


@dataclass(frozen=True)
class StepProfiler:
    """The writers of traces and memory snapshots that are on."""

    writers: "tuple[_Traces | _Snapshots, ...]"

    def step(self, step: int) -> None:
        """Record that optimizer step `step`, counted from 1, is over."""
        for writer in self.writers:
            writer.step(step)


class _Traces:
    """Chrome traces of `profiler_active` steps, of which the last is step freq, 2 freq, ... since the start."""

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
        # An incomplete trace is not written: it would look complete.
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

"""Traces of time and memory, one file per rank, every `profiling.profile_freq` steps.

dump_folder/profile_trace/iteration_100/rank0_trace.json              chrome://tracing, ui.perfetto.dev
dump_folder/memory_snapshot/iteration_100/rank0_snapshot.pickle       pytorch.org/memory_viz
dump_folder/memory_snapshot/iteration_137_exit/rank0_snapshot.pickle  when memory ran out in step 138

State of the process: One filter of warnings, while a trace is written.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from trainer.components.out_of_memory import is_out_of_memory
from trainer.config.errors import ConfigError
from trainer.config.schema import Profiling
from trainer.runtime.console import logger

_MAX_ALLOCATIONS = 100_000


def check_memory_snapshot(settings: Profiling, device: torch.device) -> None:
    """Check that memory snapshots have something to record.

    Args:
        settings: Table `[profiling]`.
        device: The device of this rank.

    Raises:
        ConfigError: The device is no GPU.
    """
    if settings.enable_memory_snapshot and device.type != "cuda":
        raise ConfigError(
            f"profiling.enable_memory_snapshot = true records the allocations on a GPU, and this run is on the "
            f"{device.type}; leave it out, and read memory_gib in metrics.jsonl"
        )


@contextmanager
def profiling(
    settings: Profiling, dump_folder: Path, rank: int, device: torch.device
) -> Iterator[list[Callable[[int], None]]]:
    """Profile the steps inside, as table `[profiling]` says.

    Args:
        settings: Table `[profiling]`.
        dump_folder: Traces are written below it.
        rank: Number of this rank.
        device: The device of this rank.

    Yields:
        Functions to call with the number of each finished step.
    """
    with ExitStack() as stack:
        writers = []
        if settings.enable_profiling:
            writers.append(stack.enter_context(_traces(settings, dump_folder, rank, device)))
        if settings.enable_memory_snapshot:
            writers.append(stack.enter_context(_snapshots(settings, dump_folder, rank)))
        yield writers


@contextmanager
def _traces(
    settings: Profiling, dump_folder: Path, rank: int, device: torch.device
) -> Iterator[Callable[[int], None]]:
    """Write Chrome traces of `profiler_active` steps.

    The last step of a trace is step freq, 2 freq, ... since the start.
    """
    last_step = 0
    warmup = settings.profiler_warmup
    active = settings.profiler_active

    def write(profiler: torch.profiler.profile) -> None:
        path = (
            dump_folder / "profile_trace" / f"iteration_{last_step}" / f"rank{rank}_trace.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info(f"trace of the steps up to {last_step}: {path}")

    def step_is_over(step: int) -> None:
        nonlocal last_step
        last_step = step
        profiler.step()

    profiler = torch.profiler.profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"),
        schedule=torch.profiler.schedule(
            wait=settings.profile_freq - warmup - active, warmup=warmup, active=active
        ),
        on_trace_ready=write,
        record_shapes=True,
    )
    # the profiler is meant to clear its events
    warnings.filterwarnings(
        "ignore", message=".*Profiler clears events at the end of each cycle"
    )
    profiler.start()
    try:
        yield step_is_over
    finally:
        # an incomplete trace is not written: it would look complete
        profiler.on_trace_ready = None
        profiler.stop()


@contextmanager
def _snapshots(
    settings: Profiling, dump_folder: Path, rank: int
) -> Iterator[Callable[[int], None]]:
    """Write the CUDA allocator's history every `profile_freq` steps, and when memory runs out."""
    last_step = 0

    def write(name: str) -> None:
        path = dump_folder / "memory_snapshot" / name / f"rank{rank}_snapshot.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info(f"memory snapshot: {path}")

    def step_is_over(step: int) -> None:
        nonlocal last_step
        last_step = step
        if step % settings.profile_freq == 0:
            write(f"iteration_{step}")

    torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
    try:
        yield step_is_over
    except RuntimeError as error:
        if is_out_of_memory(error):
            write(f"iteration_{last_step}_exit")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)

"""What a batch is, how ranks share it, and its loss. The loop calls the task of the data."""

from importlib import import_module

from trainer.distributed.parallel_dims import ParallelDims
from trainer.job.record import ResolvedJob
from trainer.tasks.task import Task

__all__ = ["Task", "build_task"]


def build_task(job: ResolvedJob, dims: ParallelDims) -> Task:
    """Return the task of a job on this rank."""
    module, _, name = job.task.module.partition(":")
    return getattr(import_module(module), name)(job, dims)

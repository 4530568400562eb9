"""What a batch is: tokens of a language, or fields on a grid. The loop calls the task of the model's family."""

from trainer.distributed.parallel_dims import ParallelDims
from trainer.job.record import ResolvedJob
from trainer.tasks.task import Task

__all__ = ["Task", "build_task"]


def build_task(job: ResolvedJob, dims: ParallelDims) -> Task:
    """Return the task of a job on this rank."""
    if job.model.task == "fields":
        from trainer.tasks.fields import FieldTask

        return FieldTask(job, dims)
    from trainer.tasks.language import LanguageTask

    return LanguageTask(job, dims)

"""The error of a checkpoint that could not be written: its reason, and how the run continues."""

from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint.dcp_files import cause_of
from trainer.config.errors import first_line
from trainer.config.writable import full_disk, nearest_existing
from trainer.job.lora import adapter_sizes, whole_sizes
from trainer.job.record import ITEMSIZE, ResolvedJob
from trainer.stores.store import Store, reason_of


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message says why, and is the same on every rank."""


def not_written(
    job: ResolvedJob, folder: Store, step: int, error: CheckpointException
) -> CheckpointError:
    """Return the error of a save: the reason, what to do, and the step from which the run resumes.

    Args:
        job: The resolved job.
        folder: The folder of checkpoints.
        step: The step that was saved.
        error: The error of DCP.
    """
    cause = cause_of(error)
    full = full_disk(cause, nearest_existing(Path(str(folder))), needed=_size(job))
    reason = reason_of(cause) if isinstance(cause, OSError) else first_line(cause)
    try:
        kept = [earlier for earlier in folder.steps() if earlier < step]
    except OSError:  # a store that does not answer
        kept = []
    room = "make room there and" if kept else "make room, or name another job.dump_folder, and"
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder} (rank {min(error.failures)}: "
        f"{full or reason}); {room if full else 'when the cause is gone,'} run the same command again"
        f"{f', which resumes after step {kept[-1]}' if kept else ''}"
    )


def _size(job: ResolvedJob) -> int:
    """Return the bytes of a checkpoint, without the small files: each trained parameter, and its two moments."""
    config, model = job.config, job.model
    sizes = adapter_sizes(config, model)
    beside = whole_sizes(config, model)
    trained = sum([*sizes.values(), *beside.values()]) if sizes else model.n_params()
    weight, moment = (ITEMSIZE[name] for name in (config.training.dtype, config.state_dtype))
    return trained * (weight + 2 * moment)

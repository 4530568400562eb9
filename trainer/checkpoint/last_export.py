"""The weights of the last step as a Hugging Face folder, written at the end of a run."""

from dataclasses import replace

import torch
import torch.distributed as dist

from trainer.checkpoint.export import write_hf
from trainer.checkpoint.failed_save import CheckpointError
from trainer.config.errors import ConfigError, SharedConfigError
from trainer.config.writable import full_disk
from trainer.job.record import ResolvedJob
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.console import logger
from trainer.runtime.process_group import set_timeout
from trainer.stores.folder import checkpoint_folder
from trainer.stores.store import reason_of


def export_last(
    job: ResolvedJob, dims: ParallelDims, step: int, group: dist.ProcessGroup
) -> None:
    """Write the weights of a saved step as a Hugging Face folder next to it, on rank 0. A collective.

    Args:
        job: The resolved job.
        dims: The meshes of the run.
        step: Number of the step.
        group: The group of the checkpoints, whose time-out stays. All other groups get
            `comm.checkpoint_timeout_seconds`.

    Raises:
        CheckpointError: On every rank, if the folder cannot be written.
    """
    settings = job.config.checkpoint
    set_timeout(job.config.comm.checkpoint_timeout_seconds, except_group=group)
    output = checkpoint_folder(job.config).path / f"step-{step}-hf"
    dtype = getattr(torch, settings.export_dtype)
    config = replace(job.config, checkpoint=replace(settings, load_step=step))

    def write() -> None:
        try:
            if dims.is_first:
                write_hf(output, config, job.model, dtype)
        except OSError as error:
            raise ConfigError(
                f"the Hugging Face folder {output} could not be written "
                f"({full_disk(error, output.parent) or reason_of(error)}); make room there, and make "
                "it from the checkpoint with lct convert to-hf"
            ) from None

    try:
        raise_on_all_ranks(write, dims["world"])
    except SharedConfigError as error:
        raise CheckpointError(str(error)) from None
    logger.info(f"weights saved for Hugging Face in {output}")

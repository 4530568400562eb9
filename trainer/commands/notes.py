"""What a run says of itself before PyTorch is imported: its first line, and what may surprise. Torch-free."""

import os

from trainer.config.schema import JobConfig
from trainer.config.writable import is_address
from trainer.job import ResolvedJob
from trainer.job.memory import check_memory
from trainer.runtime.devices import Machine
from trainer.stores.folder import checkpoint_folder


def opening(config: JobConfig, ranks: int, device_type: str) -> str:
    """Return the first line: what starts, on what, and where its output goes."""
    what = config.job.description or config.job.config_file or "training with default settings"
    device = {"cuda": "GPU", "cpu": "CPU rank"}[device_type]
    return f"{what} on {ranks} {device}{'s' * (ranks > 1)}; output goes to {config.job.dump_folder}"


def job_notes(job: ResolvedJob, machine: Machine, ranks_here: int) -> list[str]:
    """Return a line for each thing of this job on this machine that may surprise. ranks_here: ranks on this machine."""
    available = machine.memory(job.device_type)
    if available is not None and job.device_type == "cpu":
        available //= ranks_here
    check_memory(job, available)
    notes = (machine.note, _left_checkpoints(job), _log_rank(job.degrees.world_size))
    return [note for note in notes if note]


def _left_checkpoints(job: ResolvedJob) -> str:
    if job.config.checkpoint.enable or is_address(job.config.checkpoint.folder):  # a store may answer late
        return ""
    folder = checkpoint_folder(job.config)
    try:
        steps = folder.steps()
    except OSError:
        return ""
    if not steps:
        return ""
    return (
        f"{folder} has a checkpoint of step {steps[-1]:,}, and checkpoint.enable is off: this run starts from "
        "the beginning and saves none; --checkpoint.enable resumes"
    )


def _log_rank(ranks: int) -> str:
    """Return a note if LOG_RANK names ranks that do not exist."""
    words = [word.strip() for word in os.environ.get("LOG_RANK", "0").split(",")]
    unknown = [word for word in words if not (word.isdecimal() and int(word) < ranks)]
    if not unknown:
        return ""
    silent = "no rank logs its steps" if unknown == words else "the others log"
    return f"LOG_RANK names {', '.join(map(repr, unknown))}, and there are the ranks 0 to {ranks - 1}: {silent}"

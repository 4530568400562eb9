"""What a run says of itself before PyTorch is imported: its first line, and what may surprise. Torch-free."""

import os

from trainer.checkpoint.folder import checkpoint_folder, saved_steps
from trainer.config.schema import JobConfig
from trainer.job import ResolvedJob
from trainer.job.memory import rank_memory, size_words
from trainer.runtime.devices import Machine


def opening(config: JobConfig, ranks: int, device_type: str) -> str:
    """Return the first line: what starts, on what, and where its output goes."""
    what = config.job.description or config.job.config_file or "training with default settings"
    device = {"cuda": "GPU", "cpu": "CPU rank"}[device_type]
    return f"{what} on {ranks} {device}{'s' * (ranks > 1)}; output goes to {config.job.dump_folder}"


def job_notes(job: ResolvedJob, machine: Machine, ranks: int) -> list[str]:
    """Return a line for each thing of this job on this machine that may surprise."""
    return [
        note for note in (machine.note, _left_checkpoints(job), _spoken(ranks), _little_memory(job, machine)) if note
    ]


def _left_checkpoints(job: ResolvedJob) -> str:
    if job.config.checkpoint.enable:
        return ""
    folder = checkpoint_folder(job.config)
    try:
        steps = saved_steps(folder)
    except OSError:
        return ""
    if not steps:
        return ""
    return (
        f"{folder} has a checkpoint of step {steps[-1]:,}, and checkpoint.enable is off: this run starts anew and "
        "saves none; --checkpoint.enable resumes"
    )


def _spoken(ranks: int) -> str:
    """Return a note about the first rank of LOG_RANK that does not exist."""
    words = [word.strip() for word in os.environ.get("LOG_RANK", "0").split(",")]
    if any(word.isdecimal() and int(word) < ranks for word in words):
        return ""
    return f"LOG_RANK = {','.join(words)!r} names none of the ranks 0 to {ranks - 1}: no rank logs its steps"


def _little_memory(job: ResolvedJob, machine: Machine) -> str:
    """Return a note if a rank is expected to need more memory than it has."""
    memory, needed = machine.memory(job.device_type), rank_memory(job).total
    if memory is None:
        return ""
    if job.device_type == "cpu":
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", job.degrees.world_size))
    if needed <= memory:
        return ""
    return (
        f"a rank needs about {size_words(needed)} at its peak, and has {size_words(memory)}; the memory line of the "
        "summary says for what"
    )

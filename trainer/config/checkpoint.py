"""Settings of checkpoints."""

from dataclasses import dataclass
from typing import Literal

from trainer.config.keys import AT_LEAST_ONE, NOT_NEGATIVE, SECONDS, TOKENS, Bounds, key, needs

SAVING = needs("checkpoint.enable")


@dataclass(frozen=True)
class Checkpoint:
    """The state of the run on disk, from which the same command resumes."""

    enable: bool = False
    """Save checkpoints, and resume from the latest one."""
    folder: str = key("checkpoint", when=SAVING)
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: int = key(500, AT_LEAST_ONE, "steps", when=SAVING)
    """Steps from one checkpoint to the next; the last step of a run is always saved."""
    keep_latest_k: int = key(0, Bounds(NOT_NEGATIVE.test, "at least 0 (0: keep all)"), "checkpoints", when=SAVING)
    """Number of checkpoints to keep; older ones are deleted."""
    load_step: int = key(-1, when=needs("checkpoint.enable", remedy="switch it on, or leave the step out"))
    """Saved step to resume from; -1: the latest."""
    async_mode: Literal["disabled", "async"] = key("disabled", when=SAVING)
    """async: write a copy in the background while training goes on."""
    initial_load_path: str | None = None
    """Weights of a new run: a Hugging Face folder, or a folder step-N of another run's checkpoints."""
    last_save_in_hf: bool = key(False, when=(SAVING, TOKENS))
    """Also save the weights of the last step as a Hugging Face folder, step-N-hf beside the checkpoint."""
    export_dtype: Literal["float32", "float64", "bfloat16", "float16"] = key(
        "float32", when=(SAVING, needs("checkpoint.last_save_in_hf"), TOKENS)
    )
    """Data type of the weights in the Hugging Face folder."""
    stop_timeout_seconds: int = key(120, SECONDS, "seconds")
    """Seconds after SIGTERM or SIGINT in which the run finishes its step and saves; then it ends at once."""

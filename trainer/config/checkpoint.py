"""Settings of checkpoints."""

from dataclasses import dataclass
from typing import Literal

from trainer.config.keys import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    SECONDS,
    TOKENS,
    Bounds,
    Condition,
    key,
    needs,
)

_LOADING = needs("checkpoint.enable")
SAVING = (
    _LOADING,
    Condition(
        lambda config, _: not config.checkpoint.load_only,
        "with checkpoint.load_only, which saves nothing",
    ),
)
_INITIAL = needs(
    "checkpoint.initial_load_path", remedy="name the step-N folder of a run, or leave it out"
)
_FROM_A_STEP = Condition(
    lambda config, _: (
        config.checkpoint.load_step != -1 or not config.checkpoint.initial_load_model_only
    ),
    "without checkpoint.load_step",
    "name the saved step after which they start again, such as checkpoint.load_step = 500",
)


@dataclass(frozen=True)
class Checkpoint:
    """The state of the run on disk, from which the same command resumes."""

    enable: bool = False
    """Save checkpoints, and resume from the latest one."""
    folder: str = key("checkpoint", when=_LOADING)
    """Folder of the checkpoints, inside job.dump_folder; or an address in a remote store, such as s3://bucket/run."""
    interval: int = key(500, AT_LEAST_ONE, "steps", when=SAVING)
    """Steps from one checkpoint to the next; the last step of a run is always saved."""
    interval_seconds: float | None = key(None, POSITIVE, "seconds", when=SAVING, example=1800.0)
    """Also save after a step when this time has passed since the last checkpoint; None: by steps alone."""
    enable_first_step_checkpoint: bool = key(False, when=SAVING)
    """Also save after step 1, to find problems of saving early."""
    keep_latest_k: int = key(
        0, Bounds(NOT_NEGATIVE.test, "at least 0 (0: keep all)"), "checkpoints", when=SAVING
    )
    """Number of checkpoints to keep; older ones are deleted."""
    keep_every: int = key(
        0,
        Bounds(NOT_NEGATIVE.test, "at least 0 (0: none)"),
        "steps",
        when=(*SAVING, needs("checkpoint.keep_latest_k")),
    )
    """Also keep the checkpoint of every keep_every-th step for good; a multiple of interval."""
    load_step: int = key(
        -1, when=needs("checkpoint.enable", remedy="switch it on, or leave the step out")
    )
    """Saved step to resume from; -1: the latest."""
    load_only: bool = key(False, when=_LOADING)
    """Resume from a checkpoint, and never save or remove one."""
    exclude_from_loading: tuple[Literal["optimizer", "dataloader"], ...] = key(
        (), when=(_LOADING, _FROM_A_STEP)
    )
    """Parts that start again with the weights of load_step: the optimizer's state, or the data from their beginning."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled", when=SAVING
    )
    """async: write a copy in the background while training continues; with_pinned_mem: keep the memory of the copy."""
    initial_load_path: str | None = None
    """Weights of a new run: a Hugging Face folder, a folder step-N of a run; with model.path, adapters of peft."""
    initial_load_model_only: bool = key(True, when=_INITIAL)
    """false: initial_load_path is a folder step-N whose whole run this one continues: optimizer, data and steps too."""
    last_save_model_only: bool = key(False, when=SAVING)
    """Save the weights alone after step training.steps: a third of the size, and no run resumes from it."""
    last_save_in_hf: bool = key(False, when=(*SAVING, TOKENS))
    """Also save the weights of the last step as a Hugging Face folder, step-N-hf next to the checkpoint."""
    export_dtype: Literal["float32", "float64", "bfloat16", "float16"] = key(
        "float32", when=(*SAVING, needs("checkpoint.last_save_in_hf"), TOKENS)
    )
    """Data type of the weights in the Hugging Face folder."""
    stop_timeout_seconds: int = key(120, SECONDS, "seconds")
    """Seconds after a signal of `job.stop_signals` in which the run finishes its step and saves, or ends at once."""

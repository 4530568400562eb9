"""The checkpoint folder: steps are published, kept, found, and compared with the run. Torch-free.

    checkpoint/
      step-500/            one checkpoint; the name appears by a rename, when everything in it is on the disk
        config.toml        the configuration of the run that saved it
        state.json         step, tokens seen, arguments of the model, position of every data stream, size of every file
        .metadata          which part of which tensor is where (DCP)
        __0_0.distcp ...   the tensors, one file or more per rank that wrote (DCP)
      best.json            the step with the lowest validation loss, and that loss, if it is kept
      step-1000.tmp/       being written, or left by a run that was killed while saving: never read, removed later

A folder in a remote store has the same files, but no step-N.tmp: see `remote_store.py`.
Other names, and folders step-N without a state.json, belong to somebody else: never read, never removed.
"""

import zlib
from pathlib import Path

from trainer.config.errors import ConfigError, first_line
from trainer.config.loader import RUN_FILE
from trainer.config.schema import JobConfig
from trainer.config.writable import is_address
from trainer.families.args import ModelArgs
from trainer.stores.addresses import store_of
from trainer.stores.state import RunState, check_same_model, parse_state, states_of
from trainer.stores.store import STATE_FILE, Store, reason_of

LATEST = -1


def checkpoint_folder(config: JobConfig) -> Store:
    """Return the folder of all checkpoints of a run.

    Args:
        config: The configuration.

    Raises:
        ConfigError: Its store cannot be opened.
    """
    folder = config.checkpoint.folder
    return store_of(
        "checkpoint.folder",
        folder if is_address(folder) else str(Path(config.job.dump_folder) / folder),
    )


def step_to_load(config: JobConfig) -> int | None:
    """Return the step to resume from. None: start from the beginning.

    Args:
        config: The configuration.

    Raises:
        ConfigError: The folder cannot be read, or has no step `checkpoint.load_step`.
        MissingFile: The folder is in a store that does not answer from here.
    """
    folder = checkpoint_folder(config)
    wanted = config.checkpoint.load_step
    try:
        steps = folder.steps()
    except OSError as error:
        raise folder.unreachable(
            f"checkpoint.folder = {config.checkpoint.folder!r}: {folder} cannot be read ({reason_of(error)}); "
            f"{folder.remedy}"
        ) from None
    if wanted == LATEST:
        return steps[-1] if steps else None
    if wanted in steps:
        return wanted
    shown = (
        ", ".join(map(str, steps))
        if len(steps) <= 8
        else f"{', '.join(map(str, steps[:3]))} ... {steps[-1]}"
    )
    remedy = (
        f"use one of the saved steps: {shown}"
        if steps
        else "nothing is saved there, leave it out"
    )
    raise ConfigError(f"checkpoint.load_step = {wanted} is not in {folder}; {remedy}")


def read_state(folder: Store, step: int) -> RunState:
    """Return the state of a saved step, and check that all its files exist in full length.

    Args:
        folder: The folder of checkpoints.
        step: Number of the step.

    Raises:
        ConfigError: The state is unreadable or of another format, or a file is missing or cut short.
    """
    try:
        sizes = folder.sizes(step)
        state = parse_state(folder.read(folder.step(step) / STATE_FILE), step)
        for name, size in state.files.items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a file in it")
            if sizes[name] != size:
                raise ValueError(f"{name} has {sizes[name]} bytes of {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(folder, step, error) from None
    return state


def saved_configuration(folder: Store, step: int) -> bytes | None:
    """Return the configuration of a saved step, as TOML. None for an older checkpoint.

    Args:
        folder: The folder of checkpoints.
        step: Number of the step.

    Raises:
        ConfigError: The step or its configuration cannot be read, or is damaged.
    """
    state = read_state(folder, step)
    if RUN_FILE not in state.files:
        return None
    try:
        content = folder.read(folder.step(step) / RUN_FILE)
    except OSError as error:
        raise unreadable(folder, step, error) from None
    if state.sums.get(RUN_FILE) != zlib.crc32(content):
        raise unreadable(folder, step, f"the check sum of {RUN_FILE} is wrong")
    return content


def unreadable(folder: Store, step: int, error: BaseException | str) -> ConfigError:
    """Return the error for a checkpoint that cannot be loaded.

    Args:
        folder: The folder of checkpoints.
        step: Number of the step.
        error: The cause.
    """
    reason = (error if isinstance(error, str) else first_line(error)).removesuffix(".")
    if isinstance(error, OSError):
        reason = f"{Path(error.filename).name}: " * isinstance(error.filename, str) + reason_of(
            error
        )
    elif isinstance(error, KeyError):
        reason = f"{reason} is missing"
    damaged = f"the checkpoint {folder.step(step)} cannot be read ({reason})"
    try:
        others = [str(other) for other in folder.steps() if other != step]
    except OSError:  # the store does not answer
        return ConfigError(f"{damaged}; run this again later")
    if not others:
        return ConfigError(f"{damaged}; remove it to start from step 0")
    return ConfigError(
        f"{damaged}; use another with checkpoint.load_step (there are {', '.join(others[-8:])}), or remove it"
    )


def check_fits(state: RunState, config: JobConfig, model: ModelArgs) -> None:
    """Check that this run can resume from `state`.

    With "optimizer" in `checkpoint.exclude_from_loading`, the optimizer is not checked. With "dataloader", the seed and
    the data streams are not. `training.data_streams` of None takes the saved number.

    Args:
        state: The state of a saved step.
        config: The configuration.
        model: The arguments of the model.

    Raises:
        ConfigError: Model, data type, optimizer, seed or number of data streams differ, or the run has steps left and
            the checkpoint holds weights alone.
    """
    path = checkpoint_folder(config).step(state.step)
    elsewhere = "or start from step 0 in another checkpoint.folder"
    check_same_model(state, config, model, path, remedy=f"resume with that, {elsewhere}")
    excluded = config.checkpoint.exclude_from_loading
    keeps_states = "optimizer" not in excluded
    if state.model_only and keeps_states and config.training.steps > state.step:
        raise ConfigError(
            f"training.steps = {config.training.steps} is beyond the checkpoint {path}, which holds the weights "
            "alone (checkpoint.last_save_model_only); resume from an earlier step with checkpoint.load_step, or use a "
            f"new optimizer: --checkpoint.load_step {state.step} --checkpoint.exclude_from_loading optimizer"
        )
    known = ("", states_of(config))
    if keeps_states and not state.model_only and state.optimizer not in known:
        raise ConfigError(
            f"optimizer.name = {config.optimizer.name!r} is not the {state.optimizer} of the checkpoint {path}, whose "
            f"states would be others; resume with {state.optimizer}, or start them again: --checkpoint.load_step "
            f"{state.step} --checkpoint.exclude_from_loading optimizer"
        )
    if "dataloader" in excluded:
        return
    first = next(iter(state.streams.values()), {})
    for key in ("seed", "data_streams"):
        now = getattr(config.training, key)
        saved = first.get(key)
        # None: use the checkpoint's number of streams
        if now is not None and saved != now:
            raise ConfigError(
                f"training.{key} = {now} is not the {saved} of the checkpoint {path}, whose positions would mean other "
                f"data; resume with {saved}, {elsewhere}"
            )

"""The checkpoint folder as files: find steps, check that they are whole and fit the run. Torch-free.

    checkpoint/
      step-500/            one checkpoint; the name appears by a rename, when everything in it is on the disk
        state.json         step, tokens seen, arguments of the model, position of every data stream, size of every file
        .metadata          which part of which tensor is where (DCP)
        __0_0.distcp ...   the tensors, one file or more per rank that wrote (DCP)
      best.json            the step with the lowest validation loss, and that loss, if it is kept
      step-1000.tmp/       being written, or left by a run that was killed while saving: never read, removed later

Other names, and folders step-N without a state.json, belong to somebody else: never read, never removed.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.models.args import ModelArgs

STATE_FILE, BEST_FILE = "state.json", "best.json"
FORMAT = 1
LATEST = -1
_SAVED = re.compile(r"step-([1-9]\d*)")
_UNFINISHED = re.compile(r"step-[1-9]\d*\.tmp")

logger = logging.getLogger("trainer")


@dataclass(frozen=True)
class RunState:
    """The part of a checkpoint that is no tensor; the content of `state.json`.

    model: see `model_description`; streams: number of a data stream -> its position; files: name of every other file
    of the checkpoint -> its length in bytes.
    """

    step: int
    tokens_seen: int
    model: Mapping[str, Any]
    streams: Mapping[int, Mapping[str, int]]
    files: Mapping[str, int]


def checkpoint_folder(config: JobConfig) -> Path:
    """Return the folder of all checkpoints of a run."""
    return Path(config.job.dump_folder) / config.checkpoint.folder


def model_description(config: JobConfig, model: ModelArgs) -> dict[str, Any]:
    """Return what saved tensors depend on: the family, its arguments, the data type in storage, and adapters."""
    fixed = {name: value for name, value in asdict(model).items() if name not in model.free_to_change}
    fixed = {
        name: list(value) if isinstance(value, tuple) else value for name, value in fixed.items()
    }  # as JSON has it
    lora = config.lora
    adapters: dict[str, Any] = {"lora.rank": lora.rank}
    if lora.rank:
        adapters |= {"lora.alpha": lora.alpha, "lora.modules": sorted(lora.modules)}
    return {"name": config.model.name, **fixed, "dtype": config.training.dtype, **adapters}


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, in order; none where there is no such folder."""
    if not folder.is_dir():
        return []
    matches = [(_SAVED.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(int(match[1]) for match, path in matches if match and (path / STATE_FILE).is_file())


def step_to_load(config: JobConfig) -> int | None:
    """Return the step to resume from; None: start from the beginning.

    Raises:
        ConfigError: the folder is a file or cannot be read, or `checkpoint.load_step` is not there.
    """
    folder, wanted = checkpoint_folder(config), config.checkpoint.load_step
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(
            f"checkpoint.folder = {config.checkpoint.folder!r}: {folder} is a file; name a folder, such as 'checkpoint'"
        )
    try:
        steps = saved_steps(folder)
    except OSError as error:
        raise ConfigError(
            f"checkpoint.folder = {config.checkpoint.folder!r}: {folder} cannot be read ({error.strerror}); "
            f"name a folder that can"
        ) from None
    if wanted == LATEST:
        return steps[-1] if steps else None
    if wanted in steps:
        return wanted
    shown = ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:3]))} ... {steps[-1]}"
    remedy = f"use one of the saved steps: {shown}" if steps else "nothing is saved there, leave it out to start anew"
    raise ConfigError(f"checkpoint.load_step = {wanted} is not in {folder}; {remedy}")


def read_state(folder: Path, step: int) -> RunState:
    """Return the state of a saved step, and check that all its files are there in full length.

    Raises:
        ConfigError: the state is unreadable or of another format, or a file is missing or cut short.
    """
    path = step_folder(folder, step)
    try:
        content = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("another version of this program wrote it")
        content["streams"] = {
            int(stream): {key: int(value) for key, value in entry.items()}
            for stream, entry in content["streams"].items()
        }
        state = RunState(**content)
        if not (state.step == step and isinstance(state.tokens_seen, int)):
            raise ValueError("it is of another step")
        for name, size in state.files.items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a file in it")
            found = (path / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes of {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(folder, step, error) from None
    return state


def unreadable(folder: Path, step: int, error: BaseException | str) -> ConfigError:
    """Return the error for a checkpoint that cannot be loaded."""
    reason = str(error).strip().split("\n")[0].removesuffix(".")
    if isinstance(error, OSError) and error.filename:
        reason = f"{Path(error.filename).name}: {error.strerror}"
    elif isinstance(error, KeyError):
        reason = f"{reason} is missing"
    others = [other for other in saved_steps(folder) if other != step]
    works = (
        f"use another with checkpoint.load_step (there are {', '.join(map(str, others[-8:]))}), or remove it"
        if others
        else "remove it to start anew"
    )
    return ConfigError(f"the checkpoint {step_folder(folder, step)} cannot be read ({reason}); {works}")


def check_same_model(
    state: RunState, config: JobConfig, model: ModelArgs, path: Path, *, remedy: str, dtype: bool = True
) -> None:
    """Check that the tensors of `state`, which is in `path`, are those of this model; dtype: of its data type too.

    Raises:
        ConfigError: another model or data type.
    """
    defaults = {field.name: field.default for field in fields(model)} | {"lora.rank": 0}
    for key, now in model_description(config, model).items():
        saved = state.model.get(key, defaults.get(key))  # an older checkpoint has the default of a newer field
        if saved != now and (dtype or key != "dtype"):
            what = f"model.flavor = {config.model.flavor!r}, whose {key}"
            if key == "dtype" or key.startswith("lora."):
                what = key.replace("dtype", "training.dtype")
            raise ConfigError(f"{what} = {now!r} is not the {saved!r} of the checkpoint {path}; {remedy}")


def check_fits(state: RunState, config: JobConfig, model: ModelArgs) -> None:
    """Check that this run can resume from `state`.

    Raises:
        ConfigError: another model, data type, seed or number of data streams.
    """
    path = step_folder(checkpoint_folder(config), state.step)
    elsewhere = "or start anew in another checkpoint.folder"
    check_same_model(state, config, model, path, remedy=f"resume with that, {elsewhere}")
    if "dataloader" in config.checkpoint.exclude_from_loading:
        return
    first = next(iter(state.streams.values()), {})
    for key, now in (("seed", config.training.seed), ("data_streams", config.training.data_streams)):
        saved = first.get(key)
        if now is not None and saved != now:  # None: the number of streams is that of the checkpoint
            raise ConfigError(
                f"training.{key} = {now} is not the {saved} of the checkpoint {path}, whose positions would mean other "
                f"data; resume with {saved}, {elsewhere}"
            )


# ---- writing; all of it by one process


def publish(unfinished: Path, state: RunState) -> None:
    """Turn `unfinished`, whose other files are on the disk already, into the checkpoint of its step by one rename."""
    with (unfinished / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(state)}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(unfinished)
    final = step_folder(unfinished.parent, state.step)
    _make_way(final)
    unfinished.rename(final)
    sync_folder(final.parent)


def _make_way(path: Path) -> None:
    """Free the name of a checkpoint: remove an older checkpoint of a history that this run left, move anything else."""
    if (path / STATE_FILE).is_file() and not path.is_symlink():
        (path / STATE_FILE).unlink()  # a checkpoint that is half removed must not look like one
        shutil.rmtree(path)
    elif os.path.lexists(path):
        aside = next(p for p in (path.with_name(f"{path.name}.other{i}") for i in count(1)) if not os.path.lexists(p))
        logger.warning(f"{path} is no checkpoint, and a checkpoint needs its name: it was renamed to {aside.name}")
        path.rename(aside)


def unfinished_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.tmp"


def best_saved(folder: Path) -> tuple[int, float] | None:
    """Return step and validation loss of the best checkpoint; None: no checkpoint is marked as that."""
    try:
        best = json.loads((folder / BEST_FILE).read_text(encoding="utf-8"))
        step, loss = int(best["step"]), float(best["validation_loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (step, loss) if step in saved_steps(folder) else None


def mark_best(folder: Path, step: int, loss: float | None) -> None:
    """Note that this new checkpoint is the best one so far; loss: None if it is not.

    A checkpoint of that step of another history, which it has replaced, is no longer the best one.
    """
    if loss is None:
        if (best := best_saved(folder)) is not None and best[0] == step:
            (folder / BEST_FILE).unlink()
        return
    written = folder / f"{BEST_FILE}.tmp"
    written.write_text(json.dumps({"step": step, "validation_loss": loss}), encoding="utf-8")
    written.replace(folder / BEST_FILE)


def remove_unfinished(folder: Path) -> None:
    """Remove the folders that interrupted saves have left."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def keep_latest(folder: Path, k: int, written: int, *, every: int = 0) -> None:
    """Remove all but the best and the last k checkpoints up to and including step `written`; k = 0 keeps all.

    every: steps that are a multiple of it stay too; 0: none.

    Later steps belong to a history that this run has left; each is removed when this run reaches it.
    """
    best = best_saved(folder)
    of_this_run = [step for step in saved_steps(folder) if step <= written]
    for step in of_this_run[: -k or None] if k else ():
        if (best is not None and step == best[0]) or (every and step % every == 0):
            continue
        path = step_folder(folder, step)
        if path.is_symlink():
            continue
        doomed = unfinished_folder(folder, step)
        try:
            path.rename(doomed)  # a checkpoint that is half removed must not look like one
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning(f"the old checkpoint {path} could not be removed ({error.strerror})")


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

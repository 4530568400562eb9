"""The checkpoint folder as files: find steps, check that they are whole and fit the run. Torch-free.

    checkpoint/
      step-500/            one checkpoint; the name appears by a rename, when everything in it is on the disk
        state.json         step, tokens seen, arguments of the model, position of every data stream, size of every file
        .metadata          which part of which tensor is where (DCP)
        __0_0.distcp ...   the tensors, one file or more per rank that wrote (DCP)
      best.json            the step with the lowest validation loss, and that loss, if it is kept
      step-1000.tmp/       being written, or left by a run that was killed while saving: never read, removed later

A folder in a remote store has the same files, but for step-N.tmp: see `publishing.py`, which writes both.
Other names, and folders step-N without a state.json, belong to somebody else: never read, never removed.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainer.checkpoint.remote import Place, is_remote, objects, place_of, reason_of, remedy_of, store_errors
from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.config.writable import is_address
from trainer.models.args import ModelArgs

STATE_FILE, BEST_FILE = "state.json", "best.json"
FORMAT = 1
LATEST = -1
_SAVED = re.compile(r"step-([1-9]\d*)")


@dataclass(frozen=True)
class RunState:
    """The part of a checkpoint that is no tensor; the content of `state.json`.

    model: see `model_description`; streams: number of a data stream -> its position; files: name of every other file
    of the checkpoint -> its length in bytes; model_only: whether the tensors are the weights alone; sums: name of a
    file -> its check sum (zlib.crc32), of files that have none inside; older checkpoints lack it.
    """

    step: int
    tokens_seen: int
    model: Mapping[str, Any]
    streams: Mapping[int, Mapping[str, int]]
    files: Mapping[str, int]
    model_only: bool = False
    sums: Mapping[str, int] = field(default_factory=dict)


def check_sum(content: Mapping[str, Any]) -> int:
    """Return the check sum of a `state.json`, of what JSON gives back without the entry "check_sum"."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def checkpoint_folder(config: JobConfig) -> Place:
    """Return the folder of all checkpoints of a run.

    Raises:
        ConfigError: it is in a store that cannot be opened.
    """
    if is_address(config.checkpoint.folder):
        return place_of("checkpoint.folder", config.checkpoint.folder)
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


def step_folder(folder: Place, step: int) -> Place:
    return folder / f"step-{step}"


def saved_steps(folder: Place) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, in order; none where there is no such folder.

    Raises:
        OSError: it cannot be read.
    """
    if is_remote(folder):
        names = (name.partition("/") for name in objects(folder))
        matches = [_SAVED.fullmatch(step) for step, _, name in names if name == STATE_FILE]
        return sorted(int(match[1]) for match in matches if match)
    if not folder.is_dir():
        return []
    matches = [(_SAVED.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(int(match[1]) for match, path in matches if match and (path / STATE_FILE).is_file())


def step_to_load(config: JobConfig) -> int | None:
    """Return the step to resume from; None: start from the beginning.

    Raises:
        ConfigError: the folder is a file or cannot be read, or `checkpoint.load_step` is not there.
        MissingFile: the folder is in a store that does not answer from here.
    """
    folder, wanted = checkpoint_folder(config), config.checkpoint.load_step
    if not is_remote(folder) and os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(
            f"checkpoint.folder = {config.checkpoint.folder!r}: {folder} is a file; name a folder, such as 'checkpoint'"
        )
    try:
        steps = saved_steps(folder)
    except OSError as error:
        raise (MissingFile if is_remote(folder) else ConfigError)(
            f"checkpoint.folder = {config.checkpoint.folder!r}: {folder} cannot be read ({reason_of(error)}); "
            f"{remedy_of(folder)}"
        ) from None
    if wanted == LATEST:
        return steps[-1] if steps else None
    if wanted in steps:
        return wanted
    shown = ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:3]))} ... {steps[-1]}"
    remedy = f"use one of the saved steps: {shown}" if steps else "nothing is saved there, leave it out to start anew"
    raise ConfigError(f"checkpoint.load_step = {wanted} is not in {folder}; {remedy}")


def read_state(folder: Place, step: int) -> RunState:
    """Return the state of a saved step, and check that all its files are there in full length.

    Raises:
        ConfigError: the state is unreadable or of another format, or a file is missing or cut short.
    """
    path = step_folder(folder, step)
    try:
        sizes = objects(path) if is_remote(path) else {}
        with store_errors(path):
            text = (path / STATE_FILE).read_text(encoding="utf-8")
        content = json.loads(text)
        sum_of_content = content.pop("check_sum", None)  # older checkpoints have none
        if sum_of_content is not None and sum_of_content != check_sum(content):
            raise ValueError(f"the check sum of {STATE_FILE} is wrong")
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
            found = sizes[name] if is_remote(path) else (path / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes of {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(folder, step, error) from None
    return state


def unreadable(folder: Place, step: int, error: BaseException | str) -> ConfigError:
    """Return the error for a checkpoint that cannot be loaded."""
    reason = str(error).strip().split("\n")[0].removesuffix(".")
    if isinstance(error, OSError) and error.filename and not is_remote(folder):
        reason = f"{Path(error.filename).name}: {error.strerror}"
    elif isinstance(error, OSError):
        reason = reason_of(error)
    elif isinstance(error, KeyError):
        reason = f"{reason} is missing"
    try:
        others = [other for other in saved_steps(folder) if other != step]
    except OSError:  # the store does not answer
        return ConfigError(
            f"the checkpoint {step_folder(folder, step)} cannot be read ({reason}); run this again later"
        )
    works = (
        f"use another with checkpoint.load_step (there are {', '.join(map(str, others[-8:]))}), or remove it"
        if others
        else "remove it to start anew"
    )
    return ConfigError(f"the checkpoint {step_folder(folder, step)} cannot be read ({reason}); {works}")


def check_same_model(
    state: RunState, config: JobConfig, model: ModelArgs, path: Place, *, remedy: str, dtype: bool = True
) -> None:
    """Check that the tensors of `state`, which is in `path`, are those of this model; dtype: of its data type too.

    Raises:
        ConfigError: another model or data type.
    """
    defaults = {argument.name: argument.default for argument in fields(model)} | {"lora.rank": 0}
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
        ConfigError: another model, data type, seed or number of data streams, or no optimizer for the steps to come.
    """
    path = step_folder(checkpoint_folder(config), state.step)
    elsewhere = "or start anew in another checkpoint.folder"
    check_same_model(state, config, model, path, remedy=f"resume with that, {elsewhere}")
    anew, left = config.checkpoint.exclude_from_loading, config.training.steps - state.step
    if state.model_only and left > 0 and "optimizer" not in anew:
        raise ConfigError(
            f"training.steps = {config.training.steps} goes on after the checkpoint {path}, which holds the weights "
            "alone (checkpoint.last_save_model_only); go on from an earlier step with checkpoint.load_step, or start "
            f"the optimizer anew: --checkpoint.load_step {state.step} --checkpoint.exclude_from_loading optimizer"
        )
    if "dataloader" in anew:
        return
    first = next(iter(state.streams.values()), {})
    for key, now in (("seed", config.training.seed), ("data_streams", config.training.data_streams)):
        saved = first.get(key)
        if now is not None and saved != now:  # None: the number of streams is that of the checkpoint
            raise ConfigError(
                f"training.{key} = {now} is not the {saved} of the checkpoint {path}, whose positions would mean other "
                f"data; resume with {saved}, {elsewhere}"
            )


def best_saved(folder: Place) -> tuple[int, float] | None:
    """Return step and validation loss of the best checkpoint; None: no checkpoint is marked as that.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        with store_errors(folder):
            text = (folder / BEST_FILE).read_text(encoding="utf-8")
        best = json.loads(text)
        step, loss = int(best["step"]), float(best["validation_loss"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return (step, loss) if step in saved_steps(folder) else None

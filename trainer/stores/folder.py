"""The checkpoint folder: steps are published, kept, found, and checked whether they fit the run. Torch-free.

    checkpoint/
      step-500/            one checkpoint; the name appears by a rename, when everything in it is on the disk
        config.toml        the configuration of the run that saved it
        state.json         step, tokens seen, arguments of the model, position of every data stream, size of every file
        .metadata          which part of which tensor is where (DCP)
        __0_0.distcp ...   the tensors, one file or more per rank that wrote (DCP)
      best.json            the step with the lowest validation loss, and that loss, if it is kept
      step-1000.tmp/       being written, or left by a run that was killed while saving: never read, removed later

A folder in a remote store has the same files, but for step-N.tmp: see `store.py`.
Other names, and folders step-N without a state.json, belong to somebody else: never read, never removed.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.loader import RUN_FILE
from trainer.config.schema import JobConfig, LoRA
from trainer.config.writable import is_address
from trainer.families.args import ModelArgs
from trainer.families.registry import ModelFolder, hf_config, opened_at
from trainer.hugging_face.config_json import CONFIG_FILE
from trainer.runtime.console import logger
from trainer.stores.store import (
    STATE_FILE,
    Place,
    Store,
    named_step,
    reason_of,
    saved_step,
    store_of,
)

BEST_FILE = "best.json"
FORMAT = 1
LATEST = -1


@dataclass(frozen=True)
class RunState:
    """The part of a checkpoint that is no tensor; the content of `state.json`.

    model: see `model_description`; streams: number of a data stream -> its position; files: name of every other file
    of the checkpoint -> its length in bytes; model_only: whether the tensors are the weights alone; sums: name of a
    file -> its check sum (zlib.crc32), of files that have none inside; optimizer: whose states are saved, see
    `states_of`. Older checkpoints lack the last two.
    """

    step: int
    tokens_seen: int
    model: Mapping[str, Any]
    streams: Mapping[int, Mapping[str, Any]]
    files: Mapping[str, int]
    model_only: bool = False
    sums: Mapping[str, int] = field(default_factory=dict)
    optimizer: str = ""


def states_of(config: JobConfig) -> str:
    """Return the name of an optimizer whose states this run's are like: those of Adam and AdamW are the same."""
    name = config.optimizer.name
    return "AdamW" if name == "Adam" else name


def check_sum(content: Mapping[str, Any]) -> int:
    """Return the check sum of a `state.json`, of what JSON gives back without the entry "check_sum"."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def checkpoint_folder(config: JobConfig) -> Store:
    """Return the folder of all checkpoints of a run; ConfigError if its store cannot be opened."""
    folder = config.checkpoint.folder
    return store_of(
        "checkpoint.folder",
        folder if is_address(folder) else str(Path(config.job.dump_folder) / folder),
    )


def model_description(config: JobConfig, model: ModelArgs) -> dict[str, Any]:
    """Return what saved tensors depend on: the family, its arguments, the data type in storage, and adapters."""
    fixed = {
        name: value for name, value in asdict(model).items() if name not in model.free_to_change
    }
    fixed = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in fixed.items()
    }  # as JSON has it
    lora = config.lora
    adapters: dict[str, Any] = {"lora.rank": lora.rank}
    if lora.rank:
        adapters |= {
            "lora.alpha": lora.alpha,
            "lora.rslora": lora.rslora,
            "lora.modules": sorted(lora.modules),
        }
        adapters["lora.whole"] = sorted(lora.whole)
    return {"name": config.model.name, **fixed, "dtype": config.training.dtype, **adapters}


def step_to_load(config: JobConfig) -> int | None:
    """Return the step to resume from; None: start from the beginning.

    Raises:
        ConfigError: the folder cannot be read, or `checkpoint.load_step` is not there.
        MissingFile: the folder is in a store that does not answer from here.
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
    """Return the state of a saved step, and check that all its files are there in full length.

    Raises:
        ConfigError: the state is unreadable or of another format, or a file is missing or cut short.
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
    """Return the configuration that a saved step has, as TOML; None of an older checkpoint.

    Raises:
        ConfigError: it cannot be read, or is damaged.
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


def parse_state(text: bytes, step: int) -> RunState:
    """Return the state of a step that a `state.json` holds.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RecursionError: it is damaged, or of another format.
    """
    content = json.loads(text.decode())
    sum_of_content = content.pop("check_sum", None)  # older checkpoints have none
    if sum_of_content is not None and sum_of_content != check_sum(content):
        raise ValueError(f"the check sum of {STATE_FILE} is wrong")
    if content.pop("format") != FORMAT:
        raise ValueError("another version of this program wrote it")
    content["streams"] = {
        int(stream): {
            key: value if key == "iterable" else _numbers(value) for key, value in entry.items()
        }
        for stream, entry in content["streams"].items()
    }
    state = RunState(**content)
    if not (state.step == step and isinstance(state.tokens_seen, int)):
        raise ValueError("it is of another step")
    return state


def _numbers(value: Any) -> int | list[int]:
    return [*map(int, value)] if isinstance(value, list) else int(value)


def state_text(state: RunState) -> bytes:
    """Return the content of `state.json`."""
    # as it is when it is read
    content = json.loads(json.dumps({"format": FORMAT, **asdict(state)}))
    return json.dumps(content | {"check_sum": check_sum(content)}).encode()


def unreadable(folder: Store, step: int, error: BaseException | str) -> ConfigError:
    """Return the error for a checkpoint that cannot be loaded."""
    reason = str(error).strip().split("\n")[0].removesuffix(".")
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


def check_same_model(
    state: RunState,
    config: JobConfig,
    model: ModelArgs,
    path: Place | str,
    *,
    remedy: str,
    dtype: bool = True,
) -> None:
    """Check that the tensors of `state`, which is in `path`, are those of this model; dtype: of its data type too.

    Raises:
        ConfigError: another model or data type.
    """
    defaults = {argument.name: argument.default for argument in fields(model)}
    defaults |= {"lora.rank": 0, "lora.rslora": False, "lora.whole": []}
    for key, now in model_description(config, model).items():
        # an older checkpoint has the default of a newer field
        saved = state.model.get(key, defaults.get(key))
        if isinstance(saved, dict) and is_dataclass(part := getattr(model, key, None)):
            saved = {
                each.name: each.default for each in fields(part) if each.default is not MISSING
            } | saved
        if saved != now and (dtype or key != "dtype"):
            what = f"model.flavor = {config.model.flavor!r}, whose {key}"
            if key == "dtype" or key.startswith("lora."):
                what = key.replace("dtype", "training.dtype")
            raise ConfigError(
                f"{what} = {now!r} is not the {saved!r} of the checkpoint {path}; {remedy}"
            )


def check_fits(state: RunState, config: JobConfig, model: ModelArgs) -> None:
    """Check that this run can resume from `state`.

    Raises:
        ConfigError: another model, data type, seed or number of data streams, or no optimizer for the steps to come.
    """
    path = checkpoint_folder(config).step(state.step)
    elsewhere = "or start from step 0 in another checkpoint.folder"
    check_same_model(state, config, model, path, remedy=f"resume with that, {elsewhere}")
    excluded = config.checkpoint.exclude_from_loading
    left = config.training.steps - state.step
    if state.model_only and left > 0 and "optimizer" not in excluded:
        raise ConfigError(
            f"training.steps = {config.training.steps} is beyond the checkpoint {path}, which holds the weights "
            "alone (checkpoint.last_save_model_only); resume from an earlier step with checkpoint.load_step, or use a "
            f"new optimizer: --checkpoint.load_step {state.step} --checkpoint.exclude_from_loading optimizer"
        )
    if (
        not state.model_only
        and "optimizer" not in excluded
        and state.optimizer not in ("", states_of(config))
    ):
        raise ConfigError(
            f"optimizer.name = {config.optimizer.name!r} is not the {state.optimizer} of the checkpoint {path}, whose "
            f"states would be others; resume with {state.optimizer}, or start them again: --checkpoint.load_step "
            f"{state.step} --checkpoint.exclude_from_loading optimizer"
        )
    if "dataloader" in excluded:
        return
    first = next(iter(state.streams.values()), {})
    for key, now in (
        ("seed", config.training.seed),
        ("data_streams", config.training.data_streams),
    ):
        saved = first.get(key)
        # None: the number of streams is that of the checkpoint
        if now is not None and saved != now:
            raise ConfigError(
                f"training.{key} = {now} is not the {saved} of the checkpoint {path}, whose positions would mean other "
                f"data; resume with {saved}, {elsewhere}"
            )


def best_saved(folder: Store) -> tuple[int, float] | None:
    """Return step and validation loss of the best checkpoint, None if none is; OSError if it cannot be read."""
    try:
        best = json.loads(folder.read(folder.path / BEST_FILE).decode())
        step = int(best["step"])
        loss = float(best["validation_loss"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return (step, loss) if step in folder.steps() else None


def mark_best(folder: Store, step: int, loss: float | None) -> None:
    """Note that this new checkpoint is the best one so far; loss: None if it is not.

    A checkpoint of that step of another history, which it has replaced, is no longer the best one.
    """
    if loss is not None:
        folder.write(
            folder.path / BEST_FILE,
            json.dumps({"step": step, "validation_loss": loss}).encode(),
        )
    elif (best := best_saved(folder)) is not None and best[0] == step:
        folder.remove_file(folder.path / BEST_FILE)


def keep_latest(folder: Store, k: int, written: int, *, every: int = 0) -> None:
    """Remove all but the best and the last k checkpoints up to and including step `written`; k = 0 keeps all.

    every: steps that are a multiple of it stay too; 0: none.

    Later steps belong to a history that this run has left; each is removed when this run reaches it.
    """
    best = best_saved(folder)
    of_this_run = [step for step in folder.steps() if step <= written]
    for step in of_this_run[: -k or None] if k else ():
        if (best is not None and step == best[0]) or (every and step % every == 0):
            continue
        try:
            folder.remove(step)
        except OSError as error:
            logger.warning(
                f"the old checkpoint {folder.step(step)} could not be removed ({reason_of(error)})"
            )


_KEY = "checkpoint.initial_load_path"


def check_initial_weights(
    config: JobConfig, model: ModelArgs, opened: ModelFolder | None = None
) -> None:
    """Check that the weights in `checkpoint.initial_load_path` are there and of this model.

    opened: see `opened_at`.

    Raises:
        ConfigError: they are damaged, of another model, or neither a Hugging Face folder nor a checkpoint.
        MissingFile: nothing is there.
    """
    given = config.checkpoint.initial_load_path
    if given is None:
        return
    if config.checkpoint.enable and step_to_load(config) is not None and not config.lora.rank:
        return  # a run with checkpoints resumes from them; those of adapters hold nothing else
    path = Path(given)
    step = saved_step(_KEY, given)
    if step is None and not path.is_dir():
        raise MissingFile(
            f"{_KEY} = {given!r} is no folder here, and no checkpoint in a store; name a folder with weights (for a "
            "finished run, in its config.toml)"
        )
    if not config.checkpoint.initial_load_model_only:
        _check_branch(config, given, step)
    if step is not None:
        state = read_state(named_step(_KEY, given)[0], step)
        if state.model.get("lora.rank"):
            raise ConfigError(
                f"{_KEY} = {given!r} holds adapters only; merge them into a Hugging Face folder with lct convert "
                "to-hf, and name that"
            )
        check_same_model(
            state,
            replace(config, lora=LoRA()),
            model,
            given,
            remedy="take that model",
            dtype=False,
        )
        return
    folder = opened_at(path, opened)
    if folder.has_config:
        _check_hf(config, model, folder)
        _ = folder.tensors  # all files are there, and whole
    else:
        raise ConfigError(
            f"{_KEY} = {given!r} holds neither a {CONFIG_FILE} of a Hugging Face model nor a {STATE_FILE} of a "
            "checkpoint; name a Hugging Face folder on this machine, or a folder step-N of a run's checkpoints"
        )


def _check_branch(config: JobConfig, given: str, step: int | None) -> None:
    key = "checkpoint.initial_load_model_only = false"
    if step is None:
        raise ConfigError(
            f"{key} continues another run, and {_KEY} = {given!r} holds weights alone; name a "
            "folder step-N of a run's checkpoints, or leave the key out"
        )
    if config.lora.rank:
        raise ConfigError(
            f"{key} has no optimizer for the adapters of lora.rank = {config.lora.rank}, which are new; leave it out"
        )


def _check_hf(config: JobConfig, model: ModelArgs, folder: ModelFolder) -> None:
    """Check that the model is that of `config.json`, but for what table [model] changes."""
    family = hf_config(config.model.name)
    family.check_start(model)
    args = family.read(folder.entries)
    theirs = args.configured(
        config.model, vocab_size=args.vocab_size, max_seq_len=model.max_seq_len
    )
    balance = {"router_aux_loss_coef"}  # of training, not of the weights
    different = [
        f"{field.name} = {getattr(model, field.name)} (there {getattr(theirs, field.name)})"
        for field in fields(model)
        if field.name not in balance
        and getattr(model, field.name) != getattr(theirs, field.name)
    ]
    if different:
        name = (
            "the folder" if config.model.folder else f"model.flavor = {config.model.flavor!r}"
        )
        raise ConfigError(
            f"{name} is not the model in {_KEY} = {str(folder.path)!r}: {', '.join(different)}; set "
            f"model.flavor to a folder that holds its {CONFIG_FILE}, such as {str(folder.path.absolute())!r}"
        )

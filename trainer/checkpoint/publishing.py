"""Writing a checkpoint folder, all of it by one process: a step appears whole or not at all. Torch-free.

On a file system a save writes to step-N.tmp, and one rename makes it the checkpoint. A remote store has no rename: a
save writes to step-N itself, where the object `saving` says that it is this program's and unfinished, and `state.json`
is written last. A step with `saving` and without `state.json` is never read, and removed later.

Two jobs may save to one name, for instance when a job is started again and the old one is still alive. `saving` holds
the claim of the last one that began, a word that is in the names of its objects too. Only that one is published.
"""

import errno
import json
import logging
import os
import re
import shutil
import uuid
from dataclasses import asdict
from itertools import count
from pathlib import Path

from trainer.checkpoint.folder import (
    BEST_FILE,
    FORMAT,
    STATE_FILE,
    RunState,
    best_saved,
    check_sum,
    saved_steps,
    step_folder,
)
from trainer.checkpoint.remote import Place, is_remote, objects, reason_of, store_errors
from trainer.config.errors import ConfigError

SAVING_FILE = "saving"
_UNFINISHED = re.compile(r"step-[1-9]\d*\.tmp")
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_OURS = re.compile(r"__([0-9a-f]+_)?\d+_\d+\.distcp|\.metadata(\.tmp)?")

logger = logging.getLogger("trainer")


def prepare_folder(folder: Place) -> None:
    """Make the folder, or find that a store can be written to; remove what interrupted saves have left.

    Raises:
        OSError: it cannot be written.
        ConfigError: something in a store has the name of a checkpoint, and this program did not write it.
    """
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        return
    with store_errors(folder):
        tried = folder / ".writable"
        tried.write_bytes(b"")
        tried.unlink()
        remove_unfinished(folder)
    others = {name.split("/")[0] for name in objects(folder)} - {f"step-{step}" for step in saved_steps(folder)}
    if strange := sorted(name for name in others if _STEP.fullmatch(name)):
        raise ConfigError(
            f"checkpoint.folder = {str(folder)!r}: {strange[0]} in it is no checkpoint of this program, and one may "
            "need its name; name another folder"
        )


def unfinished_folder(folder: Place, step: int) -> Place:
    """Return where the files of a step are written before it is published."""
    return step_folder(folder, step) if is_remote(folder) else folder / f"step-{step}.tmp"


def begin(unfinished: Place) -> str:
    """Claim the place of a step in a store, where one of a history that this run left may be. Before any rank writes.

    Return the claim; empty for a file system.

    Raises:
        OSError: the store failed.
    """
    if not is_remote(unfinished):
        return ""
    claim = uuid.uuid4().hex
    with store_errors(unfinished):
        _remove_objects(unfinished)
        (unfinished / SAVING_FILE).write_text(claim, encoding="utf-8")
    return claim


def publish(unfinished: Place, state: RunState, claim: str = "") -> None:
    """Turn `unfinished`, whose other files are written already, into the checkpoint of its step. claim: see `begin`.

    Raises:
        OSError: it cannot be written, or another job has claimed it.
    """
    content = json.loads(json.dumps({"format": FORMAT, **asdict(state)}))  # as it is when it is read
    content = json.dumps(content | {"check_sum": check_sum(content)})
    if is_remote(unfinished):
        with store_errors(unfinished):
            if SAVING_FILE not in objects(unfinished) or (unfinished / SAVING_FILE).read_text("utf-8") != claim:
                raise OSError(errno.EBUSY, "another job saves there, too")
            (unfinished / STATE_FILE).write_text(content, encoding="utf-8")
            (unfinished / SAVING_FILE).unlink()
        return
    with (unfinished / STATE_FILE).open("w", encoding="utf-8") as file:
        file.write(content)
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


def mark_best(folder: Place, step: int, loss: float | None) -> None:
    """Note that this new checkpoint is the best one so far; loss: None if it is not.

    A checkpoint of that step of another history, which it has replaced, is no longer the best one.
    """
    with store_errors(folder):
        if loss is None:
            if (best := best_saved(folder)) is not None and best[0] == step:
                (folder / BEST_FILE).unlink()
            return
        written = folder / (BEST_FILE if is_remote(folder) else f"{BEST_FILE}.tmp")
        written.write_text(json.dumps({"step": step, "validation_loss": loss}), encoding="utf-8")
        if not is_remote(folder):
            written.replace(folder / BEST_FILE)


def remove_unfinished(folder: Place) -> None:
    """Remove what interrupted saves and removals have left."""
    if is_remote(folder):
        names = objects(folder)
        with store_errors(folder):
            for step, _, name in (name.partition("/") for name in names):
                if not (_STEP.fullmatch(step) and name == SAVING_FILE):
                    continue
                if f"{step}/{STATE_FILE}" in names:  # published
                    (folder / step / SAVING_FILE).unlink()
                else:
                    _remove_objects(folder / step)
        return
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def keep_latest(folder: Place, k: int, written: int, *, every: int = 0) -> None:
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
        if not is_remote(path) and path.is_symlink():
            continue
        try:
            _remove(path, step)
        except OSError as error:
            logger.warning(f"the old checkpoint {path} could not be removed ({reason_of(error)})")


def _remove(path: Place, step: int) -> None:
    """Remove a checkpoint; one that is half removed must not look like one."""
    if is_remote(path):
        with store_errors(path):
            _remove_objects(path)
        return
    doomed = unfinished_folder(path.parent, step)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _remove_objects(path: Place) -> None:
    """Remove this program's objects under the name of a step: `state.json` first, `saving` last."""
    names = objects(path)
    if STATE_FILE in names:
        (path / SAVING_FILE).write_bytes(b"")
        (path / STATE_FILE).unlink()
    if ours := [f"{path.path}/{name}" for name in names if _OURS.fullmatch(name)]:
        path.fs.rm(ours)
    (path / SAVING_FILE).unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

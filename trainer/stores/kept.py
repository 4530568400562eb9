"""Which checkpoints of a folder are kept: the latest and the best. Torch-free."""

import json

from trainer.runtime.console import logger
from trainer.stores.store import Store, reason_of

BEST_FILE = "best.json"


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

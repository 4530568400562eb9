"""Which checkpoints of a folder are kept: the latest and the best. Torch-free."""

import json

from trainer.runtime.console import logger
from trainer.stores.store import Store, reason_of

BEST_FILE = "best.json"


def best_saved(folder: Store) -> tuple[int, float] | None:
    """Return step and validation loss of the best checkpoint. None if its record or the checkpoint does not exist.

    A damaged record counts as missing.

    Args:
        folder: The folder of checkpoints.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        best = json.loads(folder.read(folder.path / BEST_FILE).decode())
        step = int(best["step"])
        loss = float(best["validation_loss"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return (step, loss) if step in folder.steps() else None


def mark_best(folder: Store, step: int, loss: float | None) -> None:
    """Record a new checkpoint as the best one so far, if `loss` is not None.

    If `loss` is None and the record names this same step, the record is of an older checkpoint, which the new one has
    replaced: remove it.

    Args:
        folder: The folder of checkpoints.
        step: Number of the step.
        loss: The validation loss. None if the new checkpoint is not the best one.
    """
    if loss is not None:
        folder.write(
            folder.path / BEST_FILE,
            json.dumps({"step": step, "validation_loss": loss}).encode(),
        )
    elif (best := best_saved(folder)) is not None and best[0] == step:
        folder.remove_file(folder.path / BEST_FILE)


def keep_latest(folder: Store, k: int, written: int, *, every: int = 0) -> None:
    """Remove all checkpoints up to step `written`, except the best and the last k. A failed removal is only logged.

    Later steps belong to a history that this run has left; each is removed when this run reaches it.

    Args:
        folder: The folder of checkpoints.
        k: Number of checkpoints; 0 keeps all.
        written: The last saved step, included.
        every: Steps that are multiples of this number stay too; 0: none.
    """
    best = best_saved(folder)
    own_steps = [step for step in folder.steps() if step <= written]
    for step in own_steps[:-k] if k else ():
        if (best is not None and step == best[0]) or (every and step % every == 0):
            continue
        try:
            folder.remove(step)
        except OSError as error:
            logger.warning(
                f"the old checkpoint {folder.step(step)} could not be removed ({reason_of(error)})"
            )

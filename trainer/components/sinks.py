"""Where metrics are written: a JSON file, TensorBoard, Weights & Biases. A run has one of each, on rank 0.

Each class has `write`, which takes the metrics of a step by name, and `close`.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from trainer.config.schema import JobConfig
from trainer.config.writable import full_disk
from trainer.data.sources.files import write_whole
from trainer.runtime.console import logger
from trainer.runtime.dump_folder import writing_to

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_MOST_PENDING_BYTES = 16 << 20
_RETRY_SECONDS = 60.0


class JsonLines:
    """Writes one JSON object per logged step.

    A run that resumes after `start_step` continues the file, without the later steps. Any other run renames an earlier
    file to the time of its last line.

    Args:
        path: The file.
        start_step: The last step of the earlier run; 0 for a new run.

    Raises:
        ConfigError: The file cannot be written, for example on a full disk.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        with writing_to(path.parent):
            if path.exists():
                if start_step:
                    _keep_up_to(path, start_step)
                else:
                    last = datetime.fromtimestamp(path.stat().st_mtime)
                    path.rename(path.with_name(f"{path.stem}.{last:%Y%m%d-%H%M%S}.jsonl"))
            self._path = path
            self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._lost = 0
        self._full = False

    def write(self, metrics: Mapping[str, float | None]) -> None:
        """Write a line.

        If the disk is full, lines wait, up to 16 MiB, and are written with a later line. Further lines are lost.

        Args:
            metrics: The values, by name.
        """
        if len(self._pending) < _MOST_PENDING_BYTES:
            self._pending += json.dumps(metrics).encode() + b"\n"
        else:
            self._lost += 1
        self._write_pending()

    def close(self) -> None:
        """Write the waiting lines and close the file."""
        self._write_pending()
        self._file.close()
        if missing := self._pending.count(b"\n") + self._lost:
            logger.warning(
                f"the last lines of {self._path} are not written: {missing:,} are lost"
            )

    def _write_pending(self) -> None:
        """Write the waiting lines; warn when the disk becomes full."""
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if not (full := full_disk(error, self._path.parent)):
                raise
            if not self._full:
                logger.warning(
                    f"lines of {self._path} are not written: {full}; they wait for room"
                )
            self._full = True
            return
        if self._full:
            lost = (
                f"; {self._lost:,} later ones were too many to keep, and are lost"
                if self._lost
                else ""
            )
            logger.info(
                f"there is room again: the lines of {self._path} that waited are written{lost}"
            )
        self._full = False
        self._lost = 0


def _keep_up_to(path: Path, step: int) -> None:
    """Remove the lines of later steps from the file, and a line that a killed run left incomplete.

    A damaged line before the last one is removed with a warning.
    """
    kept = []
    damaged = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                damaged.append(number)
    if damaged:
        numbers = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        logger.warning(f"damaged lines of {path} are removed: {numbers}")
    write_whole(path, "".join(kept).encode())


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics of a step that are numbers, without the step."""
    return {
        name: value
        for name, value in metrics.items()
        if name != "step" and isinstance(value, (int, float))
    }


class TensorBoard:
    """Writes one scalar per metric to a folder per run. A run that resumes after `start_step` shares the folder.

    On a full disk a run goes on: one warning, and a new file of events when there is room again.

    Args:
        folder: The folder of all runs.
        start_step: The last step of the earlier run; 0 for a new run.
    """

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        new = folder / datetime.now().strftime("%Y%m%d-%H%M%S")
        earlier = [path for path in folder.glob("????????-??????") if path.is_dir()]
        self._run = max(earlier, default=new) if start_step else new
        self._lost = 0
        self._next_try = 0.0
        with writing_to(folder):
            # Repeated steps replace the same steps of the interrupted run.
            self._writer = self._open(purge_step=start_step + 1 if start_step else None)

    def write(self, metrics: Mapping[str, float | None]) -> None:
        """Write the numbers of a step. On a full disk, skip steps for a minute; raise other errors.

        Args:
            metrics: The values, by name; `step` is the step.
        """
        if self._writer is None and time.monotonic() < self._next_try:
            self._lost += 1
            return
        try:
            if self._writer is None:
                self._writer = self._open()
            for name, value in _numbers(metrics).items():
                self._writer.add_scalar(name, value, metrics["step"])
        except OSError as error:
            self._give_up(error)
        else:
            if self._lost:
                logger.info(
                    f"TensorBoard's events are written again; {self._lost:,} steps are missing in {self._run}"
                )
            self._lost = 0

    def close(self) -> None:
        """Write the waiting events and close the file."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _open(self, purge_step: int | None = None) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # the import takes a second

        return SummaryWriter(str(self._run), purge_step=purge_step)

    def _give_up(self, error: OSError) -> None:
        """On a full disk, drop the writer, whose thread has ended, until a later step; else raise `error`."""
        if not (full := full_disk(error, self._run)):
            raise error
        if not self._lost:
            logger.warning(f"TensorBoard's events in {self._run} are not written: {full}")
        self._lost += 1
        self._writer = None
        self._next_try = time.monotonic() + _RETRY_SECONDS


class WeightsAndBiases:
    """Sends metrics to Weights & Biases, or with WANDB_MODE=offline writes them to a folder for `wandb sync`.

    Its own variables (WANDB_PROJECT, ...) set project, entity and mode. A run that resumes after `start_step` continues
    the run of its dump folder.

    Args:
        config: The configuration.
        start_step: The last step of the earlier run; 0 for a new run.
    """

    def __init__(self, config: JobConfig, start_step: int) -> None:
        import wandb  # optional; the import takes a second

        folder = Path(config.job.dump_folder)
        file = folder / "wandb_run_id"
        run_id = file.read_text("utf-8") if start_step and file.exists() else uuid4().hex[:8]
        file.write_text(run_id, "utf-8")
        self._run = wandb.init(
            dir=str(folder),
            id=run_id,
            resume="allow",
            name=config.job.description or None,
            config=asdict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        offline = f"offline, wandb sync {Path(self._run.dir).parent}"
        logger.info(f"Weights & Biases: {offline if self._run.offline else self._run.url}")

    def write(self, metrics: Mapping[str, float | None]) -> None:
        """Send the numbers of a step.

        Args:
            metrics: The values, by name; `step` is the step.
        """
        self._run.log(_numbers(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()

"""Where metrics are written: a JSON file, TensorBoard, Weights & Biases. One of each a run, on rank 0.

Each has `write`, which takes the metrics of a step by name, and `close`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from trainer.config.schema import JobConfig
from trainer.config.writable import full_disk
from trainer.data.sources.files import write_whole
from trainer.runtime.console import logger
from trainer.runtime.dump_folder import writing_to


class JsonLines:
    """Writes one JSON object a logged step.

    A run that resumes after `start_step` continues the file, without the later steps. Any other run keeps an earlier
    file under the time of its last line.

    Raises:
        ConfigError: the file cannot be written, such as on a full disk.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        with writing_to(path.parent):
            if start_step and path.exists():
                _keep_up_to(path, start_step)
            elif path.exists():
                last = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
                path.rename(path.with_name(f"{path.stem}.{last}.jsonl"))
            self._path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, float | None]) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        with self._room_awaited():
            self._file.flush()

    def close(self) -> None:
        with self._room_awaited():
            self._file.close()

    @contextmanager
    def _room_awaited(self) -> Iterator[None]:
        """Warn if the disk is full: a run continues, and lines wait in memory for the next flush."""
        try:
            yield
        except OSError as error:
            if not (full := full_disk(error, self._path.parent)):
                raise
            logger.warning(f"lines of {self._path} are not written: {full}")


def _keep_up_to(path: Path, step: int) -> None:
    """Remove the lines of later steps from the file, and a line that a killed run left incomplete."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            lines += [line + "\n"] if json.loads(line)["step"] <= step else []
    write_whole(path, "".join(lines).encode())


class TensorBoard:
    """Writes one scalar a metric to a folder per run; a run that resumes after `start_step` shares the folder."""

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # the import takes a second

        earlier = sorted(path for path in folder.glob("????????-??????") if path.is_dir()) if start_step else []
        run = earlier[-1] if earlier else folder / datetime.now().strftime("%Y%m%d-%H%M%S")
        with writing_to(folder):
            # Repeated steps replace the same steps of the interrupted run.
            self._writer = SummaryWriter(str(run), purge_step=start_step + 1 if start_step else None)

    def write(self, metrics: Mapping[str, float | None]) -> None:
        for name, value in metrics.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Sends metrics to Weights & Biases, or with WANDB_MODE=offline writes them to a folder for `wandb sync`.

    Project, entity and mode are those of its own variables (WANDB_PROJECT, ...). A run that resumes after `start_step`
    continues the run of its dump folder.
    """

    def __init__(self, config: JobConfig, start_step: int = 0) -> None:
        import wandb  # optional; the import takes a second

        folder = Path(config.job.dump_folder)
        file = folder / "wandb_run_id"
        run_id = file.read_text(encoding="utf-8") if start_step and file.exists() else uuid4().hex[:8]
        file.write_text(run_id, encoding="utf-8")
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
        known = {name: value for name, value in metrics.items() if name != "step" and isinstance(value, (int, float))}
        self._run.log(known, step=int(metrics["step"]))

    def close(self) -> None:
        self._run.finish()

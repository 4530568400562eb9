"""Predict held-out fields with the weights of a run, step after step, and compare them with the truth.

python -m examples.fields.forecast outputs/domain_unet --picture forecast.png
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from examples.fields.file import FieldSource
from examples.fields.spec import fields_of
from trainer.commands.finished_run import configuration, loaded_model
from trainer.config.errors import ConfigError
from trainer.job import ResolvedJob, resolve
from trainer.job.resolution import on_device
from trainer.runtime.devices import this_machine

if TYPE_CHECKING:
    from torch import nn

    from trainer.distributed.parallel_dims import ParallelDims


@dataclass(frozen=True)
class Forecast:
    """Fields of the held-out trajectories, normalised: (trajectories, steps + 1, channels, height, width).

    The first frame of `predicted` is the true one.
    """

    true: np.ndarray
    predicted: np.ndarray

    def errors(self) -> list[tuple[float, float]]:
        """Return for each step the mean squared errors of (the model, persistence)."""
        first = self.true[:, :1]
        axes = (0, 2, 3, 4)
        model, persistence = (np.square(self.true - other).mean(axes)[1:] for other in (self.predicted, first))
        return [*zip(model.tolist(), persistence.tolist(), strict=True)]


def held_out_frames(source: FieldSource, held_out: int, lead: int, steps: int) -> np.ndarray:
    """Return every `lead`-th frame of the held-out trajectories, from the first on.

    Raises:
        ConfigError: none is held out, or their frames are too few.
    """
    if not held_out:
        raise ConfigError(
            "fields.held_out = 0: the run has seen all trajectories; hold out at least 1, and train again"
        )
    if (most := (source.times - 1) // lead) < steps:
        raise ConfigError(f"--steps {steps} is more than the {most} steps of a trajectory of {source.path}; use fewer")
    numbers = range(source.trajectories - held_out, source.trajectories)
    return np.stack([source.read(number, slice(0, steps * lead + 1, lead)) for number in numbers])


def forecast(job: ResolvedJob, steps: int) -> Forecast:
    """Predict `steps` times, each time from the prediction before.

    Raises:
        ConfigError: as `held_out_frames` and `opened_model`.
    """
    import torch

    from trainer.distributed.domain_parallel.domain import Domain
    from trainer.distributed.domain_parallel.tensor import DomainTensor

    fields = job.config.fields
    true = held_out_frames(fields_of(job.config), fields.held_out, fields.lead, steps)
    with opened_model(job) as (model, dims, opened), torch.no_grad():
        dtype = getattr(torch, opened.compute_dtype)
        state = torch.from_numpy(true[:, 0]).to(dims["world"].device_type, dtype)
        frames = [state]
        for _ in range(steps):
            state = state + model.output(model(DomainTensor(state, Domain({})))).local
            frames.append(state)
        predicted = torch.stack(frames, 1).float().cpu().numpy()
    return Forecast(true, predicted)


@contextmanager
def opened_model(job: ResolvedJob) -> "Iterator[tuple[nn.Module, ParallelDims, ResolvedJob]]":
    """Enter a context with the model and its saved weights, in a process group of one rank.

    Raises:
        ConfigError: the checkpoint is damaged, or of another model.
    """
    from trainer.runtime.process_group import Process, process_group

    process = Process(0, 0, 1, job.config.job.device)
    job = on_device(job, process.device.type)
    with process_group(process, job.config.comm):
        yield *loaded_model(job, process.device), job


def draw(result: Forecast, channel: str, output: Path) -> None:
    """Draw the first channel of the first trajectory: truth, prediction and their difference at some steps."""
    import matplotlib
    from matplotlib.figure import Figure

    steps = result.true.shape[1] - 1
    shown = sorted({1, max(steps // 2, 1), steps})
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "lct"}):
        figure = Figure(figsize=(2.6 * len(shown), 7.2), layout="constrained")
        axes = figure.subplots(3, len(shown), squeeze=False)
        limit = np.abs(result.true[0, :, 0]).max()
        for column, step in enumerate(shown):
            true, predicted = result.true[0, step, 0], result.predicted[0, step, 0]
            rows = {"truth": true, "prediction": predicted, "difference": predicted - true}
            for row, (name, field) in enumerate(rows.items()):
                image = axes[row, column].imshow(field, cmap="RdBu_r", vmin=-limit, vmax=limit)
                axes[row, column].set(xticks=[], yticks=[], title=f"{name}, step {step}")
        figure.colorbar(image, ax=axes, shrink=0.5, label=f"{channel}, normalised")
        figure.savefig(output, dpi=110, facecolor="white", metadata={"Date": None} if output.suffix == ".svg" else None)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    described = argparse.ArgumentParser(prog="python -m examples.fields.forecast", description=__doc__.splitlines()[0])
    add = described.add_argument
    add("folder", type=Path, help="job.dump_folder of the run")
    add("--steps", type=int, default=8, help="predictions, each from the one before (default: 8)")
    add("--step", type=int, default=-1, help="saved step of the training (default: the latest)")
    add("--picture", type=Path, help="file for a figure of truth and prediction, .png or .svg")
    return described


def main(argv: list[str] | None = None) -> int:
    """Print errors of the model and of persistence, and draw a figure if one is asked for."""
    args = parser().parse_args(argv)
    try:
        if args.steps < 1:
            raise ConfigError(f"--steps {args.steps} must be at least 1")
        if args.picture is not None and args.picture.suffix not in (".png", ".svg"):
            raise ConfigError(f"--picture {args.picture} must end in .png or .svg")
        config = configuration(args.folder, args.step, command="forecast", task="fields")
        result = forecast(resolve(config, 1, this_machine().device_type(config.job.device)), args.steps)
        print("step   error of the model   of persistence   ratio")
        for number, (model, persistence) in enumerate(result.errors(), 1):
            print(f"{number:4}   {model:18.4f}   {persistence:14.4f}   {model / persistence:5.2f}")
        if args.picture is not None:
            draw(result, fields_of(config).channels[0], args.picture)
            print(args.picture)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

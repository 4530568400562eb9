"""Predict held-out fields with the weights of a run, step after step, and compare them with the truth.

python -m examples.fields.forecast outputs/domain_unet --picture forecast.png
torchrun --nproc-per-node 2 -m examples.fields.forecast outputs/domain_unet --output predicted.zarr
"""

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from examples.fields.file import FieldSource, chunk_of, create, refuse_existing, unfinished_file, write_part
from examples.fields.netcdf import ENDING
from examples.fields.points_args import PLACES
from examples.fields.spec import fields_of
from trainer.commands.finished_run import configuration, loaded_model
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.job import ResolvedJob, resolve
from trainer.job.resolution import on_device
from trainer.runtime.devices import this_machine

if TYPE_CHECKING:
    from torch import nn

    from longshard.domain.tensor import DomainTensor
    from trainer.parallel.parallel_dims import ParallelDims
    from trainer.runtime.process_group import Process


@dataclass(frozen=True)
class Forecast:
    """Normalised fields of the held-out trajectories, (trajectories, steps + 1, channels, height, width).

    Each rank has its part. The first frame of `predicted` is the true one.
    """

    true: "DomainTensor"
    predicted: "DomainTensor"

    def errors(self) -> list[tuple[float, float]]:
        """Return the mean squared errors of (the model, persistence) for each step. A collective over all ranks."""
        first = self.true[:, :1]
        axes = (0, 2, 3, 4)
        model, persistence = ((self.true - other).square().mean(axes)[1:] for other in (self.predicted, first))
        return [*zip(model.local.tolist(), persistence.local.tolist(), strict=True)]

    def pictured(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first trajectory of truth and of prediction, whole, (steps + 1, channels, ...). A collective."""
        from longshard.domain.transfer import gather

        true, predicted = (gather(x[0]).local.cpu().numpy() for x in (self.true, self.predicted))
        return true, predicted


def held_out_numbers(source: FieldSource, held_out: int, lead: int, steps: int) -> range:
    """Return the numbers of the held-out trajectories.

    Args:
        source: The open file of fields.
        held_out: Number of held-out trajectories.
        lead: Frames from inputs to targets.
        steps: Number of predictions.

    Raises:
        ConfigError: No trajectory is held out, or a trajectory has too few frames.
    """
    if not held_out:
        raise ConfigError(
            "fields.held_out = 0: the run has seen all trajectories; hold out at least 1, and train again"
        )
    if (most := (source.times - 1) // lead) < steps:
        raise ConfigError(f"--steps {steps} is more than the {most} steps of a trajectory of {source.path}; use fewer")
    return range(source.trajectories - held_out, source.trajectories)


def forecast(job: ResolvedJob, model: "nn.Module", dims: "ParallelDims", steps: int) -> Forecast:
    """Predict `steps` times, each time from the prediction before. Each rank reads every `lead`-th frame of its part.

    Args:
        job: The resolved job of the run.
        model: This rank's part of the model.
        dims: The meshes of the job.
        steps: Number of predictions.

    Returns:
        The truth and the prediction.

    Raises:
        ConfigError: See `held_out_numbers`.
        SharedConfigError: A rank cannot read its part. Raised on every rank.
    """
    import torch

    from examples.fields.parallelize import field_domain
    from longshard.domain.tensor import DomainTensor
    from trainer.runtime.agreement import raise_on_all_ranks

    fields = job.config.fields
    source = fields_of(job.config)
    domain = field_domain(job, dims)
    numbers = held_out_numbers(source, fields.held_out, fields.lead, steps)
    part = tuple(domain.ranges(2 + axis, size) for axis, size in enumerate(source.grid))
    times = slice(0, steps * fields.lead + 1, fields.lead)
    read = raise_on_all_ranks(lambda: [source.read(number, times, part) for number in numbers], dims["world"])
    true = torch.from_numpy(np.stack(read)).to(dims["world"].device_type)
    with torch.no_grad():
        state = DomainTensor(true[:, 0].to(getattr(torch, job.compute_dtype)), domain)
        frames = [state.local]
        for _ in range(steps):
            state = state + model.output(model(state))
            frames.append(state.local)
        predicted = torch.stack(frames, 1).float()
    return Forecast(*(DomainTensor(x, domain.moved(1)) for x in (true, predicted)))


def write(result: Forecast, source: FieldSource, attributes: dict, folder: Path, world: object) -> None:
    """Write the predicted fields; each rank writes whole chunks of the grid. A collective over all ranks.

    All ranks write to a zarr group at once, and to a NetCDF file in turn.

    Args:
        result: The forecast.
        source: The file of the true fields.
        attributes: Attributes of the new file.
        folder: The new file, in a folder that all ranks see.
        world: Mesh of all ranks.
    """
    from longshard.domain.transfer import reshard
    from trainer.runtime.agreement import raise_on_all_ranks

    x = result.predicted
    chunk = dict(zip((3, 4), chunk_of(x.shape), strict=True))
    x = reshard(x, {dim: axis.layout.rounded(chunk[dim]) for dim, axis in x.domain.axes.items()})
    frames = x.local.cpu().numpy() * source.std + source.mean
    part = tuple(x.domain.ranges(dim, x.shape[dim]) for dim in (3, 4))
    rank = world.get_local_rank()
    raise_on_all_ranks(lambda: None if rank else create(folder, tuple(x.shape), attributes), world)
    turns = [[turn] for turn in range(world.size())] if folder.suffix == ENDING else [range(world.size())]
    for ranks in turns:
        raise_on_all_ranks(lambda ranks=ranks: write_part(folder, frames, part) if rank in ranks else None, world)


@contextmanager
def opened_model(job: ResolvedJob, process: "Process") -> "Iterator[tuple[nn.Module, ParallelDims, ResolvedJob]]":
    """Enter a context with this rank's part of the model and its saved weights, in the process group of all ranks.

    Args:
        job: The resolved job of the run.
        process: This rank's process.

    Yields:
        The model, the meshes, and the job on this device.

    Raises:
        ConfigError: The checkpoint is damaged, or belongs to another model.
    """
    from trainer.runtime.process_group import process_group

    job = on_device(job, process.device.type)
    with process_group(process, job.config.comm):
        yield *loaded_model(job, process.device), job


def draw(fields: tuple[np.ndarray, np.ndarray], channel: str, output: Path) -> None:
    """Draw truth, prediction and their difference at some steps, for the first channel.

    Args:
        fields: Truth and prediction, (steps + 1, channels, rows, columns). The last channels of points have their
            places.
        channel: Name of the channel.
        output: File of the figure, .png or .svg.
    """
    import matplotlib
    from matplotlib.figure import Figure

    truth, prediction = (x[:, 0] for x in fields)
    angles = None
    if truth.shape[-1] == 1:
        cosines_and_sines = fields[0][0, -PLACES:, :, 0]
        angles = [np.arctan2(sine, cosine) % (2 * np.pi) for cosine, sine in cosines_and_sines.reshape(2, 2, -1)]
    steps = len(truth) - 1
    shown = sorted({1, max(steps // 2, 1), steps})
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "lct"}):
        figure = Figure(figsize=(2.6 * len(shown), 7.2), layout="constrained")
        axes = figure.subplots(3, len(shown), squeeze=False)
        limit = np.abs(truth).max()
        for column, step in enumerate(shown):
            true = truth[step]
            predicted = prediction[step]
            rows = {"truth": true, "prediction": predicted, "difference": predicted - true}
            for row, (name, field) in enumerate(rows.items()):
                colors = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
                if angles is None:
                    image = axes[row, column].imshow(field, **colors)
                else:
                    image = axes[row, column].scatter(*angles, c=field, s=6, **colors)
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
    add("--output", type=Path, help="new file for the predicted fields, .zarr as the data or .nc")
    add("--degrees", type=int, nargs="+", help="ranks along height and width (default: all along the height)")
    return described


def _configuration(args: argparse.Namespace, ranks: int) -> JobConfig:
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps} must be at least 1")
    if args.picture is not None and args.picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture {args.picture} must end in .png or .svg")
    degrees = tuple(args.degrees or [ranks] * (ranks > 1))
    if math.prod(degrees) != ranks:
        shown = " ".join(map(str, degrees))
        raise ConfigError(
            f"--degrees {shown}: their product must be the number of ranks, {ranks}; use --degrees {ranks}"
        )
    if args.output is not None:
        refuse_existing(args.output)
    config = configuration(args.folder, args.step, command="forecast", task="fields")
    parallelism = replace(config.parallelism, domain_parallel_degrees=degrees)
    fields = replace(config.fields, rows=())  # the rows of the run belong to its own degrees
    return replace(config, parallelism=parallelism, fields=fields)


def _predicted(args: argparse.Namespace, job: ResolvedJob, process: "Process") -> None:
    """Predict on this rank; the first one prints, draws and names the file."""
    from trainer.runtime.agreement import gather_values

    source = fields_of(job.config)
    is_first = process.rank == 0
    with opened_model(job, process) as (model, dims, job):
        result = forecast(job, model, dims, args.steps)
        errors = result.errors()
        pictured = result.pictured() if args.picture is not None else None
        if args.output is not None:
            interval = source.attributes.get("interval", 1) * job.config.fields.lead
            attributes = {**source.attributes, "interval": interval}
            with unfinished_file(args.output) if is_first else nullcontext() as folder:
                write(result, source, attributes, Path(gather_values(str(folder), dims["world"])[0]), dims["world"])
    if not is_first:
        return
    print("step   error of the model   of persistence   ratio")
    for number, (error, persistence) in enumerate(errors, 1):
        print(f"{number:4}   {error:18.4f}   {persistence:14.4f}   {error / persistence:5.2f}")
    if pictured is not None:
        draw(pictured, source.channels[0], args.picture)
    for file in filter(None, (args.picture, args.output)):
        print(file)


def main(argv: list[str] | None = None) -> int:
    """Print errors of the model and of persistence, and write the files that the options name.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    from trainer.runtime.process_group import Process

    args = parser().parse_args(argv)
    process = Process.from_environment()
    try:
        config = _configuration(args, process.world_size)
        process = replace(process, wanted_device=config.job.device)
        _predicted(args, resolve(config, process.world_size, this_machine().device_type(config.job.device)), process)
    except ConfigError as error:
        if process.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The task of fields before ranks start: checks, decisions, words and memory. Torch-free."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from examples.fields.file import FieldSource, check_fields
from longshard.sharding.layout import AxisLayout, contiguous, sized
from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.sources.registry import check_streams
from trainer.families.args import ModelArgs
from trainer.job.record import ITEMSIZE, RankMemory, ResolvedJob, TaskDecisions, TaskSpec


class FieldArgs(ModelArgs, Protocol):
    """Arguments of a model of fields (channels, height, width).

    Attributes:
        axes: Axes that ranks may divide, height first.
        compiles: Whether torch.compile supports its layers.
        assumed_shape: Shape that is assumed if the fields are not on this machine.
    """

    axes: tuple[str, ...]
    compiles: bool
    assumed_shape: tuple[int, int, int]

    channels: int
    height: int
    width: int

    def for_fields(self, channels: int, height: int, width: int) -> "FieldArgs":
        """Return the arguments for fields of this shape.

        Args:
            channels: Channels of the fields.
            height: Rows of the fields, or number of points.
            width: Columns of the fields; 1 for points.

        Raises:
            ConfigError: The model does not support these sizes.
        """


class FieldSpec(TaskSpec):
    """Fields: the state some frames later is the target."""

    name = "fields"
    module = "examples.fields.task:FieldTask"
    data = "fields"
    positions = "points"
    position = "pts"
    sample = "field"
    command = "python -m examples.fields.forecast {}"

    def model(self, config: JobConfig, flavor: FieldArgs, missing: list[str] | None) -> FieldArgs:
        """Return the arguments for the shape of the fields; without the fields, for an assumed shape.

        Args:
            config: Configuration of the job.
            flavor: Sizes of the model.
            missing: Gets the error if the fields are not on this machine. None: raise the error.
        """
        try:
            source = fields_of(config)
        except MissingFile as error:
            if missing is None:
                raise
            missing.append(str(error))
            return flavor.for_fields(*flavor.assumed_shape)
        return flavor.for_fields(len(source.channels), *source.grid)

    def decide(self, config: JobConfig, model: FieldArgs, device_type: str, *, node: int) -> TaskDecisions:
        _check_features(config, model)
        return TaskDecisions(details=_layouts(config, model))

    def data_checks(self, config: JobConfig) -> Sequence[Callable[[JobConfig], None]]:
        return (check_samples,)

    def positions_of(self, job: ResolvedJob) -> int:
        return job.model.height * job.model.width

    def memory(self, job: ResolvedJob) -> RankMemory:
        degrees = job.degrees
        training = job.config.training
        model = job.model
        stored = ITEMSIZE[training.dtype]
        compute = ITEMSIZE[job.compute_dtype]
        local = math.ceil(math.ceil(model.n_params() / degrees.tp) / (degrees.dp_shard * degrees.cp))
        layouts: Sequence[AxisLayout] = job.details
        share = math.prod(max(map(axis.local_length, range(axis.degree))) / axis.length for axis in layouts)
        return RankMemory(
            weights=local * stored,
            gradients=local * stored,
            optimizer=2 * local * stored,
            tables=round(2 * training.local_batch_size * share * model.channels * job.positions * max(compute, 4)),
        )

    def describe(self, job: ResolvedJob) -> Mapping[str, str]:
        model = job.model
        fields = job.config.fields
        training = job.config.training
        streams = f", in {training.data_streams} streams" if training.data_streams else ""
        grid = " x ".join(map(str, (model.height, model.width)[: len(model.axes)]))
        data = (
            f"{training.dataset} {training.dataset_path}: {model.channels} channels on {grid} points{streams}; "
            f"predicted {fields.lead} frame{'s' * (fields.lead > 1)} ahead; {fields.held_out} "
            "trajectories held out"
        )
        parts = []
        for axis, layout in zip(model.axes, job.details, strict=False):
            rows = [layout.local_length(rank) for rank in range(layout.degree)]
            shown = ", ".join(map(str, rows)) if len(rows) <= 8 else f"{rows[0]}, {rows[1]} ... {rows[-1]}"
            parts.append(f"{axis} {layout.length} as {shown}")
        return {"data": data, "fields": f"divided over the domain: {'; '.join(parts)}" if parts else ""}


def fields_of(config: JobConfig) -> FieldSource:
    """Return the configured fields. Only their attributes are read.

    Args:
        config: Configuration of the job.

    Raises:
        ConfigError: No fields are configured, or they cannot be used.
    """
    path = config.training.dataset_path
    if not path:
        raise ConfigError(
            "training.dataset = 'fields' needs training.dataset_path; name what `python -m examples.fields.make_fields "
            "--output ...` made"
        )
    return FieldSource.open(path)


def check_samples(config: JobConfig) -> None:
    """Check that the fields have samples for every data stream.

    Args:
        config: Configuration of the job.

    Raises:
        ConfigError: There are too few samples, or the fields cannot be used.
    """
    source = fields_of(config)
    fields = config.fields
    check_fields(source, lead=fields.lead, held_out=fields.held_out)
    samples = (source.trajectories - fields.held_out) * (source.times - fields.lead)
    check_streams(source.path, samples, config.training.data_streams, item="sample")


def _check_features(config: JobConfig, model: FieldArgs) -> None:
    """Refuse degrees that divide sequences or layers, unsupported tensor parallelism and compilation, and float8."""
    parallelism = config.parallelism
    if parallelism.context_parallel_degree > 1 and not parallelism.domain_parallel_degrees:
        raise ConfigError(
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree} divides sequences of tokens; "
            "for fields use parallelism.domain_parallel_degrees, which divides their axes"
        )
    if parallelism.pipeline_parallel_degree > 1:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree} divides language models; "
            "for fields use parallelism.domain_parallel_degrees or data parallelism"
        )
    if parallelism.tensor_parallel_degree > 1 and not model.tensor_parallel_sizes():
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {parallelism.tensor_parallel_degree} divides linear modules, and "
            f"model.name = {config.model.name!r} has convolutions; use parallelism.domain_parallel_degrees"
        )
    if config.compile.enable and not model.compiles:
        raise ConfigError(
            f"compile.enable = true: what ranks send for model.name = {config.model.name!r} depends on where its "
            "points are, which is no graph; leave it out"
        )
    if config.float8.enable:
        raise ConfigError("float8.enable = true is for language models; leave it out, or use bfloat16")


def _layouts(config: JobConfig, model: FieldArgs) -> tuple[AxisLayout, ...]:
    """Return the rows of each rank, for each divided axis."""
    degrees = config.parallelism.domain_parallel_degrees
    rows = config.fields.rows
    if len(degrees) > len(model.axes):
        raise ConfigError(
            f"parallelism.domain_parallel_degrees = {list(degrees)} has {len(degrees)} entries, and model.name = "
            f"{config.model.name!r} divides {' and '.join(model.axes)}; give at most {len(model.axes)}"
        )
    if min(degrees, default=1) < 1:
        return ()  # refused with the other degrees
    if degrees and rows and len(rows) != len(degrees):
        raise ConfigError(
            f"fields.rows = {list(rows)} must have an entry for each of "
            f"parallelism.domain_parallel_degrees = {list(degrees)}"
        )
    lengths = (model.height, model.width)
    layouts = []
    for i, degree in enumerate(degrees):
        layouts.append(
            _sized_rows(rows[i], degree, lengths[i], model.axes[i]) if rows else contiguous(lengths[i], degree)
        )
    return tuple(layouts)


def _sized_rows(text: str, degree: int, length: int, axis: str) -> AxisLayout:
    """Return the layout with the configured rows of each rank."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(words) != degree or sum(map(int, words)) != length:
        even = ",".join(str(contiguous(length, degree).local_length(rank)) for rank in range(degree))
        raise ConfigError(
            f"fields.rows: {text!r} must be {degree} numbers whose sum is the {axis} {length}, such as {even!r}"
        )
    return sized([int(word) for word in words])

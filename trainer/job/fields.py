"""Checks and decisions of jobs on fields, in place of the ones about tokens. Torch-free."""

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.field_file import FieldSource, check_fields
from trainer.data.sources.registry import check_streams
from trainer.distributed.sharding.layout import AxisLayout, contiguous, sized
from trainer.job.degrees import Degrees
from trainer.models.args import FieldArgs, ModelArgs

_ASSUMED_SHAPE = (3, 256, 256)
_AXES = ("height", "width")


def check_task(config: JobConfig, args: ModelArgs) -> None:
    """Check that the model is one of the configured data.

    Raises:
        ConfigError: tokens for a model of fields, or fields for a language model.
    """
    if (args.task == "fields") == config.trains_fields:
        return
    name, dataset = f"model.name = {config.model.name!r}", f"training.dataset = {config.training.dataset!r}"
    if config.trains_fields:
        raise ConfigError(f"{name} is a language model, and {dataset} has no text; use 'unet' or 'nat', or other data")
    raise ConfigError(f"{name} is a model of fields, and {dataset} is text; use 'fields', or the model 'llama3'")


def shape_of_fields(config: JobConfig, missing: list[str] | None) -> tuple[int, int, int]:
    """Return (channels, height, width) of the configured fields.

    missing: takes the message if they are not on this machine; an assumed shape is returned then.

    Raises:
        ConfigError: there are none, or they cannot be used.
    """
    try:
        source = fields_of(config)
    except MissingFile as error:
        if missing is None:
            raise
        missing.append(str(error))
        return _ASSUMED_SHAPE
    return len(source.channels), *source.grid


def fields_of(config: JobConfig) -> FieldSource:
    """Return the configured fields; only their attributes are read.

    Raises:
        ConfigError: there are none, or they cannot be used.
    """
    path = config.training.dataset_path
    if not path:
        raise ConfigError(
            "training.dataset = 'fields' needs training.dataset_path; name what `lct make-fields --output ...` made"
        )
    return FieldSource.open(path)


def check_samples(config: JobConfig) -> None:
    """Check that the fields have samples for every data stream.

    Raises:
        ConfigError: they have not, or cannot be used.
    """
    source, fields = fields_of(config), config.fields
    check_fields(source, lead=fields.lead, held_out=fields.held_out)
    samples = (source.trajectories - fields.held_out) * (source.times - fields.lead)
    check_streams(source.path, samples, config.training.data_streams, item="sample")


def resolve_fields(config: JobConfig, model: FieldArgs, degrees: Degrees) -> tuple[AxisLayout, ...]:
    """Return which rank has which rows of each axis, and check what fields do not have.

    Raises:
        ConfigError: sequences or layers to divide, float8, or rows that do not fit the fields and the degrees.
    """
    parallelism = config.parallelism
    if parallelism.context_parallel_degree > 1:
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
    if config.float8.enable:
        raise ConfigError("float8.enable = true is for language models; leave it out, or use bfloat16")
    if len(degrees.domain) > len(_AXES):
        raise ConfigError(
            f"parallelism.domain_parallel_degrees = {list(degrees.domain)} has {len(degrees.domain)} entries, and "
            "fields have two axes; give one or two"
        )
    rows = parallelism.domain_parallel_rows
    if rows and len(rows) != len(degrees.domain):
        raise ConfigError(
            f"parallelism.domain_parallel_rows = {list(rows)} must have an entry for each of "
            f"parallelism.domain_parallel_degrees = {list(degrees.domain)}"
        )
    lengths = (model.height, model.width)
    layouts = []
    for i, degree in enumerate(degrees.domain):
        layouts.append(_given(rows[i], degree, lengths[i], _AXES[i]) if rows else contiguous(lengths[i], degree))
    return tuple(layouts)


def _given(text: str, degree: int, length: int, axis: str) -> AxisLayout:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(words) != degree or sum(map(int, words)) != length:
        even = ",".join(str(contiguous(length, degree).local_length(rank)) for rank in range(degree))
        raise ConfigError(
            f"parallelism.domain_parallel_rows: {text!r} must be {degree} numbers whose sum is the {axis} {length}, "
            f"such as {even!r}"
        )
    return sized([int(word) for word in words])

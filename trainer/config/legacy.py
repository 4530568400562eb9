"""Older spellings of settings, as a table: what they are read as today."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import Parallelism
from trainer.config.values import shown


@dataclass(frozen=True)
class Spelling:
    """An older key: the type of its value, today's key (None: it has no effect any more), and how the value changes."""

    kind: Any
    key: str | None
    convert: Callable[[Any], object] = lambda value: value


OLDER: dict[str, Spelling] = {
    "training.data_parallel_replicate_degree": Spelling(int, "parallelism.data_parallel_replicate_degree"),
    "training.data_parallel_shard_degree": Spelling(int, "parallelism.data_parallel_shard_degree"),
    "training.tensor_parallel_degree": Spelling(int, "parallelism.tensor_parallel_degree"),
    "experimental.context_parallel_degree": Spelling(int, "parallelism.context_parallel_degree"),
    "experimental.context_parallel_rotate_method": Spelling(
        str, "parallelism.context_parallel_method", lambda how: _rotation(how)
    ),
    "experimental.enable_async_tensor_parallel": Spelling(bool, "parallelism.enable_async_tensor_parallel"),
    "experimental.pipeline_parallel_degree": Spelling(int, "parallelism.pipeline_parallel_degree"),
    "experimental.pipeline_parallel_schedule": Spelling(
        str, "parallelism.pipeline_parallel_schedule", lambda name: _schedule(name)
    ),
    "experimental.pipeline_parallel_schedule_csv": Spelling(str, "parallelism.pipeline_parallel_schedule_csv"),
    "experimental.pipeline_parallel_microbatch_size": Spelling(int, "parallelism.pipeline_parallel_microbatch_size"),
    "experimental.pipeline_parallel_microbatches": Spelling(int, "parallelism.pipeline_parallel_microbatches"),
    "experimental.pipeline_parallel_layers_per_stage": Spelling(int, "parallelism.pipeline_parallel_layers_per_stage"),
    "experimental.pipeline_parallel_split_points": Spelling(
        tuple[str, ...],
        "parallelism.pipeline_parallel_split_points",
        lambda points: tuple(name.strip() for point in points for name in point.split(",")),
    ),
    "training.enable_loss_parallel": Spelling(bool, "parallelism.disable_loss_parallel", lambda on: not on),
    "training.batch_size": Spelling(int, "training.local_batch_size"),
    "training.warmup_steps": Spelling(int, "lr_scheduler.warmup_steps"),
    "training.compile": Spelling(bool, "compile.enable"),
    "checkpoint.enable_checkpoint": Spelling(bool, "checkpoint.enable"),
    "optimizer.fused": Spelling(bool, "optimizer.implementation", lambda on: "fused" if on else "foreach"),
    "float8.enable_float8_linear": Spelling(bool, "float8.enable"),
    "float8.force_recompute_fp8_weight_in_bwd": Spelling(bool, None),
    "training.fp8_linear": Spelling(str, "float8.enable", lambda how: _fp8_linear(how)),
    "job.use_for_integration_test": Spelling(bool, None),
}


def _rotation(how: str) -> str:
    """How K/V went round in the ring of older versions: by neighbours ("alltoall"), or gathered at once."""
    if how in ("alltoall", "allgather"):
        return {"alltoall": "ring", "allgather": "all_gather"}[how]
    raise ConfigError(
        f"experimental.context_parallel_rotate_method = {how!r} has no counterpart today; "
        f"use parallelism.context_parallel_method = 'ring' or 'all_gather' (once 'alltoall' and 'allgather')"
    )


def _schedule(name: str) -> str:
    """A schedule of a pipeline, once in lower case and with underscores."""
    today = get_args(get_type_hints(Parallelism)["pipeline_parallel_schedule"])
    names = {choice.lower(): choice for choice in today} | {"flexibleinterleaved1f1b": "Interleaved1F1B"}
    if (plain := name.lower().replace("_", "")) in names:
        return names[plain]
    raise ConfigError(f"experimental.pipeline_parallel_schedule = {name!r} is no schedule{did_you_mean(name, today)}")


def _fp8_linear(how: str) -> bool:
    """How scales were found: from the tensor itself ("dynamic"), or not at all ("")."""
    if how in ("dynamic", ""):
        return how == "dynamic"
    raise ConfigError(f"training.fp8_linear = {how!r} has no counterpart today; use float8.enable (once 'dynamic')")


def rewrite(values: Mapping[str, object], where: str) -> tuple[dict[str, object], list[str]]:
    """Settings of one source ("table.key" -> value) in today's spelling, and one note per older one.

    Raises:
        ConfigError: an older and today's spelling of one setting are both given, with different values.
    """
    today = {key: value for key, value in values.items() if key not in OLDER}
    notes = []
    for old, value in values.items():
        if old not in OLDER:
            continue
        key, new = OLDER[old].key, OLDER[old].convert(value)
        if key is None:
            notes.append(f"{old} = {shown(value)} ({where}) is ignored: it has no effect any more")
            continue
        if today.get(key, new) != new:
            raise ConfigError(
                f"{old} = {shown(value)} and {key} = {shown(today[key])} ({where}) are two spellings of one setting "
                f"with different values; keep {key} = {shown(today[key])} or {key} = {shown(new)}"
            )
        today[key] = new
        notes.append(f"{old} = {shown(value)} ({where}) is an older spelling, read as {key} = {shown(new)}")
    return today, notes

"""The plan of a pipeline: the modules and the rank of each stage, and the number of micro-batches. Torch-free.

A stage is a list of module names. The schedule places stages on ranks in a loop (stage s on rank s mod P) or as a V
(rank r has stages r and 2P - 1 - r).
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, zip_longest

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import JobConfig, Parallelism
from trainer.families.args import ModelArgs, is_further
from trainer.job.degrees import divisors

_KEY = "parallelism.pipeline_parallel_"
Stages = tuple[tuple[str, ...], ...]
"""Names of the modules of each stage."""


@dataclass(frozen=True)
class Schedule:
    """Requirements of a schedule of `torch.distributed.pipelining`."""

    stages_per_rank: int | None = None
    """None: any number."""
    v_shaped: bool = False
    splits_backward: bool = False
    """The gradients of weights are computed apart from the gradients of inputs."""
    rounds: bool = False
    """Micro-batches run in rounds of equal size, each of at least as many micro-batches as ranks."""
    fills_stages: bool = False
    """There must be at least as many micro-batches as stages."""


SCHEDULES = {
    "GPipe": Schedule(stages_per_rank=1),
    "1F1B": Schedule(stages_per_rank=1, fills_stages=True),
    "LoopedBFS": Schedule(),
    "Interleaved1F1B": Schedule(rounds=True),
    "InterleavedZeroBubble": Schedule(rounds=True, splits_backward=True),
    "ZBVZeroBubble": Schedule(stages_per_rank=2, v_shaped=True, splits_backward=True),
    "DualPipeV": Schedule(
        stages_per_rank=2, v_shaped=True, splits_backward=True, fills_stages=True
    ),
}


@dataclass(frozen=True)
class PipelinePlan:
    """The stages of a pipeline, their modules and ranks, and the number of micro-batches of one pass."""

    stages: Stages
    """Module names of each stage, in the order of the forward."""
    ranks: tuple[int, ...]
    """The pipeline rank of each stage."""
    micro_batches: int
    schedule: str
    splits_backward: bool = False

    def stages_of(self, rank: int) -> list[int]:
        """Return the indices of the stages of a pipeline rank.

        Args:
            rank: The pipeline rank.
        """
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]


def resolve_pipeline(config: JobConfig, model: ModelArgs) -> PipelinePlan | None:
    """Return the plan of the pipeline, None without pipeline parallelism.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.

    Raises:
        ConfigError: Stages, schedule and micro-batches do not fit; embeddings are tied; a stage has no parameters; or a
            split backward does not allow a setting.
    """
    degree = config.parallelism.pipeline_parallel_degree
    if degree > 1 and model.tie_embeddings:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree} puts embedding and output on different stages, and "
            f"model.flavor = {config.model.flavor!r} has one matrix for both; use 1, with context, tensor or data "
            f"parallelism in its place"
        )
    # Layers that predict further tokens follow the norm, and are in its stage.
    modules = [name for name in model.module_names() if not is_further(model, name)]
    plan = pipeline_plan(config.parallelism, modules, config.training.local_batch_size)
    if plan is None:
        return None
    further = [name for name in model.module_names() if name not in modules]
    plan = replace(
        plan,
        stages=tuple((*stage, *further) if "norm" in stage else stage for stage in plan.stages),
    )
    if ("norm",) in plan.stages and not model.norms_have_parameters:
        raise ConfigError(
            f"a pipeline stage of 'norm' alone has no parameters with model.norm_type = {config.model.norm_type!r}; "
            f"put it together with the output"
        )
    if plan.splits_backward and config.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"parallelism.fsdp_reshard_after_forward = 'always' would free the parameters that the second half of a "
            f"split backward needs, and {plan.schedule} splits it; use 'default', or "
            f"the schedule 'Interleaved1F1B'"
        )
    return plan


def pipeline_plan(
    parallelism: Parallelism, modules: Sequence[str], batch_size: int
) -> PipelinePlan | None:
    """Return the plan of these settings, None without pipeline parallelism.

    Args:
        parallelism: The table [parallelism].
        modules: Names of the model's modules in the order of the forward, layers as `layers.0`, `layers.1`, ...
        batch_size: Sequences of one pass, `training.local_batch_size`.

    Raises:
        ConfigError: Stages, schedule and micro-batches do not fit together.
    """
    degree = parallelism.pipeline_parallel_degree
    if degree == 1:
        return None
    micro_batches = _micro_batches(parallelism, batch_size)
    name = parallelism.pipeline_parallel_schedule
    schedule = SCHEDULES[name]
    layers = sum(name.startswith("layers.") for name in modules)
    default = schedule.stages_per_rank or (2 if layers >= 2 * degree else 1)
    stages = _stages(parallelism, modules, default * degree)
    per_rank, left_over = divmod(len(stages), degree)
    if left_over or per_rank != (schedule.stages_per_rank or per_rank):
        wanted = (
            f"{schedule.stages_per_rank} per rank"
            if schedule.stages_per_rank
            else "a multiple of the ranks"
        )
        fitting = [
            other
            for other, s in SCHEDULES.items()
            if not left_over
            and s.stages_per_rank in (None, per_rank)
            and not (s.fills_stages and micro_batches < len(stages))
        ]
        raise ConfigError(
            f"{_KEY}schedule = {name!r} on {_KEY}degree = {degree} takes {wanted}, and {_source(parallelism)} makes "
            f"{len(stages)} stages; use {default * degree} stages"
            + (f", or one of {', '.join(fitting)}" if fitting else "")
        )
    _check_micro_batches(parallelism, schedule, micro_batches, len(stages), batch_size)
    last = 2 * degree - 1
    ranks = tuple(
        min(s, last - s) if schedule.v_shaped else s % degree for s in range(len(stages))
    )
    return PipelinePlan(
        stages, ranks, micro_batches, name, splits_backward=schedule.splits_backward
    )


def _micro_batches(parallelism: Parallelism, batch_size: int) -> int:
    size = parallelism.pipeline_parallel_microbatch_size
    if batch_size % size:
        raise ConfigError(
            f"{_KEY}microbatch_size = {size} must divide training.local_batch_size = {batch_size}; "
            f"use one of {', '.join(map(str, divisors(batch_size)))}"
        )
    return batch_size // size


def _check_micro_batches(
    parallelism: Parallelism,
    schedule: Schedule,
    micro_batches: int,
    stages: int,
    batch_size: int,
) -> None:
    degree = parallelism.pipeline_parallel_degree
    needed = 0
    if schedule.fills_stages and micro_batches < stages:
        rule = f"at least as many micro-batches as its {stages} stages"
        needed = stages
    elif schedule.rounds and micro_batches % max(1, micro_batches // degree):
        rule = (
            f"equal rounds of at least {degree} micro-batches, as a multiple of {degree} makes"
        )
        needed = degree
    if needed:
        enough = math.ceil(micro_batches / needed) * needed
        raise ConfigError(
            f"{_KEY}schedule = {parallelism.pipeline_parallel_schedule!r} takes {rule}, and training.local_batch_size "
            f"= {batch_size} makes {micro_batches} of {batch_size // micro_batches} sequence(s); use a "
            f"local_batch_size of {enough * (batch_size // micro_batches)}, or the "
            f"schedule {'GPipe' if stages == degree else 'LoopedBFS'!r}"
        )


def _stages(parallelism: Parallelism, modules: Sequence[str], default: int) -> Stages:
    """Return the modules of each stage: the listed ones, or all modules divided over `default` stages.

    `pipeline_parallel_layers_per_stage` overrides `default`.

    Raises:
        ConfigError: Two keys say where stages begin, the list is wrong, or there are more stages than layers.
    """
    listed = parallelism.pipeline_parallel_module_fqns
    if listed and parallelism.pipeline_parallel_layers_per_stage:
        raise ConfigError(
            f"{_KEY}module_fqns and {_KEY}layers_per_stage both say where stages begin; keep one"
        )
    if not listed:
        return _divided(parallelism, modules, default)
    stages = tuple(tuple(name.strip() for name in stage.split(",")) for stage in listed)
    names = [name for stage in stages for name in stage]
    for name in names:
        if name not in modules:
            raise ConfigError(
                f"{_KEY}module_fqns names {name!r}, which the model lacks{did_you_mean(name, modules)}"
            )
    if names != list(modules):
        pairs = zip_longest(names, modules, fillvalue="the end")
        wrong, right = next((a, b) for a, b in pairs if a != b)
        raise ConfigError(
            f"{_KEY}module_fqns must name every module once, in the order of the forward, and has {wrong} where "
            f"{right} belongs; the modules are {modules[0]}, {modules[1]} to {modules[-3]}, {', '.join(modules[-2:])}"
        )
    return stages


def _divided(parallelism: Parallelism, modules: Sequence[str], number: int) -> Stages:
    """Return stages with layers assigned so that the heaviest stage is as light as possible.

    The modules before the first layer count as one layer, and so do the modules after the last layer.

    number: Number of stages, unless `pipeline_parallel_layers_per_stage` decides it.

    Raises:
        ConfigError: There are more stages than layers.
    """
    layers = [name for name in modules if re.fullmatch(r"layers\.\d+", name)]
    first = modules.index(layers[0])
    if per_stage := parallelism.pipeline_parallel_layers_per_stage:
        number = -(-(len(layers) + 2) // per_stage)
    if number > len(layers):
        several = SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank != 1
        fewer = (
            "a lower degree"
            + ", or '1F1B' with one stage a rank" * several
            + ", or more a stage" * bool(per_stage)
        )
        raise ConfigError(
            f"{_KEY}degree = {parallelism.pipeline_parallel_degree} with {_KEY}schedule = "
            f"{parallelism.pipeline_parallel_schedule!r} makes {number} stages, and the model has only "
            f"{len(layers)} layers; use fewer stages ({fewer}), or name each stage's modules in {_KEY}module_fqns"
        )
    counts = [1] * number

    def weight(stage: int) -> int:
        return counts[stage] + (stage == 0) + (stage == number - 1)

    for _ in range(len(layers) - number):
        # Among equally light stages take the last: earlier stages keep the activations of more micro-batches.
        lightest = min(reversed(range(number)), key=weight)
        counts[lightest] += 1
    edges = [0, *accumulate(counts[1:], initial=first + counts[0])]
    edges[-1] = len(modules)
    return tuple(tuple(modules[a:b]) for a, b in pairwise(edges))


def _source(parallelism: Parallelism) -> str:
    for way in ("module_fqns", "layers_per_stage"):
        if value := getattr(parallelism, f"pipeline_parallel_{way}"):
            return f"{_KEY}{way} = {list(value) if isinstance(value, tuple) else value}"
    return "the model"


def layers_of(modules: Iterable[str]) -> list[int]:
    """Return the indices of the layers among some modules of a decoder.

    Args:
        modules: Names of modules.
    """
    return [int(name.removeprefix("layers.")) for name in modules if name.startswith("layers.")]


def layers_of_stages(pipeline: PipelinePlan | None, model: ModelArgs) -> list[list[int]]:
    """Return the indices of the layers of each stage; without a pipeline the model is one stage.

    Layers that predict further tokens are left out: they follow the final norm, and their inputs are not outputs of
    layers.

    Args:
        pipeline: The plan of the pipeline, None without one.
        model: The arguments of the model.
    """
    stages = [model.module_names()] if pipeline is None else pipeline.stages
    return [[layer for layer in layers_of(stage) if layer < model.n_layers] for stage in stages]

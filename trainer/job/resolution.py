"""Make and check all decisions of a job before ranks start. Torch-free.

`STAGES` lists the steps in their order. `lct check`, `lct train` and each rank call `resolve`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter

from trainer.config.errors import ConfigError, Problems
from trainer.config.keys import Condition, keys_of
from trainer.config.registry import Registry
from trainer.config.schema import JobConfig
from trainer.config.values import shown
from trainer.families.args import ModelArgs, experts_of, windows_of
from trainer.families.registry import MODELS, ModelFolder, flavor_args, from_path, model_folder
from trainer.job.degrees import GPUS_OF_A_NODE, divisors, resolve_degrees
from trainer.job.experts import check_experts, note_of_router
from trainer.job.files import check_checkpoint, check_checkpoint_keys, check_dump_folder
from trainer.job.incompatible import FIRST_KEYS, refuse_incompatible
from trainer.job.language import Language
from trainer.job.preferences import Preferences
from trainer.job.record import Draft, ResolvedJob, TaskSpec
from trainer.job.training import (
    adapters_by_adamw,
    check_batch,
    check_profiling,
    check_schedule,
    check_trackers,
)
from trainer.job.transforms import check_activation_checkpoint, resolve_compilation
from trainer.stores.initial_weights import check_initial_weights

TASKS: Registry[TaskSpec] = Registry("task", {Language.name: Language()})
_TASKS_BY_DATASET: dict[str, TaskSpec] = {"preferences": Preferences()}
"""Data sets of tokens that have a task of their own."""


Step = Callable[[Draft], Draft | None]
"""Returns the draft of a job with its decisions added, or None if it only checks; raises ConfigError."""


def resolve(
    config: JobConfig,
    world_size: int,
    device_type: str = "cuda",
    *,
    node: int | None = None,
    missing: list[str] | None = None,
    data_checked: bool = False,
    weights_checked: bool = False,
) -> ResolvedJob:
    """Make all decisions for `world_size` ranks, and check everything that can be checked before they start.

    Args:
        config: The configuration.
        world_size: Ranks of the job.
        device_type: "cuda" or "cpu".
        node: Ranks on one node. None if unknown: then eight GPUs, or all ranks on CPUs.
        missing: Collects messages about files that this machine lacks, for a check of a job elsewhere. None: they are
            errors.
        data_checked: Whether another process of this machine has checked the data.
        weights_checked: Whether another process of this machine has checked the files of weights and checkpoints.

    Returns:
        The record of all decisions.

    Raises:
        ConfigError: All wrong settings of one stage of `STAGES`, a sentence each: the value, the rule, what would work.
    """
    node = node or (GPUS_OF_A_NODE if device_type == "cuda" else world_size)
    draft = Draft(config, world_size, device_type, node, missing, data_checked, weights_checked)
    for stage in STAGES:
        problems = Problems(missing)
        for step in stage:
            with problems.collected():
                draft = step(draft) or draft
        problems.raise_all()
    return draft.resolved(_without_auto(draft))


def task_of(config: JobConfig) -> TaskSpec:
    """Return the task of a configuration.

    Args:
        config: The configuration.
    """
    return _TASKS_BY_DATASET.get(config.training.dataset) or TASKS[config.task]


def resolve_model(
    config: JobConfig, missing: list[str] | None = None, folder: ModelFolder | None = None
) -> ModelArgs:
    """Return the arguments of the configured model, for its data.

    Args:
        config: The configuration.
        missing: Collects messages about missing files; see `resolve`.
        folder: The Hugging Face folder of the model, if it has been read.

    Raises:
        ConfigError: There is no such model, flavor or data, or the model is for another kind of data.
    """
    flavor = flavor_args(config.model, folder)
    task = task_of(config)
    if flavor.task != task.name:
        models = [
            repr(name)
            for name, family in MODELS.items()
            if next(iter(family.flavors.values())).task == task.name
        ]
        raise ConfigError(
            f"model.name = {config.model.name!r} is a model of {TASKS[flavor.task].data}, and "
            f"training.dataset = {config.training.dataset!r} is {task.data}; use model.name = "
            f"{' or '.join(models[:2])}, or other data"
        )
    return task.model(config, flavor, missing)


def on_device(job: ResolvedJob, device_type: str) -> ResolvedJob:
    """Return the job on another type of device, for which `auto` chooses again. On the same type, it is the same job.

    Data and weights are not checked again.

    Args:
        job: The resolved job.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: The device lacks the configured kernel.
    """
    if device_type == job.device_type:
        return job
    return resolve(
        job.user_config,
        job.degrees.world_size,
        device_type,
        node=job.node,
        data_checked=True,
        weights_checked=True,
    )


def _write_out(draft: Draft) -> Draft:
    """Replace `model.path` by the keys for which it stands, and Muon by AdamW for adapters; add the task."""
    folder = model_folder(draft.config.model)
    config, notes = adapters_by_adamw(from_path(draft.config, folder))
    return replace(draft, config=config, folder=folder, task=task_of(config)).noted(*notes)


def _bounds(draft: Draft) -> None:
    """Raise a ConfigError with a sentence for each value outside the bounds of its key. None is always inside."""
    problems = Problems()
    for name, key in keys_of(type(draft.config)).items():
        value = attrgetter(name)(draft.config)
        if key.bounds is not None and value is not None and not key.bounds.test(value):
            rule = f"{name} = {value!r} must be {key.bounds.words}, such as {key.works!r}"
            problems.add(ConfigError(rule))
    problems.raise_all()


def _checks(check: Callable[[JobConfig], None]) -> Step:
    """Return the step that runs a check of the configuration."""
    return lambda draft: check(draft.config)


def _model(draft: Draft) -> Draft:
    return replace(draft, model=resolve_model(draft.config, draft.missing, draft.folder))


def _degrees(draft: Draft) -> Draft:
    parallelism = draft.config.parallelism
    has_experts = draft.model is not None and experts_of(draft.model) is not None
    ep = parallelism.expert_parallel_degree if has_experts else None
    degrees = resolve_degrees(parallelism, draft.world_size, ep)
    return replace(draft, degrees=degrees)


def _effects(draft: Draft) -> Draft:
    """Return the draft with notes why configured keys have no effect.

    If the unmet condition of a key has a remedy, raise a ConfigError instead of a note.

    Without a model or degrees, which an earlier step refused, the draft is returned unchanged.
    """
    if draft.model is None or draft.degrees is None:
        return draft
    config = _with_windows_of_flavor(draft.config, draft.folder)
    # keys by their first condition that does not hold
    without_effect = {}
    for name, key in keys_of(type(config)).items():
        unmet = (each for each in key.when if not each.holds(config, draft.degrees))
        condition = next(unmet, None)
        if condition is not None and attrgetter(name)(config) != key.default:
            without_effect.setdefault(condition, []).append(name)
    notes = []
    for condition, names in without_effect.items():
        if condition.remedy:
            raise ConfigError(
                f"{_without_effect(condition, names[:1], config)}; {condition.remedy}"
            )
        notes.append(_without_effect(condition, names, config))
    return draft.noted(*notes)


def _without_effect(condition: Condition, names: list[str], config: JobConfig) -> str:
    listed = ", ".join(f"{name} = {shown(attrgetter(name)(config))}" for name in names)
    have = "has" if len(names) == 1 else "have"
    return f"{listed} {have} no effect {condition.otherwise.format(config)}"


def _batch(draft: Draft) -> None:
    check_batch(draft.config, draft.degrees)


def _tensor_parallel_sizes(draft: Draft) -> None:
    tp = draft.degrees.tp
    sizes = draft.model.tensor_parallel_sizes()
    common = math.gcd(*sizes.values())
    for kind, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {tp} must divide the {size} {kind} of model.flavor = "
                f"{draft.config.model.flavor!r}; degrees that fit this model: "
                f"{', '.join(map(str, divisors(common)))}"
            )


def _experts(draft: Draft) -> Draft:
    check_experts(draft.config, draft.model, draft.degrees)
    return draft.noted(*note_of_router(draft.model))


def _task(draft: Draft) -> Draft:
    return draft.noted(*draft.task.check(draft.config, draft.model, draft.degrees))


def _data(draft: Draft) -> None:
    problems = Problems(draft.missing)
    for check in () if draft.data_checked else draft.task.data_checks(draft.config):
        with problems.collected():
            check(draft.config)
    problems.raise_all()


def _weights(draft: Draft) -> None:
    if not draft.weights_checked:
        check_initial_weights(draft.config, draft.model, draft.folder)


def _checkpoint(draft: Draft) -> None:
    if not draft.weights_checked:
        check_checkpoint(draft.config, draft.model)


def _decisions(draft: Draft) -> Draft:
    decisions = draft.task.decide(draft.config, draft.model, draft.device_type, node=draft.node)
    return replace(draft, decisions=decisions)


def _compilation(draft: Draft) -> Draft:
    pipeline = draft.decisions.pipeline
    options = resolve_compilation(
        draft.config,
        fixed_shapes=draft.task.fixed_shapes,
        splits_backward=pipeline is not None and pipeline.splits_backward,
        planned_attention=draft.decisions.attention is not None,
    )
    return replace(draft, compilation=options)


def _activation_checkpoint(draft: Draft) -> Draft:
    if draft.compilation is None:
        return draft
    notes = check_activation_checkpoint(
        draft.config, draft.model, draft.compilation, draft.decisions.pipeline
    )
    return draft.noted(*notes)


def _with_windows_of_flavor(config: JobConfig, folder: ModelFolder | None) -> JobConfig:
    """Return the configuration with the flavor's window as a key, which other keys depend on.

    A window of the sequence length or more is not written, and no window replaces a configured one.
    """
    if config.model.sliding_window is not None or config.model.sliding_window_every != 1:
        return config
    args = flavor_args(config.model, folder)
    for window in windows_of(args) if config.task == "tokens" else ():
        if window is not None and window < config.training.seq_len:
            return replace(config, model=replace(config.model, sliding_window=window))
    return config


def _without_auto(draft: Draft) -> JobConfig:
    """Return the configuration with a decision in place of each "auto", except for kernels of single tiles."""
    config = draft.config
    device_type = draft.device_type
    attention = draft.decisions.attention
    training = config.training
    optimizer = config.optimizer
    parallelism = config.parallelism
    implementation = optimizer.implementation_on(device_type)
    if training.enable_cpu_offload and optimizer.implementation == "auto":
        # on CPUs too: one pass over weights, gradients and both moments
        implementation = "fused"
    if attention is not None and parallelism.context_parallel_degree > 1:
        parallelism = replace(
            parallelism,
            context_parallel_method=attention.method,
            context_parallel_load_balancer=attention.balancer,
        )
    return replace(
        config,
        job=replace(config.job, device=device_type),
        training=replace(training, mixed_precision_param=training.compute_dtype(device_type)),
        optimizer=replace(optimizer, implementation=implementation),
        parallelism=parallelism,
    )


STAGES: tuple[tuple[Step, ...], ...] = (
    (_write_out,),
    (_bounds,),
    (
        *map(
            _checks,
            (
                check_schedule,
                check_profiling,
                check_trackers,
                check_dump_folder,
                check_checkpoint_keys,
            ),
        ),
        _model,
        _degrees,
        _effects,
    ),
    (
        _batch,
        _tensor_parallel_sizes,
        _experts,
        *(partial(refuse_incompatible, key) for key in FIRST_KEYS),
        _task,
        _data,
        _weights,
        _checkpoint,
        _decisions,
        _compilation,
        _activation_checkpoint,
    ),
)
"""Steps in their order. The problems of one stage are reported together, before the next stage begins."""

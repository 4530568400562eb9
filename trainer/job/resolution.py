"""Make and check all decisions of a job before ranks start. Torch-free."""

import math
from dataclasses import replace
from operator import attrgetter

from longshard.context.planning.options import ContextParallelOptions
from trainer.config.errors import ConfigError, Problems
from trainer.config.keys import Condition, keys_of
from trainer.config.registry import Registry
from trainer.config.schema import JobConfig
from trainer.config.values import shown
from trainer.families.args import ModelArgs, experts_of
from trainer.families.registry import MODELS, flavor_args, from_path
from trainer.job.degrees import GPUS_OF_A_NODE, KEYS, Degrees, resolve_degrees
from trainer.job.experts import check_experts, note_of_router
from trainer.job.files import check_checkpoint, check_checkpoint_keys, check_dump_folder
from trainer.job.language import Language
from trainer.job.preferences import Preferences
from trainer.job.record import ResolvedJob, TaskDecisions, TaskSpec
from trainer.job.training import (
    adapters_by_adamw,
    check_batch,
    check_cpu_offload,
    check_early_update,
    check_profiling,
    check_schedule,
    check_trackers,
)
from trainer.job.transforms import (
    CompileOptions,
    check_activation_checkpoint,
    resolve_compilation,
)
from trainer.stores.folder import check_initial_weights

TASKS: Registry[TaskSpec] = Registry("task", {Language.name: Language()})
_OF_TOKENS: dict[str, TaskSpec] = {"preferences": Preferences()}
"""Data sets of tokens that are for a task of their own."""


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

    node: ranks on one node; None if nothing says it: then eight GPUs, or all ranks on CPUs.
    missing: takes the messages about files that are not on this machine, for a check of a job elsewhere; data_checked,
    weights_checked: another process of this machine has checked the data, or the files of weights and checkpoints.

    Raises:
        ConfigError: all wrong settings, a sentence each: the value, the rule, what would work. A check that counts on
            others, of bounds or of the degrees, comes after them.
    """
    config, of_adapters = adapters_by_adamw(from_path(config))
    problems = Problems(missing)
    _check_bounds(config, problems)
    problems.raise_all()
    _check_tables(config, problems)
    model, degrees, of_effects = _model_and_degrees(config, world_size, problems, missing)
    notes = of_adapters + of_effects
    task = task_of(config)
    _check_on_ranks(config, model, degrees, device_type, problems)
    notes += note_of_router(model)
    notes += tuple(problems.check(task.check, config, model, degrees) or ())
    _check_files(
        config, model, problems, data_checked=data_checked, weights_checked=weights_checked
    )
    node = node or (GPUS_OF_A_NODE if device_type == "cuda" else world_size)
    decisions = (
        problems.check(task.decide, config, model, device_type, node=node) or TaskDecisions()
    )
    compilation = problems.check(_compilation, config, task, decisions)
    if compilation is not None:
        notes += (
            problems.check(
                check_activation_checkpoint, config, model, compilation, decisions.pipeline
            )
            or ()
        )
    problems.raise_all()
    return ResolvedJob(
        given=config,
        config=_without_auto(config, device_type, decisions.attention),
        degrees=replace(degrees, cp_a2a=decisions.head_degree),
        device_type=device_type,
        node=node,
        task=task,
        model=model,
        compilation=compilation,
        notes=notes,
        **vars(decisions),
    )


def task_of(config: JobConfig) -> TaskSpec:
    """Return the task of a configuration."""
    return _OF_TOKENS.get(config.training.dataset) or TASKS[config.task]


def resolve_model(config: JobConfig, missing: list[str] | None = None) -> ModelArgs:
    """Return the arguments of the model that the configuration names, for its data. missing: see `resolve`.

    ConfigError if there is no such model, flavor or data, or the model is of another kind of data.
    """
    flavor = flavor_args(config.model)
    task = task_of(config)
    if flavor.task != task.name:
        other = TASKS[flavor.task]
        name = f"model.name = {config.model.name!r}"
        models = [
            repr(name)
            for name, family in MODELS.items()
            if next(iter(family.flavors.values())).task == task.name
        ]
        raise ConfigError(
            f"{name} is a model of {other.data}, and training.dataset = {config.training.dataset!r} is {task.data}; "
            f"use model.name = {' or '.join(models[:2])}, or other data"
        )
    return task.model(config, flavor, missing)


def on_device(job: ResolvedJob, device_type: str) -> ResolvedJob:
    """Return the job on this type of device, for which `auto` chooses again; ConfigError for a kernel that it lacks."""
    if device_type == job.device_type:
        return job
    checked = {"data_checked": True, "weights_checked": True}
    return resolve(job.given, job.degrees.world_size, device_type, node=job.node, **checked)


def _check_tables(config: JobConfig, problems: Problems) -> None:
    """Check tables of the configuration, each by itself."""
    for check in (
        check_schedule,
        check_profiling,
        check_trackers,
        check_dump_folder,
        check_checkpoint_keys,
    ):
        problems.check(check, config)


def _model_and_degrees(
    config: JobConfig, world_size: int, problems: Problems, missing: list[str] | None
) -> tuple[ModelArgs, Degrees, tuple[str, ...]]:
    """Return model, degrees, and a note for each key without effect.

    Raises:
        ConfigError: all problems so far, because later checks need both.
    """
    model = problems.check(resolve_model, config, missing)
    degrees = problems.check(_degrees, config, world_size, model)
    notes = None
    if model is not None and degrees is not None:
        notes = problems.check(_check_effects, _with_windows_of_flavor(config), degrees)
    problems.raise_all()
    return model, degrees, notes or ()


def _check_files(
    config: JobConfig,
    model: ModelArgs,
    problems: Problems,
    *,
    data_checked: bool,
    weights_checked: bool,
) -> None:
    """Check the files that the run reads; data_checked, weights_checked: see `resolve`."""
    for check in () if data_checked else task_of(config).data_checks(config):
        problems.check(check, config)
    if not weights_checked:
        problems.check(check_initial_weights, config, model)
        problems.check(check_checkpoint, config, model)


def _check_on_ranks(
    config: JobConfig, model: ModelArgs, degrees: Degrees, device_type: str, problems: Problems
) -> None:
    """Check batch, updates and model on this number of ranks."""
    problems.check(check_batch, config, degrees)
    problems.check(check_cpu_offload, config, degrees, device_type)
    problems.check(check_early_update, config, degrees)
    problems.check(_check_tensor_parallel_sizes, model, config.model.flavor, degrees)
    problems.check(check_experts, config, model, degrees)


def _compilation(config: JobConfig, task: TaskSpec, decisions: TaskDecisions) -> CompileOptions:
    return resolve_compilation(
        config,
        fixed_shapes=task.fixed_shapes,
        splits_backward=decisions.pipeline is not None and decisions.pipeline.splits_backward,
        planned_attention=decisions.attention is not None,
    )


def _degrees(config: JobConfig, world_size: int, model: ModelArgs | None) -> Degrees:
    has_experts = model is not None and experts_of(model) is not None
    ep = config.parallelism.expert_parallel_degree if has_experts else None
    given = {name: attrgetter(key)(config) for name, key in KEYS.items()}
    return resolve_degrees(**given, world_size=world_size, ep=ep)


def _with_windows_of_flavor(config: JobConfig) -> JobConfig:
    """Return the configuration with the flavor's window in words of keys, by which other keys may have an effect."""
    if config.model.sliding_window is not None or config.model.sliding_window_every != 1:
        return config
    args = flavor_args(config.model)
    windows = (
        [args.window_of_layer(layer) for layer in range(args.n_layers)]
        if config.task == "tokens"
        else []
    )
    shorter = [
        window for window in windows if window is not None and window < config.training.seq_len
    ]
    return (
        replace(config, model=replace(config.model, sliding_window=shorter[0]))
        if shorter
        else config
    )


def _check_tensor_parallel_sizes(args: ModelArgs, flavor: str, degrees: Degrees) -> None:
    sizes = args.tensor_parallel_sizes()
    common = math.gcd(*sizes.values())
    for what, size in sizes.items():
        if size % degrees.tp:
            fitting = [str(degree) for degree in range(1, common + 1) if common % degree == 0]
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {degrees.tp} must divide the {size} {what} of "
                f"model.flavor = {flavor!r}; degrees that fit this model: {', '.join(fitting)}"
            )


def _check_bounds(config: JobConfig, problems: Problems) -> None:
    for name, key in keys_of(type(config)).items():
        value = attrgetter(name)(config)
        with problems.collected():
            if key.bounds is not None and value is not None and not key.bounds.test(value):
                raise ConfigError(
                    f"{name} = {value!r} must be {key.bounds.words}, such as {key.works!r}"
                )


def _check_effects(config: JobConfig, degrees: Degrees) -> tuple[str, ...]:
    """Return one line for each reason why some keys that are set have no effect; a key with a remedy is refused."""
    notes = []
    # the first condition of a key that does not hold -> the keys
    found: dict[Condition, list[str]] = {}
    for name, key in keys_of(type(config)).items():
        missing = next(
            (condition for condition in key.when if not condition.holds(config, degrees)), None
        )
        if missing is not None and attrgetter(name)(config) != key.default:
            found.setdefault(missing, []).append(name)
    for missing, names in found.items():
        if missing.remedy:
            raise ConfigError(f"{_told(missing, names[:1], config)}; {missing.remedy}")
        notes.append(_told(missing, names, config))
    return tuple(notes)


def _told(missing: Condition, names: list[str], config: JobConfig) -> str:
    listed = ", ".join(f"{name} = {shown(attrgetter(name)(config))}" for name in names)
    return f"{listed} {'has' if len(names) == 1 else 'have'} no effect {missing.otherwise.format(config)}"


def _without_auto(
    config: JobConfig, device_type: str, attention: ContextParallelOptions | None
) -> JobConfig:
    """Return the configuration with decisions in the place of "auto", but for a kernel that each tile decides."""
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

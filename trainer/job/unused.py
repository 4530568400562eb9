"""Keys that have no effect under the other settings: one table says when each of them is in effect.

A key that is set (differs from its default) and has no effect is told in one line: the feature that it belongs to may
be switched off for one run. It is refused where the run would not do what the key asks for. Keys that are not in the
table are always in effect.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Parallelism
from trainer.config.values import shown
from trainer.job.attention import uses_planned_attention
from trainer.job.degrees import Degrees


@dataclass(frozen=True)
class Rule:
    """When some keys of one table are in effect.

    otherwise: the words after "has no effect", with `{0.table.key}` for values of the configuration; remedy: what would
    work. With a remedy the keys are refused, without one they are told.
    """

    table: str
    names: str
    in_effect: Callable[[JobConfig, Degrees], bool]
    otherwise: str
    remedy: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, as "table.key"."""
        return tuple(f"{self.table}.{name}" for name in self.names.split())


def check_unused(config: JobConfig, degrees: Degrees) -> None:
    """Check that no key is set that has no effect although the run needs it.

    Raises:
        ConfigError: the first such key, with what would work.
    """
    for rule, keys in _without_effect(config, degrees):
        if rule.remedy:
            raise ConfigError(f"{_told(rule, keys[:1], config)}; {rule.remedy}")


def unused_notes(config: JobConfig, degrees: Degrees) -> tuple[str, ...]:
    """Return one line for each reason why some keys that are set have no effect."""
    return tuple(_told(rule, keys, config) for rule, keys in _without_effect(config, degrees) if not rule.remedy)


def _without_effect(config: JobConfig, degrees: Degrees) -> Iterator[tuple[Rule, list[str]]]:
    """Rules with those of their keys that are set in vain; a key comes once, with the first rule."""
    seen: set[str] = set()
    for rule in RULES:
        keys = [key for key in rule.keys if key not in seen and attrgetter(key)(config) != attrgetter(key)(_DEFAULTS)]
        if keys and not rule.in_effect(config, degrees):
            seen.update(keys)
            yield rule, keys


def _told(rule: Rule, keys: list[str], config: JobConfig) -> str:
    values = ((key, attrgetter(key)(config)) for key in keys)
    listed = ", ".join(f"{key} = {shown(list(v) if isinstance(v, tuple) else v)}" for key, v in values)
    return f"{listed} {'has' if len(keys) == 1 else 'have'} no effect {rule.otherwise.format(config)}"


# ---- when keys are in effect

_DEFAULTS = JobConfig()
_OF_A_PIPELINE = " ".join(
    key.name
    for key in fields(Parallelism)
    if key.name.startswith("pipeline_") and key.name != "pipeline_parallel_degree"
)
_NOT_SHARDED = "where parameters are not sharded (data_parallel_shard_degree x context_parallel_degree = 1)"


def _decays(config: JobConfig, _: Degrees) -> bool:
    """Whether the learning rate falls within this run."""
    schedule, steps = config.lr_scheduler, config.training.steps
    total = schedule.total_steps or steps
    after_warmup = total - schedule.warmup_steps
    decay = after_warmup if schedule.decay_ratio is None else min(round(schedule.decay_ratio * total), after_warmup)
    return decay > 0 and total - decay < steps - 1


def _sharded(_: JobConfig, degrees: Degrees) -> bool:
    return degrees.dp_shard * degrees.cp > 1


RULES: tuple[Rule, ...] = (
    Rule(
        "profiling",
        "save_traces_folder profiler_active profiler_warmup",
        lambda config, _: config.profiling.enable_profiling,
        "without profiling.enable_profiling",
    ),
    Rule(
        "profiling",
        "profile_freq",
        lambda config, _: config.profiling.enable_profiling or config.profiling.enable_memory_snapshot,
        "without profiling.enable_profiling or profiling.enable_memory_snapshot",
    ),
    Rule(
        "profiling",
        "save_memory_snapshot_folder",
        lambda config, _: config.profiling.enable_memory_snapshot,
        "without profiling.enable_memory_snapshot",
    ),
    Rule(
        "metrics",
        "save_tb_folder",
        lambda config, _: config.metrics.enable_tensorboard,
        "without metrics.enable_tensorboard",
    ),
    Rule(
        "model",
        "sliding_window_every",
        lambda config, _: config.model.sliding_window is not None,
        "without model.sliding_window",
        "leave it out, or set a window, such as 4096",
    ),
    Rule(
        "model",
        "sliding_window sliding_window_every",
        lambda config, _: config.model.sliding_window is None or config.model.sliding_window < config.training.seq_len,
        "on rows of training.seq_len = {0.training.seq_len} tokens: the window covers the row",
    ),
    Rule(
        "lr_scheduler",
        "total_steps decay_ratio decay_type min_lr_factor",
        lambda config, _: config.training.steps > config.lr_scheduler.warmup_steps,
        "as all training.steps = {0.training.steps} belong to the warm-up",
    ),
    Rule(
        "lr_scheduler",
        "decay_type min_lr_factor",
        _decays,
        "as the learning rate does not decay within training.steps = {0.training.steps}",
    ),
    Rule(
        "training",
        "mixed_precision_reduce",
        lambda config, _: config.training.dtype != "float64",
        "with training.dtype = 'float64', whose gradients are reduced in float64",
    ),
    Rule(
        "training",
        "mixed_precision_reduce",
        lambda _, degrees: degrees.dp * degrees.cp > 1,
        "where gradients are not reduced (data-parallel degree x context_parallel_degree = 1)",
    ),
    Rule(
        "parallelism",
        "context_parallel_method context_parallel_load_balancer context_parallel_heads_per_pass "
        "context_parallel_hybrid_degrees",
        lambda _, degrees: degrees.cp > 1,
        "with parallelism.context_parallel_degree = 1",
    ),
    Rule(
        "parallelism",
        "context_parallel_hybrid_degrees",
        lambda config, _: config.parallelism.context_parallel_method == "hybrid",
        "with parallelism.context_parallel_method = {0.parallelism.context_parallel_method!r}",
    ),
    Rule(
        "parallelism",
        "context_parallel_heads_per_pass",
        lambda config, _: config.parallelism.context_parallel_method != "ring",
        "with parallelism.context_parallel_method = 'ring', where all heads travel together",
        "leave it out, or use 'all_gather' or 'all_to_all'",
    ),
    Rule(
        "parallelism",
        "context_parallel_kernel",
        lambda config, _: uses_planned_attention(config),
        "on plain causal attention: it is for context parallelism, packed documents, sliding windows and sinks",
    ),
    Rule(
        "parallelism",
        _OF_A_PIPELINE,
        lambda _, degrees: degrees.pp > 1,
        "with parallelism.pipeline_parallel_degree = 1",
    ),
    Rule(
        "parallelism",
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers",
        lambda config, _: (
            not (config.parallelism.pipeline_parallel_module_fqns or config.parallelism.pipeline_parallel_split_points)
        ),
        "beside pipeline_parallel_module_fqns or pipeline_parallel_split_points, which say where stages begin",
    ),
    Rule(
        "parallelism", "fsdp_reshard_after_forward fsdp_forward_prefetch fsdp_backward_prefetch", _sharded, _NOT_SHARDED
    ),
    Rule(
        "parallelism",
        "fsdp_backward_prefetch",
        lambda config, _: config.parallelism.fsdp_reshard_after_forward != "never",
        "where the backward finds all parameters gathered (fsdp_reshard_after_forward = 'never')",
        "leave it out, or use 'always'",
    ),
    Rule(
        "parallelism",
        "fsdp_backward_prefetch",
        lambda config, degrees: degrees.pp == 1 or config.parallelism.fsdp_reshard_after_forward == "always",
        "where the backward finds all parameters gathered (fsdp_reshard_after_forward = 'default' with a pipeline)",
        "leave it out, or use 'always'",
    ),
    Rule(
        "parallelism",
        "enable_async_tensor_parallel disable_loss_parallel",
        lambda _, degrees: degrees.tp > 1,
        "with parallelism.tensor_parallel_degree = 1",
    ),
    Rule(
        "checkpoint",
        "load_step",
        lambda config, _: config.checkpoint.enable,
        "without checkpoint.enable",
        "switch it on, or leave the step out",
    ),
    Rule(
        "checkpoint",
        "folder interval keep_latest_k async_mode",
        lambda config, _: config.checkpoint.enable,
        "without checkpoint.enable",
    ),
    Rule(
        "activation_checkpoint",
        "selective_ac_option",
        lambda config, _: config.activation_checkpoint.mode == "selective",
        "with activation_checkpoint.mode = {0.activation_checkpoint.mode!r}",
    ),
    Rule(
        "activation_checkpoint",
        "memory_budget",
        lambda config, _: config.activation_checkpoint.mode == "memory_budget",
        "with activation_checkpoint.mode = {0.activation_checkpoint.mode!r}",
    ),
    Rule("compile", "components backend", lambda config, _: config.compile.enable, "without compile.enable"),
    Rule(
        "float8",
        "recipe_name enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp filter_fqns emulate",
        lambda config, _: config.float8.enable,
        "without float8.enable",
    ),
    Rule(
        "float8",
        "precompute_float8_dynamic_scale_for_fsdp",
        lambda config, _: config.float8.enable_fsdp_float8_all_gather,
        "without float8.enable_fsdp_float8_all_gather",
    ),
    Rule(
        "float8",
        "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp",
        _sharded,
        _NOT_SHARDED,
    ),
    Rule(
        "float8",
        "precompute_float8_dynamic_scale_for_fsdp",
        lambda config, _: not config.training.enable_cpu_offload,
        "with training.enable_cpu_offload, which copies weights to the GPU without the scales found for them",
    ),
    Rule(
        "comm",
        "init_timeout_seconds train_timeout_seconds checkpoint_timeout_seconds trace_buf_size save_traces_folder",
        lambda _, degrees: degrees.world_size > 1,
        "on one rank",
    ),
    Rule(
        "comm", "check_consistency", lambda _, degrees: degrees.cp > 1, "with parallelism.context_parallel_degree = 1"
    ),
    Rule("comm", "checkpoint_timeout_seconds", lambda config, _: config.checkpoint.enable, "without checkpoint.enable"),
    Rule(
        "comm", "save_traces_folder", lambda config, _: config.comm.trace_buf_size > 0, "with comm.trace_buf_size = 0"
    ),
)

"""Every check of a configuration that needs no process group and no torch: numbers, degrees, shapes, files, data.

`validate` stops at the first thing that cannot work, with one sentence: the value, the rule, what would work.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from trainer.config.degrees import Degrees, resolve_degrees
from trainer.config.errors import ConfigError
from trainer.config.float8 import check_float8
from trainer.config.schema import JobConfig
from trainer.config.unused import check_unused
from trainer.models.llama3.args import TransformerArgs
from trainer.models.registry import model_args


def validate(config: JobConfig, world_size: int) -> Degrees:
    """Check everything that can be checked before ranks are started, for `world_size` of them.

    Raises:
        ConfigError: the first setting that cannot work.
    """
    # At call time: reading a configuration does not need the data modules.
    from trainer.data.datasets import check_source
    from trainer.data.tokenizer import vocab_size_of

    _check_numbers(config)
    _check_schedule(config)
    _check_profiling(config)
    _check_dump_folder(config.job.dump_folder)
    parallelism = config.parallelism
    degrees = resolve_degrees(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        world_size=world_size,
    )
    check_unused(config, degrees)
    _check_batch(config, degrees)
    # The model's name first: with a wrong one, the tokenizer is not what the user has to look at.
    model_args(config.model, vocab_size=1, max_seq_len=config.training.seq_len)
    if config.model.tokenizer_path == "":
        raise ConfigError("model.tokenizer_path = '' must name a file; leave it out for the shipped tokenizer")
    vocab_size = vocab_size_of(config.model.tokenizer_file)
    shape = model_args(config.model, vocab_size=vocab_size, max_seq_len=config.training.seq_len)
    check_shape(shape, config.model.flavor, degrees)
    _check_pipeline(config, shape)
    degrees = _check_attention(config, shape, degrees)
    check_float8(config, shape, degrees)
    _check_activation_checkpoint(config, shape.n_layers)
    _check_compile(config)
    check_source(config.training.dataset, config.training.dataset_path, config.training.data_streams)
    _check_checkpoint(config, shape)
    return degrees


# ---- numbers


@dataclass(frozen=True)
class _Range:
    """The values a number may take, in words, with one that works where the default is None."""

    test: Callable[[float], bool]
    words: str
    example: float | None = None


_POSITIVE = _Range(lambda x: 0 < x < math.inf, "above 0")
_NOT_NEGATIVE = _Range(lambda x: 0 <= x < math.inf, "at least 0")
_AT_LEAST_ONE = _Range(lambda x: 1 <= x < math.inf, "at least 1", 1)
_SHARE = _Range(lambda x: 0 <= x <= 1, "in [0, 1]", 0.2)
_DECAY = _Range(lambda x: 0 <= x < 1, "in [0, 1)")
_SECONDS = _Range(lambda x: 1 <= x <= 10**8, "in [1, 100000000]")

_RANGES: dict[str, _Range] = {
    "job.max_minutes": _Range(_POSITIVE.test, _POSITIVE.words, 60.0),
    "profiling.profile_freq": _AT_LEAST_ONE,
    "profiling.profiler_active": _AT_LEAST_ONE,
    "profiling.profiler_warmup": _NOT_NEGATIVE,
    "metrics.log_freq": _AT_LEAST_ONE,
    "model.sliding_window": _Range(_AT_LEAST_ONE.test, _AT_LEAST_ONE.words, 4096),
    "model.sliding_window_every": _AT_LEAST_ONE,
    "model.rope_theta": _Range(_POSITIVE.test, _POSITIVE.words, 500000.0),
    "model.rope_scaling": _Range(_AT_LEAST_ONE.test, "at least 1 (1.0: no scaling)", 8.0),
    "optimizer.lr": _POSITIVE,
    "optimizer.beta1": _DECAY,
    "optimizer.beta2": _DECAY,
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "lr_scheduler.warmup_steps": _NOT_NEGATIVE,
    "lr_scheduler.total_steps": _Range(_AT_LEAST_ONE.test, _AT_LEAST_ONE.words, 10000),
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "training.local_batch_size": _AT_LEAST_ONE,
    "training.seq_len": _AT_LEAST_ONE,
    "training.max_norm": _POSITIVE,
    "training.steps": _AT_LEAST_ONE,
    "training.gc_freq": _AT_LEAST_ONE,
    "training.seed": _Range(lambda x: 0 <= x < 2**63, "in [0, 2**63)"),
    "training.data_streams": _AT_LEAST_ONE,
    "parallelism.pipeline_parallel_microbatch_size": _AT_LEAST_ONE,
    "parallelism.pipeline_parallel_microbatches": _Range(_AT_LEAST_ONE.test, _AT_LEAST_ONE.words, 8),
    "parallelism.pipeline_parallel_layers_per_stage": _Range(_AT_LEAST_ONE.test, _AT_LEAST_ONE.words, 2),
    "parallelism.pipeline_parallel_first_stage_less_layers": _NOT_NEGATIVE,
    "parallelism.pipeline_parallel_last_stage_less_layers": _NOT_NEGATIVE,
    "parallelism.fsdp_forward_prefetch": _NOT_NEGATIVE,
    "parallelism.fsdp_backward_prefetch": _NOT_NEGATIVE,
    "activation_checkpoint.memory_budget": _Range(lambda x: 0 < x < 1, "in (0, 1)"),
    "parallelism.context_parallel_heads_per_pass": _Range(_NOT_NEGATIVE.test, "at least 0 (0: all)"),
    "checkpoint.interval": _AT_LEAST_ONE,
    "checkpoint.keep_latest_k": _Range(_NOT_NEGATIVE.test, "at least 0 (0: keep all)"),
    "checkpoint.stop_timeout_seconds": _SECONDS,
    "comm.init_timeout_seconds": _SECONDS,
    "comm.train_timeout_seconds": _SECONDS,
    "comm.checkpoint_timeout_seconds": _SECONDS,
    "comm.trace_buf_size": _NOT_NEGATIVE,
}


def _check_numbers(config: JobConfig) -> None:
    for key, allowed in _RANGES.items():
        value, default = attrgetter(key)(config), attrgetter(key)(JobConfig())
        if value is not None and not allowed.test(value):
            works = allowed.example if default is None else default
            raise ConfigError(f"{key} = {value!r} must be {allowed.words}, such as {works!r}")


def _check_schedule(config: JobConfig) -> None:
    schedule, steps = config.lr_scheduler, config.training.steps
    total, total_key = schedule.total_steps, "lr_scheduler.total_steps"
    if total is None:
        if schedule.warmup_steps >= steps:
            return  # a few steps of a longer schedule: they all warm up
        total, total_key = steps, "training.steps"
    if schedule.warmup_steps > total:
        raise ConfigError(
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} must not be more than {total_key} = {total}; "
            f"lower it to {total // 10}, say, or raise the total"
        )
    decay = total - schedule.warmup_steps if schedule.decay_ratio is None else round(schedule.decay_ratio * total)
    if schedule.warmup_steps + decay > total:
        raise ConfigError(
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio} of {total_key} = {total} begins before the end of "
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps}; use a ratio of at most "
            f"{math.floor(100 * (total - schedule.warmup_steps) / total) / 100}"
        )
    if total < steps and decay and schedule.min_lr_factor == 0:
        raise ConfigError(
            f"lr_scheduler.total_steps = {total} leaves a learning rate of 0 for the rest of training.steps = {steps}; "
            f"use at least {steps}, or an lr_scheduler.min_lr_factor above 0, such as 0.1"
        )


def _check_profiling(config: JobConfig) -> None:
    profiling, steps = config.profiling, config.training.steps
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        raise ConfigError(
            f"profiling.profile_freq = {profiling.profile_freq} is less than profiling.profiler_warmup = "
            f"{profiling.profiler_warmup} + profiling.profiler_active = {profiling.profiler_active}; "
            f"use at least {cycle}"
        )
    if (profiling.enable_profiling or profiling.enable_memory_snapshot) and profiling.profile_freq > steps:
        raise ConfigError(
            f"profiling.profile_freq = {profiling.profile_freq} is more than training.steps = {steps}, so that nothing "
            f"would be written; use at most {steps}"
        )


# ---- batch and shape against the degrees


def _check_batch(config: JobConfig, degrees: Degrees) -> None:
    training = config.training
    micro_batch = training.local_batch_size * degrees.dp
    factors = f"training.local_batch_size = {training.local_batch_size} x data-parallel degree {degrees.dp}"
    if training.global_batch_size != -1 and (
        training.global_batch_size < 1 or training.global_batch_size % micro_batch
    ):
        raise ConfigError(
            f"training.global_batch_size = {training.global_batch_size} must be a multiple of {factors} = "
            f"{micro_batch}; use {_nearest_multiples(training.global_batch_size, micro_batch)} or -1 (that product)"
        )
    if training.data_streams % degrees.dp:
        raise ConfigError(
            f"training.data_streams = {training.data_streams} must be a multiple of the data-parallel degree "
            f"{degrees.dp} (replicas x shards); use {_nearest_multiples(training.data_streams, degrees.dp)}"
        )
    if training.seq_len % degrees.tp:
        raise ConfigError(
            f"training.seq_len = {training.seq_len} must be a multiple of parallelism.tensor_parallel_degree = "
            f"{degrees.tp}; use {_nearest_multiples(training.seq_len, degrees.tp)}"
        )
    if training.seq_len < degrees.cp * degrees.tp:
        per_rank = f" x parallelism.tensor_parallel_degree = {degrees.tp}" if degrees.tp > 1 else ""
        raise ConfigError(
            f"training.seq_len = {training.seq_len} gives some of parallelism.context_parallel_degree = "
            f"{degrees.cp}{per_rank} ranks no token; use a length of at least {degrees.cp * degrees.tp}, or fewer ranks"
        )


def _check_attention(config: JobConfig, shape: TransformerArgs, degrees: Degrees) -> Degrees:
    """Method, heads and kernel of attention that runs by a plan; the degrees with those of the method."""
    from trainer.distributed.context_parallel.configure import attention_options, with_head_degree
    from trainer.distributed.context_parallel.lowering import able_kernels

    # Device and data type are known to the ranks only.
    able_kernels(
        config.parallelism.context_parallel_kernel,
        None,
        None,
        shape.head_dim,
        bands=config.model.sliding_window is not None,
    )
    options, _ = attention_options(config, shape)
    return with_head_degree(degrees, options)


def check_shape(args: TransformerArgs, flavor: str, degrees: Degrees) -> None:
    """Check that tensor parallelism can cut a model of this shape.

    Raises:
        ConfigError: heads, feed-forward width or vocabulary that the degree does not divide.
    """
    sizes = {
        "attention heads": args.n_heads,
        "key/value heads": args.n_kv_heads,
        "feed-forward channels": args.ffn_hidden_dim,
        "tokens in the vocabulary": args.vocab_size,
    }
    common = math.gcd(*sizes.values())
    for what, size in sizes.items():
        if size % degrees.tp:
            fitting = [str(degree) for degree in range(1, common + 1) if common % degree == 0]
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {degrees.tp} must divide the {size} {what} of "
                f"model.flavor = {flavor!r}; degrees that fit this model: {', '.join(fitting)}"
            )


def _check_pipeline(config: JobConfig, shape: TransformerArgs) -> None:
    from trainer.distributed.pipeline_stages import pipeline_plan

    degree = config.parallelism.pipeline_parallel_degree
    if degree > 1 and shape.tie_embeddings:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {degree} puts embedding and output on different stages, and "
            f"model.flavor = {config.model.flavor!r} has one matrix for both; use 1, with context, tensor or data "
            f"parallelism in its place"
        )
    plan = pipeline_plan(config, shape.module_names())
    if plan is None:
        return
    if ("norm",) in plan.stages and shape.norm_type == "np_layernorm":
        raise ConfigError(
            "a pipeline stage of 'norm' alone has no parameters with model.norm_type = 'np_layernorm'; put it together "
            "with the output"
        )
    if not plan.splits_backward:
        return
    whole = "a file without I and W" if plan.csv else "the schedule 'Interleaved1F1B'"
    if config.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"parallelism.fsdp_reshard_after_forward = 'always' would free the parameters that the second half of a "
            f"split backward needs, and {plan.schedule} splits it; use 'default', or {whole}"
        )
    mode = config.activation_checkpoint.mode
    if mode != "none" and not _divides_by_compiler(config):
        raise ConfigError(
            f"activation_checkpoint.mode = {mode!r} would compute a layer again for each group of its weights, about "
            f"ten times, as {plan.schedule} splits the backward; use 'none', compile.enable, or {whole}"
        )


def _check_activation_checkpoint(config: JobConfig, n_layers: int) -> None:
    option = config.activation_checkpoint.selective_ac_option
    number = int(option) if option.isdecimal() else 0
    largest = n_layers if config.activation_checkpoint.mode == "selective" else math.inf
    if option != "op" and not 1 <= number <= largest:
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option = {option!r} must be 'op', or for every n-th layer a number "
            f"from 1 to {n_layers}, the layers of model.flavor = {config.model.flavor!r}, such as '2'"
        )

    activations = config.activation_checkpoint
    if activations.mode == "memory_budget" and not _divides_by_compiler(config):
        raise ConfigError(
            "activation_checkpoint.mode = 'memory_budget' leaves the choice to the compiler; set compile.enable with "
            "'model' in compile.components and a backend other than 'eager', or use the mode 'selective'"
        )


def _compiles_model(config: JobConfig) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _divides_by_compiler(config: JobConfig) -> bool:
    """Whether the compiler says what of a layer the backward computes again."""
    return _compiles_model(config) and config.compile.backend != "eager"


def _check_compile(config: JobConfig) -> None:
    settings = config.compile
    if not settings.components:
        raise ConfigError("compile.components = [] compiles nothing; name 'model' or 'loss', or leave it out")
    if config.parallelism.overlaps_tensor_parallel and not (_compiles_model(config) and settings.backend == "inductor"):
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true is the compiler's work; set compile.enable with 'model' "
            "in compile.components and compile.backend = 'inductor', or leave it out"
        )


def _nearest_multiples(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below > 0 else str(factor)


def _check_checkpoint(config: JobConfig, shape: TransformerArgs) -> None:
    """The settings, and as much as can be seen of the checkpoint that the run would go on from."""
    from trainer.components.checkpoint_folder import (
        check_fits,
        checkpoint_folder,
        read_state,
        step_to_load,
    )

    settings = config.checkpoint
    if settings.load_step != -1 and settings.load_step < 1:
        raise ConfigError(f"checkpoint.load_step = {settings.load_step} must be a saved step, or -1 for the latest")
    if not settings.enable:
        return
    if not settings.folder:
        raise ConfigError("checkpoint.folder = '' must name a folder inside job.dump_folder, such as 'checkpoint'")
    step = step_to_load(config)
    if step is not None:
        check_fits(read_state(checkpoint_folder(config), step), config, shape)


def _check_dump_folder(folder: str) -> None:
    """The folder can be made and written to: its nearest existing part is a writable folder."""
    if not folder:
        raise ConfigError("job.dump_folder = '' must name a folder, such as './outputs'")
    path = Path(folder).absolute()
    existing = next(part for part in (path, *path.parents) if os.path.lexists(part))
    if not existing.is_dir():
        what = "a file" if existing.exists() else "a broken link"
        raise ConfigError(f"job.dump_folder = {folder!r}: {existing} is {what}; name a folder, such as './outputs'")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"job.dump_folder = {folder!r}: {existing} is not writable for this user; "
            f"name a folder that is, such as './outputs'"
        )

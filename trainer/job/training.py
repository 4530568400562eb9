"""Check the schedule of rates, the profiler, the batch against the degrees, and sequences in chunks."""

import math
from dataclasses import replace
from importlib.util import find_spec

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.job.degrees import Degrees

BALANCE_GROWTH = 1.25
"""Largest balanced micro-batch, as a multiple of local_batch_size x seq_len."""


def check_schedule(config: JobConfig) -> None:
    """Check that warm-up and decay fit the length of the schedule and of the run.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: They do not fit.
    """
    schedule = config.lr_scheduler
    start = schedule.restart_step
    last = config.training.steps
    steps = last - start
    total_key = "lr_scheduler.total_steps"
    total = schedule.length(last)
    if start and min(steps, total) < 1:
        raise ConfigError(
            f"lr_scheduler.restart_step = {start} leaves the schedule no step of training.steps = "
            f"{last}; raise these and total_steps, or name the last step of the run that is continued"
        )
    if schedule.total_steps is None:
        if schedule.warmup_steps >= steps:
            return  # a few steps of a longer schedule, all in the warm-up
        total_key = "training.steps"
    total_key += " less lr_scheduler.restart_step" * (start > 0)
    if schedule.warmup_steps > total:
        raise ConfigError(
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} must not be more than {total_key} = {total}; "
            f"lower it to {total // 10}, say, or raise the total"
        )
    if round((schedule.decay_ratio or 0) * total) > total - schedule.warmup_steps:
        raise ConfigError(
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio} of {total_key} = {total} begins before the end of "
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps}; use a ratio of at most "
            f"{math.floor(100 * (total - schedule.warmup_steps) / total) / 100}"
        )
    if total < steps and schedule.decay_steps(total) and schedule.min_lr_factor == 0:
        raise ConfigError(
            f"lr_scheduler.total_steps = {schedule.total_steps} leaves a learning rate of 0 for the rest of "
            f"training.steps = {last}; use at least {config.training.steps}, or an "
            "lr_scheduler.min_lr_factor above 0, such as 0.1"
        )


def adapters_by_adamw(config: JobConfig) -> tuple[JobConfig, tuple[str, ...]]:
    """Return the configuration with AdamW in place of Muon, if adapters are trained; else return it unchanged.

    Args:
        config: The configuration of the run.

    Returns:
        The configuration, and a note if the optimizer has changed, else ().
    """
    if not (config.optimizer.name == "Muon" and config.lora.rank):
        return config, ()
    note = f"optimizer.name = 'Muon' is for whole matrices: AdamW updates adapters (lora.rank = {config.lora.rank})"
    return replace(config, optimizer=replace(config.optimizer, name="AdamW")), (note,)


def check_trackers(config: JobConfig) -> None:
    """Check that the package of a tracker that is on is installed. It is not imported.

    Args:
        config: The configuration of the run.

    Raises:
        MissingFile: It is not.
    """
    if config.metrics.enable_wandb and find_spec("wandb") is None:
        raise MissingFile(
            "metrics.enable_wandb = true needs the package wandb: pip install wandb, or leave it out and use "
            "metrics.enable_tensorboard"
        )


def check_profiling(config: JobConfig) -> None:
    """Check that the profiler's cycle fits its interval, and that the interval fits the run.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: They do not fit.
    """
    profiling = config.profiling
    steps = config.training.steps
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        raise ConfigError(
            f"profiling.profile_freq = {profiling.profile_freq} is less than profiling.profiler_warmup = "
            f"{profiling.profiler_warmup} + profiling.profiler_active = {profiling.profiler_active}; "
            f"use at least {cycle}"
        )
    if (
        profiling.enable_profiling or profiling.enable_memory_snapshot
    ) and profiling.profile_freq > steps:
        raise ConfigError(
            f"profiling.profile_freq = {profiling.profile_freq} is more than training.steps = {steps}, so that nothing "
            f"would be written; use at most {steps}"
        )


def check_batch(
    config: JobConfig, degrees: Degrees, *, length_key: str = "training.seq_len"
) -> None:
    """Check that the batch and the sequence length fit the ranks.

    The global batch must be a multiple of one micro-batch of all data-parallel ranks. The length must be a multiple of
    the tensor-parallel degree, and give each rank a token.

    Args:
        config: The configuration of the run.
        degrees: The degrees of parallelism.
        length_key: The key of the length, for messages.

    Raises:
        ConfigError: They do not fit.
    """
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
    if training.seq_len % degrees.tp:
        raise ConfigError(
            f"{length_key} = {training.seq_len} must be a multiple of parallelism.tensor_parallel_degree = "
            f"{degrees.tp}; use {_nearest_multiples(training.seq_len, degrees.tp)}"
        )
    if training.seq_len < degrees.cp * degrees.tp:
        per_rank = (
            f" x parallelism.tensor_parallel_degree = {degrees.tp}" if degrees.tp > 1 else ""
        )
        raise ConfigError(
            f"{length_key} = {training.seq_len} gives some of parallelism.context_parallel_degree = "
            f"{degrees.cp}{per_rank} ranks no token; use a length of at least {degrees.cp * degrees.tp}, or fewer ranks"
        )


def check_chunks(config: JobConfig, degrees: Degrees) -> None:
    """Check that there are at most as many chunks as tokens of a whole sequence per tensor-parallel rank.

    Args:
        config: The configuration of the run.
        degrees: The degrees of parallelism.

    Raises:
        ConfigError: There are more chunks.
    """
    chunks = config.training.sequence_chunks
    tp = degrees.tp
    most = config.training.seq_len // tp
    if chunks > max(most, 1):
        per_rank = f" / parallelism.tensor_parallel_degree = {tp}" if tp > 1 else ""
        raise ConfigError(
            f"training.sequence_chunks = {chunks} is more than training.seq_len = {config.training.seq_len}{per_rank}; "
            f"use at most {most}"
        )


def _nearest_multiples(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below > 0 else str(factor)

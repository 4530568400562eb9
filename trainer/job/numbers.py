"""The values that each number may take by itself."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig


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


def check_numbers(config: JobConfig) -> None:
    for key, allowed in _RANGES.items():
        value, default = attrgetter(key)(config), attrgetter(key)(JobConfig())
        if value is not None and not allowed.test(value):
            works = allowed.example if default is None else default
            raise ConfigError(f"{key} = {value!r} must be {allowed.words}, such as {works!r}")

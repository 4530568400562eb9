"""The learning rate: warm-up, stable, decay (WSD, arXiv 2404.06395)."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from trainer.config.errors import SharedConfigError
from trainer.config.optimizer import LRScheduler


def lr_factor(step: int, config: LRScheduler, total_steps: int) -> float:
    """Return the share of the peak learning rate for a step.

    The share rises linearly over `warmup_steps` (and is above 0 in the first step), then stays at 1. Over the last
    `decay_ratio` of the run it falls to `min_lr_factor`; by default it falls from the end of the warm-up on.

    Args:
        step: Number of the step, counted from 0 at the start of the schedule.
        config: Table `[lr_scheduler]`.
        total_steps: Steps of the schedule.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    decay_steps = config.decay_steps(total_steps)
    into_decay = step - (total_steps - decay_steps)
    if into_decay <= 0:
        return 1.0
    left = {
        "linear": lambda x: 1.0 - x,
        "sqrt": lambda x: 1.0 - math.sqrt(x),
        "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    }[config.decay_type](min(into_decay / decay_steps, 1.0))
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * left


def build_lr_scheduler(
    optimizer: torch.optim.Optimizer, config: LRScheduler, steps: int
) -> LambdaLR:
    """Return the schedule of `optimizer` over `total_steps`, by default the `steps` of the run.

    The schedule starts after `restart_step`; steps before it have the rate of its first step.

    Args:
        optimizer: The optimizer.
        config: Table `[lr_scheduler]`.
        steps: Steps of the run.
    """
    total_steps = config.length(steps)
    start = config.restart_step
    return LambdaLR(
        optimizer, lambda step: lr_factor(max(step - start, 0), config, total_steps)
    )


def scheduled_rate(scheduler: LambdaLR, peak: float) -> float:
    """Return the learning rate of the next step, before rules for single parameters: the same on all ranks.

    Groups of parameters may have other rates, and pipeline stages have other groups.

    Args:
        scheduler: The schedule.
        peak: `optimizer.lr`.
    """
    return peak * scheduler.lr_lambdas[0](scheduler.last_epoch)


def restart_lr_scheduler(scheduler: LambdaLR, steps: int) -> None:
    """Set `scheduler` and the learning rates of its optimizer to their values after `steps` steps of this schedule.

    Args:
        scheduler: The schedule, changed in place.
        steps: Number of finished steps.
    """
    lrs = [
        lr * factor(steps)
        for lr, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, lr in zip(scheduler.optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
    place = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": lrs}
    scheduler.load_state_dict(scheduler.state_dict() | place)


def check_restart(config: LRScheduler, step: int) -> None:
    """Check that a run that continues after `step` is in the schedule.

    Args:
        config: Table `[lr_scheduler]`.
        step: The last finished step.

    Raises:
        SharedConfigError: The schedule starts later.
    """
    if step < config.restart_step:
        raise SharedConfigError(
            f"lr_scheduler.restart_step = {config.restart_step} is after step {step}, where this run continues; use "
            f"at most {step}, the last step of the schedule before"
        )

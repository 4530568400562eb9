"""Learning-rate schedule: warm-up, stable, decay (WSD, arXiv 2404.06395)."""

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from trainer.config.schema import LRScheduler


def lr_factor(step: int, config: LRScheduler, total_steps: int) -> float:
    """Return the share of the peak learning rate for optimizer step `step`, counted from 0.

    It rises linearly over `warmup_steps` (and is above 0 in the first step), stays at 1, and falls to `min_lr_factor`
    over the last `decay_ratio` of the run, by default from the end of the warm-up on.
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


def build_lr_scheduler(optimizer: torch.optim.Optimizer, config: LRScheduler, steps: int) -> LambdaLR:
    """Return the schedule of `optimizer` over `total_steps`, by default the `steps` of the run."""
    total_steps = config.total_steps or steps
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps))


def restart_lr_scheduler(scheduler: LambdaLR, steps: int) -> None:
    """Set `scheduler` and the learning rates of its optimizer to their values after `steps` steps of this schedule."""
    lrs = [lr * factor(steps) for lr, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, lr in zip(scheduler.optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
    place = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": lrs}
    scheduler.load_state_dict(scheduler.state_dict() | place)

"""The trainer without data, and stand-ins for values that the host would read from the device."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from lct_planner import stand_ins
from lct_planner.device import Gpu
from longshard.context.execution.kernels import cuda
from longshard.context.execution.kernels.choose import GPU_KERNELS, GpuKernels
from longshard.context.execution.kernels.flash import usable
from longshard.context.planning.capabilities import FlashPackage
from longshard.sharding import placement
from trainer.components.metrics import MetricsLogger
from trainer.components.optimizer import build_optimizer
from trainer.components.step_outcome import StepTotals
from trainer.models.experts import Experts
from trainer.parallel.expert_parallel import DispatchPlan, Routing
from trainer.tasks.language import LanguageTask
from trainer.tasks.task import Batch, Task
from trainer.trainer import Trainer

DOCUMENTS = 40  # of a sequence


class _Loader:
    """Batches of zeros, with documents of random lengths that differ from batch to batch."""

    epoch = 0.0

    def __init__(self, task: LanguageTask) -> None:
        self._task = task

    def __iter__(self) -> Iterator[Batch]:
        training = self._task.config.training
        planner = self._task.batch_planner
        shape = training.local_batch_size, training.seq_len
        numbers = np.random.default_rng(0)
        while True:
            ids = np.sort(numbers.integers(0, DOCUMENTS, shape), axis=1)
            batch = {
                name: torch.zeros(shape, dtype=torch.int64)
                for name in ("tokens", "labels", "positions")
            }
            batch["document_ids"] = torch.from_numpy(ids)
            if planner is not None:
                batch["plan"] = planner({"document_ids": ids})
            yield batch

    def state_dict(self) -> dict:
        return {}


class EvenRouting(Routing):
    """The routing in which all experts have the same number of tokens."""

    def plan(self, chosen: Tensor, experts: int, group: Any) -> DispatchPlan:
        """Return a plan in which all ranks and experts get the same number of tokens.

        Args:
            chosen: (N, k), int64.
            experts: Number of experts of each rank.
            group: The ranks that divide the experts.
        """
        tokens, k = chosen.shape
        ranks = group.size()
        each = max(tokens * min(k, ranks) // ranks, 1)
        places = torch.zeros(each * ranks, dtype=torch.int64, device=chosen.device)
        pairs = (tokens * k // experts,) * experts
        to_each = (each,) * ranks
        return DispatchPlan(tokens, places, places, to_each, to_each, pairs, group)

    def pairs(self, owner: Tensor, experts: int) -> list[int]:
        """Return the number of pairs of each expert; the numbers differ by at most one.

        Args:
            owner: The expert of each pair, (pairs,).
            experts: Number of experts.
        """
        ends = [len(owner) * i // experts for i in range(experts + 1)]
        return [end - begin for begin, end in itertools.pairwise(ends)]


class _Metrics(MetricsLogger):
    """Logs no step."""

    def due(self, step: int) -> bool:
        return False


class TracedTrainer(Trainer):
    """The trainer of one rank, which reads no data and no values of the device."""

    built_parts: Sequence[nn.Module] = ()
    """The model parts, and the copies of them that a task has built as a reference."""

    def build_task(self) -> Task:
        """Return the task. A task of text gets batches of zeros instead of data."""
        task = super().build_task()
        if isinstance(task, LanguageTask):
            task.build_loader = partial(_Loader, task)
        return task

    def build_model_parts(self) -> list[nn.Module]:
        """Return the model parts, with even routing, and add them to `built_parts`."""
        parts = super().build_model_parts()
        self.built_parts = [*self.built_parts, *parts]
        for module in itertools.chain(*(part.modules() for part in parts)):
            if isinstance(module, Experts):
                module.routing = EvenRouting()
        return parts

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer, without a look at the parameters of other stages."""
        return build_optimizer(self.model_parts, self.config, self.dims)

    def build_early_updates(self) -> None:
        """Return None: a thread of early updates would not be traced."""

    def build_metrics(self, **before: int) -> MetricsLogger:
        """Return a logger that logs no step.

        Args:
            **before: Steps and tokens of earlier runs.
        """
        return _Metrics(self.job, self.dims, self.device, **before)

    def reduce_step(self, step: int, totals: StepTotals) -> tuple[float, float, bool]:
        """Return fixed values: no value of the device is read.

        Args:
            step: Not used.
            totals: Not used.
        """
        return 1.0, 1.0, True


def patches(gpu: Gpu | None) -> Iterator[Any]:
    """Yield the replacements for a device without values and a rank without peers. The caller enters them.

    It also clears caches that an earlier job has filled.

    Args:
        gpu: The GPU. None for CPUs.
    """
    # of an earlier job
    for cache in (cuda._places, cuda._ends, cuda._random_state, placement.rows_on):
        cache.cache_clear()
    if hasattr(schedules, "InferenceMode"):  # since torch 2.12 stages vote, and read the votes
        yield mock.patch.object(schedules._PipelineSchedule, "_warmup_p2p", _shapes_are_known)
    if gpu is not None:
        stand_ins.kernels_of_cuda()
        yield mock.patch.object(
            nn.functional, "scaled_dot_product_attention", stand_ins.attention_of_one_rank
        )
        yield mock.patch.object(nn.functional, "rms_norm", stand_ins.rms_norm)


def kernels_of(gpu: Gpu | None) -> GpuKernels:
    """Return the kernels of simulated GPUs.

    Args:
        gpu: The GPU. None for CPUs.
    """
    if gpu is None:
        return GPU_KERNELS
    return GpuKernels(lambda _head_dim: installed_flash(gpu), stand_ins.merge)


def installed_flash(gpu: Gpu | None) -> FlashPackage | None:
    """Return the flash package that a run on such GPUs would use, among the packages installed here. None without one.

    Args:
        gpu: The GPU. None for CPUs.
    """
    if gpu is None:
        return None
    return next(
        iter(
            usable(gpu.capability, deterministic=torch.are_deterministic_algorithms_enabled())
        ),
        None,
    )


def _shapes_are_known(_schedule: object, stages: Sequence[Any], *_: Any) -> None:
    """Set the result of the vote of a pipeline whose stages know their shapes."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC

"""The trainer without data, and what the host asks of the device before the first step and once a step."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import schedules

import trainer.trainer as loop
from longshard.context.execution import merging
from longshard.context.execution.kernels import choose, cuda
from longshard.context.execution.kernels.flash import usable
from longshard.context.planning.capabilities import FlashPackage
from longshard.domain import modules
from longshard.sharding import placement
from trainer.components import norms
from trainer.components.metrics import MetricsLogger
from trainer.components.step_outcome import StepTotals
from trainer.models import experts
from trainer.parallel import expert_parallel
from trainer.parallel.parallel_dims import ParallelDims
from trainer.planner import stand_ins
from trainer.planner.device import Gpu
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.tasks.language import LanguageTask
from trainer.tasks.task import Batch, Task

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
            names = ("tokens", "labels", "positions", "document_ids")
            batch: Batch = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
            if planner is not None:
                batch["plan"] = planner({"document_ids": ids})
            yield batch

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, _states: dict) -> None: ...


class _Task(LanguageTask):
    def build_loader(self) -> _Loader:
        return _Loader(self)


class TracedTrainer(loop.Trainer):
    """The trainer of one rank, which reads no data and compares nothing with other ranks."""

    def build_task(self) -> Task:
        return (
            super().build_task()
            if self.job.task.name != "tokens"
            else _Task(self.job, self.dims)
        )


def patches(gpu: Gpu | None) -> Iterator[Any]:
    """Yield what is different for a device without values, and for a rank without peers. gpu: None for CPUs."""

    def patch(owner: Any, name: str, x: Any, **more: Any) -> Any:
        return mock.patch.object(owner, name, x, **more)

    for module in [m for n, m in sys.modules.items() if n.startswith("trainer.")]:
        if vars(module).get("raise_on_all_ranks") is raise_on_all_ranks:
            yield patch(module, "raise_on_all_ranks", lambda do, _over: do())
    yield patch(loop, "set_timeout", lambda *_a, **_k: None)
    yield patch(loop, "check_same", lambda *_: None)
    yield patch(loop, "check_same_batch", lambda *_: None)
    # a thread of its own would not be traced
    yield patch(loop, "EarlyUpdates", lambda *_: None)
    yield patch(loop, "check_groups", lambda *_: None)
    yield patch(norms, "of_all_ranks", lambda kinds, _over: [kinds])
    yield patch(ParallelDims, "_gloo_group", lambda _self, mesh, _timeout: mesh.get_group())
    yield patch(modules, "_are_equal", lambda *_: True)
    yield patch(MetricsLogger, "due", lambda _self, _step: False)
    yield patch(StepTotals, "read", _read)
    yield patch(expert_parallel, "plan_dispatch", _even_dispatch)
    yield patch(experts, "count_pairs", _even_pairs)
    # of an earlier job
    for cache in (cuda._places, cuda._ends, cuda._random_state, placement.rows_on):
        cache.cache_clear()
    if hasattr(schedules, "InferenceMode"):  # since torch 2.12 stages vote, and read the votes
        yield patch(schedules._PipelineSchedule, "_warmup_p2p", _shapes_are_known)
    if gpu is not None:
        stand_ins.kernels_of_cuda()
        yield patch(choose, "gpu_capability", lambda: gpu.capability)
        yield patch(choose, "newer_flash", lambda _head_dim: installed_flash(gpu))
        yield patch(merging, "fused_merge", lambda: stand_ins.merge)
        yield patch(
            nn.functional, "scaled_dot_product_attention", stand_ins.attention_of_one_rank
        )
        yield patch(nn.functional, "rms_norm", stand_ins.rms_norm)


def installed_flash(gpu: Gpu | None) -> FlashPackage | None:
    """Return the flash package that a run on such GPUs would use, judged by the packages installed here."""
    if gpu is None:
        return None
    return next(
        iter(
            usable(gpu.capability, deterministic=torch.are_deterministic_algorithms_enabled())
        ),
        None,
    )


def _shapes_are_known(_schedule: object, stages: Sequence[Any], *_: Any) -> None:
    """Set the result of the vote of a pipeline whose stages are given their shapes."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC


def _read(totals: StepTotals) -> tuple[float, float, list[float]]:
    """Return a step without news: the host's one reading of a step."""
    return 1.0, 1.0, [0.0] * (totals._sums.numel() - 2)


def _even_pairs(owner: torch.Tensor, number: int) -> list[int]:
    ends = [len(owner) * i // number for i in range(number + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _even_dispatch(
    chosen: torch.Tensor, experts: int, group: Any
) -> expert_parallel.DispatchPlan:
    """Return the plan of a routing that is even: the host reads the routing of each forward."""
    tokens, k = chosen.shape
    ranks = group.size()
    each = max(tokens * min(k, ranks) // ranks, 1)
    places = torch.zeros(each * ranks, dtype=torch.int64, device=chosen.device)
    pairs = (tokens * k // experts,) * experts
    return expert_parallel.DispatchPlan(
        tokens, places, places, (each,) * ranks, (each,) * ranks, pairs, group
    )

"""The parts of a training run, built before its first step in the order in which they need each other.

`trainer.trainer.Trainer` is the loop over them. A class that builds one part in another way overrides one `build_*`
method, for example the trainer that the planner traces.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name

import torch
from torch import nn

from longshard.context.hooks import ScoreFunction
from longshard.sharding.tensors import to_device
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.components.early_update import EarlyUpdates
from trainer.components.lr_scheduler import build_lr_scheduler, check_restart
from trainer.components.metrics import MetricsLogger
from trainer.components.norms import UpdateNorms
from trainer.components.optimizer import build_optimizer, can_mask_update, check_groups
from trainer.components.profiling import check_memory_snapshot
from trainer.components.qk_clip import QKClip
from trainer.components.step_outcome import StepGuard
from trainer.data.loader import BatchesAhead, data_identity
from trainer.families.args import mtp_layers_of
from trainer.job.pipeline_stages import PipelinePlan
from trainer.job.record import ResolvedJob
from trainer.models.model_parts import build_model_parts
from trainer.models.model_spec import model_spec
from trainer.observer import Observer, registered_observers
from trainer.parallel.machine import MACHINE, Machine
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.pipeline_parallel import HiddenStates, Pipeline
from trainer.runtime.agreement import check_same, gather_values, raise_on_all_ranks
from trainer.runtime.console import say_waiting
from trainer.runtime.determinism import prepare_process
from trainer.runtime.dump_folder import save_configuration
from trainer.runtime.process_group import set_timeout
from trainer.runtime.stop import Stop
from trainer.runtime.time_limits import TimeLimits
from trainer.tasks.task import Batch, Task
from trainer.tasks.validation import Validation
from trainer.transforms.compile import check_compiler, keep_caches_apart
from trainer.transforms.float8 import check_float8_machine
from trainer.transforms.quantized import check_quantization_package


class Assembly:
    """The parts of one training run on this rank: machine, data, model, optimizer, and the saved state of the run.

    Args:
        job: The resolved job; all ranks have the same.
        device: The device of this rank's tensors.
        machine: Provides clock, groups and memory; the planner passes its own.

    Raises:
        SharedConfigError: On every rank, if a part cannot be built on one of them.
    """

    def __init__(
        self, job: ResolvedJob, device: torch.device, machine: Machine = MACHINE
    ) -> None:
        self.job = job
        self.device = device
        self.region = machine.region
        self.config = job.config
        self.dims = ParallelDims(job.degrees, device.type, machine)
        self.compute_dtype: torch.dtype = getattr(torch, job.compute_dtype)
        self._set_up_process()
        self._set_up_data()
        self._set_up_model()
        self._set_up_optimizer()
        self._set_up_saved_state()

    def _set_up_process(self) -> None:
        config = self.config
        keep_caches_apart(self.dims)
        self.stop = Stop(
            config.checkpoint.stop_timeout_seconds,
            signals=config.job.stop_signals,
            max_minutes=config.job.max_minutes,
            prints=self.dims.is_first,
        )
        self.stop_reason: str | None = None
        """Why the run stops after this step."""
        self.save_is_due = False
        """Whether a checkpoint is due after this step, by the time."""
        self.limits = TimeLimits(
            config.comm,
            highest=lambda seconds: max(gather_values(seconds)),
            apply=lambda seconds: self._set_timeout(seconds),
        )
        self.guard = StepGuard(config.training)
        prepare_process(config.training)
        raise_on_all_ranks(self._check_machine)

    def _check_machine(self) -> None:
        """Check that this machine has what the job uses; then the first rank saves the configuration.

        That is a compiler, float8, the package for quantised weights, and memory snapshots.
        """
        check_compiler(self.job.compilation, self.device)
        has_parameters = self.job.model.norms_have_parameters
        check_float8_machine(
            self.config.float8, self.device, norms_have_parameters=has_parameters
        )
        check_quantization_package(self.config.lora)
        check_memory_snapshot(self.config.profiling, self.device)
        if self.dims.is_first:
            save_configuration(self.job.user_config)

    def _set_up_data(self) -> None:
        training = self.config.training
        say_waiting(f"reading the data {training.dataset_path or training.dataset}")
        self.task = self.build_task()
        self.data = BatchesAhead(
            self.task.build_loader(), self.job.micro_batches, self._to_device
        )
        identity = data_identity(self.data.state_dict(), training)
        check_same(identity, "data")

    def _set_up_model(self) -> None:
        self.spec = model_spec(self.config.model.name)
        say_waiting(f"making the model, {self.job.model.n_params():,} parameters")
        self.model_parts = self.build_model_parts()
        """The whole model, or the pipeline stages of this rank."""
        self.parameters = [
            p for part in self.model_parts for p in part.parameters() if p.requires_grad
        ]
        self.observers = self.build_observers()
        self._context_options: dict[str, ScoreFunction] = {}
        """Keyword arguments of the task's `batch_context`: the function that takes attention scores."""
        plan = self.job.pipeline
        self.pipeline = plan and self.build_pipeline(plan, self.model_parts)

    def _set_up_optimizer(self) -> None:
        config = self.config
        self.optimizer = self.build_optimizer()
        self.observers += self.build_observers_of_updates()
        self.early = self.build_early_updates() if config.training.early_update else None
        self.updates_masked = self.early is None and can_mask_update(
            self.optimizer, self.device
        )
        """Whether the device masks a non-finite update itself, so that it need not wait for the host."""
        self.unread: Callable[[], None] | None = None
        """Deferred end of the previous step (reads loss and gradient norm); None once it has run."""
        self.lr_scheduler = build_lr_scheduler(
            self.optimizer, config.lr_scheduler, config.training.steps
        )

    def _set_up_saved_state(self) -> None:
        self.checkpoint = Checkpointer(
            self.job,
            self.dims,
            model_parts=self.model_parts,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            loader=self.data,
        )
        self.validation = self.build_validation() if self.job.validates else None
        self._has_validated = False
        self.start_step, tokens_before = self.checkpoint.load()
        check_restart(self.config.lr_scheduler, self.start_step)
        if self.job.task.uses_model:
            self.task.use_model(self)
        self.metrics = self.build_metrics(
            start_step=self.start_step, tokens_before=tokens_before
        )

    def build_task(self) -> Task:
        """Return the task: what a batch holds, and how its loss is computed."""
        return resolve_name(self.job.task.module)(self.job, self.dims)

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of these model parts."""
        optimizer = build_optimizer(self.model_parts, self.config, self.dims)
        check_groups(optimizer, self.model_parts, self.config.optimizer)
        return optimizer

    def build_observers(self) -> list[Observer]:
        """Return the step observers, in this order: the model's, the task's, the guard, registered ones."""
        added = [
            build(self.job, self.dims, self.model_parts) for build in registered_observers()
        ]
        model_observer = self.spec.observer(self.model_parts, self.dims)
        return [model_observer, *self.task.observers(), self.guard, *added]

    def build_observers_of_updates(self) -> list[Observer]:
        """Return the observers that watch the optimizer. Call this after the optimizer is built.

        QK-Clip also gets the attention scores of every forward, by `_context_options`.
        """
        config = self.config
        observers = []
        if config.optimizer.qk_clip is not None and config.task == "tokens":
            observers.append(
                clip := QKClip(
                    self.model_parts, self.optimizer, self.dims, config.optimizer.qk_clip
                )
            )
            self._context_options["on_scores"] = clip.see
        if config.metrics.log_update_norms:
            observers.append(UpdateNorms(self.model_parts, self.optimizer, self.dims))
        return observers

    def build_early_updates(self) -> EarlyUpdates | None:
        """Return the part that updates parameters on the host during the backward."""
        return EarlyUpdates(*self.model_parts, self.optimizer, self.device)

    def build_metrics(self, **before: int) -> MetricsLogger:
        """Return the logger, which measures and logs steps.

        Args:
            **before: `start_step` and `tokens_before`: steps and tokens of earlier runs.
        """
        return MetricsLogger(self.job, self.dims, self.device, **before)

    def build_validation(self) -> Validation:
        """Return the validation loop. A collective over all ranks: their validation data must be the same."""
        build = partial(Validation, self.job, self.dims, self.task)
        validation = raise_on_all_ranks(build)
        check_same(validation.identity, "validation data")
        return validation

    def build_model_parts(self) -> list[nn.Module]:
        """Return the parts of the model that this rank runs, parallelised, with their initial weights."""
        return build_model_parts(self.spec, self.job, self.dims, self.device)

    def build_pipeline(self, plan: PipelinePlan, model_parts: Sequence[nn.Module]) -> Pipeline:
        """Return the pipeline, which runs the stages of this rank by its schedule. A collective over all ranks.

        Its time-out is `comm.init_timeout_seconds`.

        Args:
            plan: The stages of all ranks, and their schedule.
            model_parts: The stages of this rank.
        """
        model = self.job.model
        hidden = HiddenStates(
            model.dim, self.compute_dtype, self.dims.size("tp"), rows=1 + mtp_layers_of(model)
        )
        build = partial(Pipeline, plan, model_parts, self.dims["pp"], self.device, hidden)
        pipeline = raise_on_all_ranks(build)
        pipeline.set_timeout(self.config.comm.init_timeout_seconds)
        return pipeline

    def _set_timeout(self, seconds: float) -> None:
        set_timeout(seconds, except_group=self.checkpoint.group)
        if self.pipeline is not None:
            self.pipeline.set_timeout(seconds)

    def _to_device(self, batch: Batch) -> Batch:
        """Copy the tensors of a batch to the device, asynchronously on CUDA, unless the task copies them itself."""
        if self.job.task.copies_batches:
            return batch
        return {
            name: to_device(x, self.device) if isinstance(x, torch.Tensor) else x
            for name, x in batch.items()
        }

"""The training loop. Read `Trainer.train_step` first: it is one optimizer step on a page."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from longshard.sharding.exchange import all_reduce
from trainer.assembly import Assembly
from trainer.components.lr_scheduler import scheduled_rate
from trainer.components.norms import clip_gradients, settle_gradients, squared_norm
from trainer.components.optimizer import mask_update
from trainer.components.profiling import profiling
from trainer.components.step_metrics import StepRecord
from trainer.components.step_outcome import StepTotals
from trainer.job.summary import closing
from trainer.models.auxiliary_loss import normalise_auxiliary_losses
from trainer.parallel.data_parallel import reduce_across_replicas
from trainer.parallel.pipeline_parallel import LossFunction
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.console import logger, program, say_waiting
from trainer.runtime.garbage import manual_garbage_collection
from trainer.tasks.task import Batch, RankInputs, check_same_batch
from trainer.transforms.compile import Recompilations, compiler_settings
from trainer.transforms.float8 import precompute_scales

_NO_DATA = "the data of the next step cannot be read: stopped"
_SAVED = "checkpoint saved: the same command resumes from it"
_NOT_SAVED = (
    "nothing saved: with --checkpoint.enable a run saves, and the same command resumes it"
)


class Trainer(Assembly):
    """One training run of a resolved job on this rank, in an initialised process group.

    `train()` is the loop, `train_step` one optimizer step. Both call the other methods. `Assembly` builds the parts,
    and documents the constructor's arguments.
    """

    def train(self) -> None:
        """Train until `training.steps`, `job.max_minutes` or a signal, and save the last step.

        Raises:
            TrainingError: A loss or a gradient is not finite, and no more steps may be skipped; or ranks of a
                data-parallel rank read different batches.
            CheckpointError: A checkpoint could not be written.
            SharedConfigError: The data of a step cannot be read; the step before is saved.
        """
        config = self.config
        steps = self.config.training.steps
        folder = Path(config.job.dump_folder)
        rank = self.dims.rank("world")
        compilations = Recompilations(self.job.compilation, self.start_step + 1)
        try:
            with (
                self.stop,
                self.checkpoint,
                manual_garbage_collection() as collect_garbage,
                profiling(config.profiling, folder, rank, self.device) as profile,
            ):
                self.metrics.start(self.start_step)
                self.limits.start(self.metrics.predicted_seconds())
                for step in range(self.start_step + 1, steps + 1):
                    self.metrics.starting(step)
                    self.train_step(step)
                    for done in (collect_garbage, *profile, compilations.step):
                        done(step)
                    self.limits.settle()
                    last = step == steps or self.stop_reason is not None
                    with self.limits.paused():
                        best = self._validate(step, last, compilations)
                        tokens = self.metrics.tokens_seen(step)
                        due = self.save_is_due
                        saved = self.checkpoint.save(
                            step, tokens_seen=tokens, last=last, due=due, best=best
                        )
                    if self.stop_reason:
                        logger.info(
                            f"{self.stop_reason} after step {step}; {_SAVED if saved else _NOT_SAVED}"
                        )
                        if self.stop_reason == _NO_DATA:
                            raise_on_all_ranks(self.data.check)
                        return
            self.metrics.log_end()
            logger.info(closing(self.job, checkpoint=self.checkpoint.saved, program=program()))
        finally:
            if self.early is not None:
                self.early.close()
            self.metrics.close()

    def train_step(self, step: int) -> None:
        """Run one optimizer step over the whole global batch. If the end of the step before was deferred, run it, too.

        Args:
            step: Number of the step.
        """
        batches = self.take_batches(step)
        # One count for the whole step, before any backward: a mean of means is wrong if ranks have different counts.
        targets = sum(self.task.counts(batch).sum() for batch in batches)
        size = torch.full_like(targets, sum(map(self.task.size, batches)))
        valid, positions = all_reduce(torch.stack((targets, size)), self.dims["dp"])

        self.optimizer.zero_grad()
        for part in self.model_parts:
            precompute_scales(part, self.config)
            normalise_auxiliary_losses(part, positions.clamp(min=1))
        for observer in self.observers:
            observer.start_step()
        losses = [
            self.forward_backward(batch, valid.clamp(min=1), last=i == len(batches) - 1)
            for i, batch in enumerate(batches)
        ]
        # one value for each sample
        sums, counts = (torch.cat(column) for column in zip(*losses, strict=True))
        # the device works meanwhile; the totals tell all ranks of unreadable data
        self._make_next_batches(step)
        # read the previous step: no update may be launched after a step that ends the run
        self.read_step()
        with self.region("grad_norm"):
            settle_gradients(self.parameters)
            loss_part = sums.sum() / valid.clamp(min=1)
            norm = squared_norm(self.parameters, self.dims)
            totals = StepTotals(loss_part, norm, self._votes(), self.dims)
        left_out = totals.not_finite
        if self.updates_masked:
            mask_update(self.optimizer, left_out)
            self.optimizer_step(totals.norm)
        for observer in self.observers:
            observer.end_step(left_out)
        lr = scheduled_rate(self.lr_scheduler, self.config.optimizer.lr)
        at_once = self.needs_outcome(step)
        record = self.metrics.record(
            step, sums, counts, lr=lr, data=self.data, late=not at_once
        )
        self.unread = partial(self.finish_step, step, totals, record)
        if at_once:
            self.read_step()
        self.lr_scheduler.step()

    def _votes(self) -> list[float]:
        """Return the votes of this rank, by which all ranks decide after a step."""
        data_failed = float(self.data.failed)
        return [*self.stop.votes(), self.checkpoint.vote(), data_failed, self.limits.vote()]

    def take_batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step.

        The first step of a run is a collective: all ranks raise if one cannot read. Ranks that share a data-parallel
        coordinate also check that they read the same batch. Later steps need no collective: a reading error is in the
        totals of the step before, and ends the run before this call.

        Args:
            step: Number of the step.

        Raises:
            SharedConfigError: In the first step a rank cannot read.
            TrainingError: In the first step ranks of a data-parallel rank read different batches.
        """
        with self.metrics.loading_data(), self.region("data_loading"):
            if step > self.start_step + 1:
                return self.data.take()
            batches = raise_on_all_ranks(self.data.take)
        check_same_batch(self.task, batches[0], self.dims)
        return batches

    def forward_backward(
        self, batch: Batch, valid: Tensor, *, last: bool
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward of one micro-batch, and add to the gradients.

        Args:
            batch: The micro-batch.
            valid: Number of targets of the whole step, over all ranks, a scalar.
            last: Whether it is the last micro-batch of the step: only then are gradients summed over replicas.

        Returns:
            For each sample the sum of losses on this rank, (B,), float64, and the number of targets of the whole
            sample, (B,), int64. In a pipeline only the last stage has losses; the sums of other stages are 0.
        """
        for observer in self.observers:
            observer.batch(batch)
        parts = []

        def loss(part: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
            losses = self.task.losses(part, hidden, targets)
            parts.append(losses.detach())
            return losses.sum() / valid

        with (
            compiler_settings(self.job.compilation),
            self.task.batch_context(batch, self.model_parts, **self._context_options) as share,
        ):
            if self.pipeline is not None:
                for part in self.model_parts:
                    reduce_across_replicas(part, last)
                with self.region("pipeline"):
                    self.pipeline.step(share.inputs, share.targets, loss, **share.arguments)
            else:
                self._run_parts(share.parts, loss, last=last)
            losses = (
                torch.cat(parts[::-1], 1)
                if share.chunks
                else torch.cat(parts)
                if parts
                else None
            )
            for observer in self.observers if parts else ():
                observer.losses({**batch, **share.batch}, losses)
        counts = self.task.counts(batch)
        return torch.zeros_like(
            counts, dtype=torch.float64
        ) if losses is None else losses.double().sum(1), counts

    def _run_parts(
        self, parts: Sequence[RankInputs], loss: LossFunction, *, last: bool
    ) -> None:
        """Run forward and backward of a micro-batch, or of each of its chunks.

        With chunks, first all chunks except the last run forward without gradients. Then each chunk runs forward and
        backward, from the last to the first.
        """
        (model,) = self.model_parts
        with self.region("forward"), torch.no_grad():
            for part in parts[:-1]:
                model(
                    part.inputs, **part.arguments
                )  # keeps the keys and values that later chunks attend to
        for number, part in reversed([*enumerate(parts)]):
            ends = last and number == 0
            reduce_across_replicas(model, ends)
            if self.early is not None and ends:
                self.early.start()
            with self.region("forward"):
                total = loss(model, model(part.inputs, **part.arguments), part.targets)
            with self.region("backward"):
                total.backward()

    def needs_outcome(self, step: int) -> bool:
        """Return whether a step is read at once, because its update or later work depends on the outcome.

        Args:
            step: Number of the step.
        """
        ends = (
            step in (self.start_step + 1, self.config.training.steps)
            or self.stop_reason is not None
        )
        saves = self.save_is_due or self.checkpoint.due(step)
        validates = self.validation is not None and self.validation.due(step, last=False)
        return not self.updates_masked or ends or saves or validates

    def read_step(self) -> None:
        """End the previous step, if its end was deferred: see `finish_step`."""
        deferred_end = self.unread
        self.unread = None
        if deferred_end is not None:
            deferred_end()

    def finish_step(self, step: int, totals: StepTotals, record: StepRecord | None) -> None:
        """Read the totals of a step; decide whether to stop, and whether to save.

        Then update the weights if the device has not, and write metrics. A step that is skipped, because its loss or
        norm is not finite, does neither.

        Args:
            step: Number of the step.
            totals: Sums over all ranks.
            record: Values for the metrics. None if the step is not logged.

        Raises:
            TrainingError: As `reduce_step`.
        """
        loss, grad_norm, updated = self.reduce_step(step, totals)
        if updated and not self.updates_masked:
            self.optimizer_step(grad_norm)
        if updated and record is not None:
            observed = {
                key: x
                for each in self.observers
                for key, x in each.record(record.positions).items()
            }
            self.metrics.log(
                step, loss=loss, grad_norm=grad_norm, record=record, observed=observed
            )

    def reduce_step(self, step: int, totals: StepTotals) -> tuple[float, float, bool]:
        """Return loss, gradient norm, and whether this step updates the weights; decide whether to stop, and to save.

        Args:
            step: Number of the step.
            totals: Sums over all ranks.

        Raises:
            TrainingError: On every rank, if the loss or the norm is not finite and no more steps may be skipped. No
                weight has changed, except with `training.early_update`.
        """
        loss, norm, (*votes, save, no_data, slow) = totals.read()
        self.limits.step_was_read(slow > 0)
        self.stop_reason = self.stop.reason(votes) or (_NO_DATA if no_data else None)
        self.save_is_due = save > 0
        return loss, norm, not self.guard.should_skip(step, loss, norm)

    def optimizer_step(self, norm: float | Tensor) -> None:
        """Clip the gradients to `training.max_norm`, and update the weights.

        Args:
            norm: The gradient norm: a number, or a float64 scalar on the device, which the host does not read.
        """
        with self.region("clip"):
            clip_gradients(self.parameters, norm, self.config.training.max_norm)
        with (
            self.region("optimizer"),
            nullcontext() if self.early is None else self.early.finished(),
        ):
            self.optimizer.step()

    def _validate(self, step: int, last: bool, compilations: Recompilations) -> float | None:
        """Validate if it is due. Return the loss if its checkpoint is kept as the best one so far, otherwise None.

        last: whether the run ends after this step.
        """
        # A stopped run has little time left to save.
        if (
            self.validation is None
            or self.stop_reason
            or not self.validation.due(step, last=last)
        ):
            return None
        first_compiles = self.job.compilation.any and not self._has_validated
        with self.metrics.paused(), self.region("validation"):
            say_waiting(f"validating after step {step}")
            # stages compile in turn
            with self.limits.while_compiling() if first_compiles else nullcontext():
                result = self.validation.run(self.model_parts, self.pipeline)
        self._has_validated = True
        compilations.expected()  # a forward without gradients is a graph of its own
        self.metrics.log_validation(step, result)
        return (
            result.loss
            if self.config.validation.keep_best and result.loss < self.checkpoint.best
            else None
        )

    def _make_next_batches(self, step: int) -> None:
        """Make the next batches. On a CPU nothing else runs meanwhile, so the time counts as loading data.

        If a step is read during the next step, batches are made two steps ahead, so that the vote on unreadable data is
        read in time.
        """
        ahead = min(1 + self.updates_masked, self.config.training.steps - step)
        if ahead > 0:
            with (
                self.metrics.loading_data() if self.device.type == "cpu" else nullcontext(),
                self.region("next_batches"),
            ):
                self.data.make(ahead)

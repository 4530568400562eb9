"""Metrics of a step, reduced over ranks, to the console, `metrics.jsonl` and other sinks."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from longshard.sharding.exchange import all_reduce
from trainer.components.console_line import console_line, duration
from trainer.components.device_clock import DeviceClock
from trainer.components.device_peaks import peak_flops, peak_memory_gib
from trainer.components.sinks import JsonLines, TensorBoard, WeightsAndBiases
from trainer.components.step_metrics import StepMetrics, StepRecord, ValidationResult
from trainer.config.schema import JobConfig
from trainer.data.loader import BatchesAhead
from trainer.job.lora import flops_beside
from trainer.job.record import ResolvedJob
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.console import logger, show_progress
from trainer.runtime.dump_folder import ESTIMATE, TENSORBOARD

_LOW_MFU = 0.4
"""Share of the peak that a step is assumed to reach if the planner has no prediction."""


class MetricsLogger:
    """Measures the time between logged steps, and writes metrics. Every rank calls `log`; rank 0 writes files.

    Args:
        job: The resolved job.
        dims: The meshes of the run.
        device: The device of this rank.
        start_step: Steps of earlier runs, whose files are continued.
        tokens_before: Tokens of earlier runs.
    """

    def __init__(
        self,
        job: ResolvedJob,
        dims: ParallelDims,
        device: torch.device,
        *,
        start_step: int,
        tokens_before: int,
    ) -> None:
        config = job.config
        self.settings = config.metrics
        self.dims = dims
        self.device = device
        self.start_step = start_step
        self.last_step = config.training.steps
        self.tokens_before = tokens_before
        adapter_flops = flops_beside(config, job.model)
        self.flops_per_token = tuple(
            flops + adapter_flops for flops in job.model.flops_per_token(job.positions)
        )
        self.tokens_per_step = job.sequences_per_step * job.positions
        self.position = job.task.position
        self.compiles = job.compilation.any
        self.peak_flops = peak_flops(device, getattr(torch, job.compute_dtype))
        self._sinks: list[JsonLines | TensorBoard | WeightsAndBiases] = []
        self._validation: list[JsonLines] = []
        self._estimate = Path(config.job.dump_folder, ESTIMATE)
        self._predicted = None
        raise_on_all_ranks(lambda: self._open_sinks(config) if dims.is_first else None)
        # In the group of all ranks, the values of a step would wait for the all-gathers of the next step.
        self._all_ranks = dims.own_group("world", "metrics") or dims["world"]
        self._clock = DeviceClock(device)
        self._run_started = time.perf_counter()
        self.last_loss: float | None = None
        """Loss of the last logged step of this run."""
        self.restart_clock(start_step)

    def _open_sinks(self, config: JobConfig) -> None:
        folder = Path(config.job.dump_folder)
        self._sinks = [JsonLines(folder / "metrics.jsonl", self.start_step)]
        if config.validation.enable:
            self._validation = [JsonLines(folder / "validation.jsonl", self.start_step)]
        if self.settings.enable_tensorboard:
            self._sinks.append(TensorBoard(folder / TENSORBOARD, self.start_step))
        if self.settings.enable_wandb:
            self._sinks.append(WeightsAndBiases(config, self.start_step))

    def restart_clock(self, step: int) -> None:
        """Start measuring after `step`.

        Args:
            step: The last finished step.
        """
        self._last_step = step
        self.data_seconds = 0.0
        """Seconds spent waiting for data since then."""
        self._started = time.perf_counter()

    @contextmanager
    def loading_data(self) -> Iterator[None]:
        """Count the time spent inside as data loading.

        Yields:
            None.
        """
        started = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent inside out of the speed.

        Yields:
            None.
        """
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def log_validation(self, step: int, result: ValidationResult) -> None:
        """Log the loss on validation data. Rank 0 writes it to validation.jsonl and to all sinks except metrics.jsonl.

        Args:
            step: The last finished step.
            result: The result of the validation.
        """
        record = {
            "step": step,
            "validation_loss": result.loss,
            "validation_perplexity": result.perplexity,
        }
        for sink in (*self._validation, *self._sinks[1:]):
            sink.write(record)
        logger.info(
            f"validation after step {step}: loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, of "
            f"{result.tokens:,} tokens ({duration(result.seconds)})"
        )

    def start(self, step: int) -> None:
        """Start measuring after `step`, and log which steps follow.

        Args:
            step: The last finished step.
        """
        self.restart_clock(step)
        if step < self.last_step:
            compiling = "; the first step compiles, which takes minutes" * self.compiles
            logger.info(f"training starts: step {step + 1} to {self.last_step}{compiling}")

    def log_end(self) -> None:
        """Log the number of steps, the time and the last loss."""
        steps = self.last_step
        if self.start_step >= steps:
            logger.info(
                f"nothing to train: the checkpoint has {self.start_step} steps, and training.steps = {steps}; raise "
                "training.steps to continue, or name another job.dump_folder to start again"
            )
        else:
            # None: all steps were skipped
            loss = "" if self.last_loss is None else f", loss {self.last_loss:.3f}"
            seconds = time.perf_counter() - self._run_started
            logger.info(
                f"training done: {steps - self.start_step} steps in {duration(seconds)}{loss}"
            )

    def tokens_seen(self, step: int) -> int:
        """Return the tokens of the whole job up to the end of `step`, earlier runs included.

        Args:
            step: Number of the step.
        """
        return self.tokens_before + (step - self.start_step) * self.tokens_per_step

    def starting(self, step: int) -> None:
        """Show which step runs, in the last line of a terminal.

        Args:
            step: Number of the step.
        """
        passed = time.perf_counter() - self._started
        done = step - 1 - self._last_step
        left = f", {duration((self.last_step - step + 1) * passed / done)} left" if done else ""
        show_progress(f"step {step}/{self.last_step} runs{left}")

    def due(self, step: int) -> bool:
        """Return whether this step is logged: the first, the last, and every `metrics.log_freq`-th.

        Args:
            step: Number of the step.
        """
        return step in (1, self.last_step) or step % self.settings.log_freq == 0

    def record(
        self,
        step: int,
        sums: Tensor,
        counts: Tensor,
        *,
        lr: float,
        data: BatchesAhead,
        late: bool,
    ) -> StepRecord | None:
        """Return the values of this step that `log` needs. A collective over the context-parallel ranks.

        Args:
            step: Number of the step.
            sums: Sums of losses on this rank, one for each sample of all micro-batches, (B,).
            counts: Numbers of labels of the whole samples, not of this rank's part of them, (B,).
            lr: The learning rate.
            data: The loader.
            late: Whether the next step already runs when the step is logged.

        Returns:
            The values. None if the step is not logged.
        """
        if not self.due(step):
            return None
        sequence_losses = all_reduce(sums, self.dims["cp"]) / counts.clamp(min=1)
        end = self._clock.mark() if late else None
        return StepRecord(
            sequence_losses, lr, data.epoch, data.state_dict(), self.data_seconds, end
        )

    def log(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        record: StepRecord,
        observed: Mapping[str, Any],
    ) -> StepMetrics:
        """Reduce and write the metrics since the last log. A collective: every rank calls it for the same steps.

        Args:
            step: Number of the step.
            loss: Loss of the whole job.
            grad_norm: Gradient norm before clipping.
            record: Values of this rank; `sequence_losses`, (B,), is 0 before the last stage of a pipeline, and `epoch`
                is the mean over the data streams.
            observed: Records of observers, on every rank.

        Returns:
            The metrics.
        """
        end = self._clock.mark() if record.end is None else record.end
        ended = self._clock.time_of(end)
        elapsed = ended - self._started
        with self._clock.after(end):  # the device is in the next step
            metrics = self._reduced(step, loss, grad_norm, record, elapsed)
        self.last_loss = loss
        left = self.last_step - step
        logger.info(
            console_line(
                metrics, self.last_step, left * metrics.seconds_per_step, position=self.position
            )
        )
        extra = dict(observed) | (
            self._predicted_memory(metrics.memory_gib) if self._sinks else {}
        )
        for sink in self._sinks:
            sink.write(asdict(metrics) | extra)
        self._last_step = step
        self._started = ended
        self.data_seconds -= record.waited
        return metrics

    def _reduced(
        self, step: int, loss: float, grad_norm: float, record: StepRecord, elapsed: float
    ) -> StepMetrics:
        """Return the metrics of a step. `loss` and `grad_norm` are of the whole job already, as in `log`.

        The other values are reduced over all ranks. elapsed: seconds of this rank; the largest of all ranks counts.
        """
        steps = step - self._last_step
        ranks = self.dims.size("world")
        loss_max = record.sequence_losses.max().item()
        largest = [loss_max, elapsed, peak_memory_gib(self.device)]
        loss_max, elapsed, memory = self._reduce(largest, "max")
        waited, epoch = (x / ranks for x in self._reduce([record.waited, record.epoch], "sum"))
        per_device = self.tokens_per_step * steps / elapsed / ranks
        flops = [per_device * flops for flops in self.flops_per_token]
        mfu = [None if self.peak_flops is None else value / self.peak_flops for value in flops]
        return StepMetrics(
            step=step,
            loss=loss,
            loss_max=loss_max,
            grad_norm=grad_norm,
            lr=record.lr,
            seconds_per_step=elapsed / steps,
            tokens_per_second=per_device * ranks,
            tokens_per_second_per_device=per_device,
            tflops=flops[0] / 1e12,
            mfu=mfu[0],
            mfu_causal=mfu[1],
            memory_gib=memory,
            data_loading_fraction=waited / elapsed,
            tokens_seen=self.tokens_seen(step),
            epoch=epoch,
        )

    def predicted_seconds(self) -> float:
        """Return the seconds of a step before one has run; 0.0 if nothing is known, as on CPUs.

        It is the larger of two times: the planner's prediction, if it is ready, and the time of all FLOPs at a low MFU.
        The FLOPs count full attention, because the documents of some step may be as long as its sequences.
        """
        planned = self._estimated("step_seconds") or 0.0
        if self.peak_flops is None:
            return planned
        flops = self.tokens_per_step * self.flops_per_token[0] / self.dims.size("world")
        return max(planned, flops / (_LOW_MFU * self.peak_flops))

    def _estimated(self, name: str) -> float | None:
        """Return a number that `lct estimate` has predicted for GPUs. None on CPUs, and until it is ready."""
        if self.device.type == "cuda":
            with suppress(OSError, ValueError, KeyError):
                return float(json.loads(self._estimate.read_text("utf-8"))[name])
        return None

    def _predicted_memory(self, memory: float) -> dict[str, float]:
        """Return the peak that `lct estimate` has predicted for GPUs; the first time, log both peaks.

        memory: the measured peak in GiB. The result has the predicted peak in GiB, and is empty until it is ready.
        """
        if self._predicted is None and (size := self._estimated("allocated")) is not None:
            self._predicted = size / 2**30
            logger.info(
                f"memory: {memory:.1f} GiB allocated at the peak, {self._predicted:.1f} GiB predicted"
            )
        return {} if self._predicted is None else {"memory_predicted_gib": self._predicted}

    def _reduce(self, values: Sequence[float], operation: Literal["sum", "max"]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        return all_reduce(numbers, self._all_ranks, operation).tolist()

    def close(self) -> None:
        """Close all sinks."""
        for sink in (*self._sinks, *self._validation):
            sink.close()

"""Metrics of a step, reduced over ranks, to the console, `metrics.jsonl` and other sinks."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from longshard.sharding.exchange import all_reduce
from trainer.components.device_clock import DeviceClock, Mark
from trainer.components.sinks import JsonLines, TensorBoard, WeightsAndBiases
from trainer.config.schema import JobConfig
from trainer.data.loader import BatchesAhead
from trainer.job.lora import flops_beside
from trainer.job.record import ResolvedJob
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.console import line_width, logger, show_progress
from trainer.runtime.dump_folder import ESTIMATE, TENSORBOARD

# Dense bfloat16 peak of one device in FLOP/s, from data sheets; the first name that the device's name contains counts.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI325X": 1300e12,
    "MI300X": 1300e12,
    "MI250X": 191.5e12,
}
_LOW_MFU = 0.4
"""Share of the peak by which a step without a prediction of the planner is taken to be slow."""


@dataclass(frozen=True)
class StepMetrics:
    """One logged step; the keys of an object in `metrics.jsonl`."""

    step: int
    loss: float
    """Mean over the step of the losses of positions that have a target, without auxiliary losses."""
    loss_max: float
    """Largest mean loss of one sequence of the step."""
    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    seconds_per_step: float
    """Time of one step on the slowest rank, mean over the steps since the last logged one."""
    tokens_per_second: float
    """Speed of the whole job since the last logged step; each token of a sequence counts once."""
    tokens_per_second_per_device: float
    tflops: float
    """Model TFLOP/s per device, full attention counted."""
    mfu: float | None
    """Share (0 to 1) of the device's bfloat16 peak with full attention counted; None where no peak is known."""
    mfu_causal: float | None
    """The same, with only the visible part of attention counted."""
    memory_gib: float
    """Largest peak of a rank: allocated by PyTorch on a GPU, resident on a CPU."""
    data_loading_fraction: float
    """Share of the time in which ranks waited for data, mean over ranks."""
    tokens_seen: int
    """Tokens of the whole job since its first step."""
    epoch: float
    """Passes over the data so far, mean over the data streams."""


@dataclass(frozen=True)
class StepRecord:
    """What the metrics of a step need and the next step changes.

    sequence_losses: see `MetricsLogger.log`; positions: of the data streams; waited: seconds for data since the last
    logged step; end: of the step; None: when it is logged.
    """

    sequence_losses: torch.Tensor
    lr: float
    epoch: float
    positions: Mapping[int, Mapping[str, int]]
    waited: float
    end: Mark | None


def perplexity(loss: float) -> float:
    """Return exp(loss); inf where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class ValidationResult:
    """loss: mean cross entropy of the tokens that have a label; tokens: how many these are; seconds: of the run."""

    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device for matrix products in `dtype`; None if it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process: allocated on its GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # ru_maxrss: bytes there, KiB here
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def console_line(
    metrics: StepMetrics, total_steps: int, eta_seconds: float, *, position: str = "tok"
) -> str:
    """Return one line of at most `line_width()` characters: progress, loss, speed, resources, time left.

    position: short word for what a sample consists of: tokens, or points of a field.
    `max`, the largest loss of a sequence, gives way to the share of the device's peak where that is known. A line that
    is too long has single blanks, then neither `data` (waiting for data, from 5 % on) nor `max`,
    and at last no resources.
    """
    loss_max = f" (max {_loss(metrics.loss_max, 2)})" if metrics.mfu is None else ""
    data = (
        f"data {metrics.data_loading_fraction:.0%}"
        if metrics.data_loading_fraction >= 0.05
        else ""
    )
    resources = (
        "" if metrics.mfu is None else f"{metrics.mfu:.0%} mfu",
        f"{metrics.seconds_per_step:.{1 if metrics.seconds_per_step < 100 else 0}f} s",
        f"{metrics.memory_gib:.{1 if metrics.memory_gib < 10 else 0}f} GiB",
    )
    width = line_width()
    lines = []
    speed = metrics.tokens_per_second
    choices = (
        (loss_max, data, resources),
        (loss_max, "", resources),
        ("", "", resources),
        ("", "", ()),
    )
    for detail, extra, used in choices:
        parts = [
            f"step {metrics.step:>{len(str(total_steps))}}/{total_steps}",
            f"loss {_loss(metrics.loss)}{detail}",
            f"grad {metrics.grad_norm:.{2 if metrics.grad_norm < 100 else 0}f}",
            f"lr {_short_power(metrics.lr)}",
            f"{speed:,.0f} {position}/s"
            if speed < 1e5
            else f"{speed / 1e6:,.2f}M {position}/s",
            *used,
            extra,
            f"eta {duration(eta_seconds)}" if metrics.step < total_steps else "",
        ]
        lines += [blanks.join(part for part in parts if part) for blanks in ("  ", " ")]
    return next((line for line in lines if len(line) <= width), lines[-1])


def duration(seconds: float) -> str:
    """Return 4:40, 1:02:03, or from a day on 2d03h."""
    seconds = round(seconds)
    if seconds >= 86400:
        return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"
    text = str(timedelta(seconds=seconds))
    return text.removeprefix("0:").removeprefix("0") if seconds < 3600 else text


def _loss(loss: float, digits: int = 3) -> str:
    """Return a loss with three digits or more: 5.191, or 3.1e-3, as those of regressions are."""
    return f"{loss:.{digits}f}" if loss >= 0.1 or loss == 0 else _short_power(loss)


def _short_power(number: float) -> str:
    """Return 2.3e-3 for 0.0023."""
    digits, _, power = f"{number:.1e}".partition("e")
    return f"{digits}e{int(power)}"


class MetricsLogger:
    """Measures the time between logged steps, and writes metrics. Every rank calls `log`; rank 0 writes files.

    start_step, tokens_before: steps and tokens of earlier runs, whose files are continued.
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
        self.settings = job.config.metrics
        self.dims = dims
        self.device = device
        training = job.config.training
        self.start_step = start_step
        self.last_step = training.steps
        self.tokens_before = tokens_before
        beside = flops_beside(job.config, job.model)
        self.flops_per_token = tuple(
            flops + beside for flops in job.model.flops_per_token(job.positions)
        )
        self.tokens_per_step = job.sequences_per_step * job.positions
        self.position = job.task.position
        self.compiles = job.compilation.any
        self.peak_flops = peak_flops(device, getattr(torch, job.compute_dtype))
        self._sinks: list[JsonLines | TensorBoard | WeightsAndBiases] = []
        self._validation: list[JsonLines] = []
        self._estimate = Path(job.config.job.dump_folder, ESTIMATE)
        self._predicted = None
        raise_on_all_ranks(
            lambda: self._open_sinks(job.config) if dims.rank("world") == 0 else None,
            dims["world"],
        )
        # In the group of all ranks, values of a step would queue behind what the next step gathers.
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
        """Start measuring after `step`."""
        self._last_step = step
        self.data_seconds = 0.0
        """Time spent waiting for data since then."""
        self._started = time.perf_counter()

    @contextmanager
    def loading_data(self) -> Iterator[None]:
        """Count the time spent inside as data loading."""
        started = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent inside out of the speed."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def log_validation(self, step: int, result: ValidationResult) -> None:
        """Log the loss on validation data; rank 0 writes it to validation.jsonl, and to the sinks but metrics.jsonl."""
        found = {
            "step": step,
            "validation_loss": result.loss,
            "validation_perplexity": result.perplexity,
        }
        for sink in (*self._validation, *self._sinks[1:]):
            sink.write(found)
        logger.info(
            f"validation after step {step}: loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, of "
            f"{result.tokens:,} tokens ({duration(result.seconds)})"
        )

    def start(self, step: int) -> None:
        """Start measuring after `step`, and say which steps follow."""
        self.restart_clock(step)
        if step < self.last_step:
            compiling = "; the first step compiles, which takes minutes" * self.compiles
            logger.info(f"training starts: step {step + 1} to {self.last_step}{compiling}")

    def log_end(self) -> None:
        steps = self.last_step
        if self.start_step >= steps:
            logger.info(
                f"nothing to train: the checkpoint has {self.start_step} steps, and training.steps = {steps}; raise "
                "training.steps to continue, or name another job.dump_folder to start again"
            )
        else:
            # None: all were skipped
            loss = "" if self.last_loss is None else f", loss {self.last_loss:.3f}"
            run_time = duration(time.perf_counter() - self._run_started)
            logger.info(f"training done: {steps - self.start_step} steps in {run_time}{loss}")

    def tokens_seen(self, step: int) -> int:
        """Return the tokens of the whole job up to the end of `step`, earlier runs included."""
        return self.tokens_before + (step - self.start_step) * self.tokens_per_step

    def starting(self, step: int) -> None:
        """Show which step runs, in the last line of a terminal."""
        passed = time.perf_counter() - self._started
        done = step - 1 - self._last_step
        left = f", {duration((self.last_step - step + 1) * passed / done)} left" if done else ""
        show_progress(f"step {step}/{self.last_step} runs{left}")

    def due(self, step: int) -> bool:
        """Return whether this step is logged: the first, the last, and every `metrics.log_freq`-th."""
        return step in (1, self.last_step) or step % self.settings.log_freq == 0

    def record(
        self,
        step: int,
        sums: torch.Tensor,
        counts: torch.Tensor,
        *,
        lr: float,
        data: BatchesAhead,
        late: bool,
    ) -> StepRecord | None:
        """Return what `log` needs of this step; None if it is not logged. A collective over the context-parallel ranks.

        sums, counts: see `Trainer.forward_backward`, of all micro-batches; late: the next step runs when it is logged.
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
        more: Mapping[str, Any] | None = None,
    ) -> StepMetrics:
        """Reduce and write one step. A collective: every rank calls it for the same steps.

        loss: of the whole job. record: of this rank, with sequence_losses: (B,) mean loss of each sequence, 0 before
        the last stage of a pipeline; epoch: mean over the data streams. more: the records of observers, on every rank.
        """
        end = self._clock.mark() if record.end is None else record.end
        ended = self._clock.time_of(end)
        elapsed = ended - self._started
        data_seconds = self.data_seconds - record.waited
        steps = step - self._last_step
        ranks = self.dims.size("world")
        with self._clock.after(end):  # the device is in the next step
            largest = [
                record.sequence_losses.max().item(),
                elapsed,
                peak_memory_gib(self.device),
            ]
            loss_max, elapsed, memory = self._of_all_ranks(largest, "max")
            waited, epoch = (
                x / ranks for x in self._of_all_ranks([record.waited, record.epoch], "sum")
            )
        per_device = self.tokens_per_step * steps / elapsed / ranks
        flops = [per_device * flops for flops in self.flops_per_token]
        mfu = [None if self.peak_flops is None else value / self.peak_flops for value in flops]
        metrics = StepMetrics(
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
        self.last_loss = loss
        left = self.last_step - step
        logger.info(
            console_line(
                metrics, self.last_step, left * elapsed / steps, position=self.position
            )
        )
        beside = dict(more or {}) | (self._beside_estimate(memory) if self._sinks else {})
        for sink in self._sinks:
            sink.write(asdict(metrics) | beside)
        self._last_step = step
        self._started = ended
        self.data_seconds = data_seconds
        return metrics

    def predicted_seconds(self) -> float:
        """Return the seconds of a step before one has run; 0.0 if nothing is known, as on CPUs.

        The longer of what the planner predicts, once that is there, and what all FLOPs take at a low MFU, with full
        attention counted: the documents of some step may be as long as its sequences.
        """
        if self.peak_flops is None:
            return self._estimated("step_seconds") or 0.0
        flops = self.tokens_per_step * self.flops_per_token[0] / self.dims.size("world")
        return max(self._estimated("step_seconds") or 0.0, flops / (_LOW_MFU * self.peak_flops))

    def _estimated(self, name: str) -> float | None:
        """Return a number that `lct estimate` has predicted for GPUs; None on CPUs, and until it is there."""
        if self.device.type == "cuda":
            with suppress(OSError, ValueError, KeyError):
                return float(json.loads(self._estimate.read_text(encoding="utf-8"))[name])
        return None

    def _beside_estimate(self, memory: float) -> dict[str, float]:
        """Return the peak that `lct estimate` has predicted for GPUs, once it is there; the first time, log both."""
        if self._predicted is None and (size := self._estimated("allocated")) is not None:
            self._predicted = size / 2**30
            logger.info(
                f"memory: {memory:.1f} GiB allocated at the peak, {self._predicted:.1f} GiB predicted"
            )
        return {} if self._predicted is None else {"memory_predicted_gib": self._predicted}

    def _of_all_ranks(
        self, values: Sequence[float], operation: Literal["sum", "max"]
    ) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        return all_reduce(numbers, self._all_ranks, operation).tolist()

    def close(self) -> None:
        for sink in (*self._sinks, *self._validation):
            sink.close()

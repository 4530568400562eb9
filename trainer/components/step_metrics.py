"""The values of a step: its metrics, the values that they are computed from, and the loss on validation data."""

import math
from dataclasses import dataclass

import torch

from trainer.components.device_clock import Mark
from trainer.observer import Positions


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
    """Share (0 to 1) of the device's bfloat16 peak with full attention counted; None if the peak is not known."""
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
    """Values that the metrics of a step need and that the next step changes.

    Attributes:
        sequence_losses: Mean loss of each sequence, (B,), see `MetricsLogger.log`.
        lr: The learning rate.
        epoch: Passes over the data.
        positions: Positions of the data streams.
        waited: Seconds that this rank waited for data since the last logged step.
        end: The end of the step. None: the step ends when it is logged.
    """

    sequence_losses: torch.Tensor
    lr: float
    epoch: float
    positions: Positions
    waited: float
    end: Mark | None


def perplexity(loss: float) -> float:
    """Return exp(loss), or inf if it is too large for a float.

    Args:
        loss: Mean cross entropy.
    """
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation.

    Attributes:
        loss: Mean cross entropy of the tokens that have a label.
        tokens: Number of these tokens.
        seconds: Time of the validation.
    """

    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity(self.loss)

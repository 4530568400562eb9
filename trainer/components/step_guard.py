"""What a step's loss and gradient norm mean for the run: it stops, it leaves out the update, or it warns of a spike."""

import math
import statistics
from collections import deque
from collections.abc import Mapping

from trainer.config.schema import Training
from trainer.observer import Observer
from trainer.runtime.console import logger

SPIKE_STEPS, SPIKE_LEAST, SPIKE_DEVIATIONS, SPIKE_SHARE = 100, 20, 6.0, 0.05
"""A loss is a spike if it is above the mean of the last steps, by deviations and by a share of the mean; after at least
so many steps."""


class TrainingError(RuntimeError):
    """The run cannot continue. The message says why, so that no trace is needed."""


class StepGuard(Observer):
    """Judges each step by its loss and gradient norm, which are sums over all ranks: all ranks decide alike."""

    def __init__(self, training: Training) -> None:
        self._skips = training.on_nonfinite == "skip"
        self._most = training.max_skipped_steps if self._skips else 0
        self.skipped = 0
        """Steps of this run whose update was left out."""
        self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=SPIKE_STEPS)

    def should_skip(self, step: int, loss: float, norm: float) -> bool:
        """Return whether this step has no update, and warn if so, or of a spike.

        Raises:
            TrainingError: the loss or the norm is not finite, and no more steps may be skipped.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            self._warn_of_a_spike(step, loss)
            return False
        found = (
            f"step {step}: the loss is {loss}, the gradient norm {norm}, and both must be finite; the weights are "
            f"those of step {step - 1 - self._in_a_row}"
        )
        if self._in_a_row == self._most:
            skipped = f"training.max_skipped_steps = {self._most} steps before it were skipped; " if self._most else ""
            raise TrainingError(
                f"{found}; {skipped}a lower optimizer.lr or a longer lr_scheduler.warmup_steps often helps"
            )
        self._in_a_row += 1
        self.skipped += 1
        logger.warning(f"{found}; this step is skipped, {self._in_a_row} in a row of at most {self._most}")
        return True

    def record(self, positions: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
        """Return the number of skipped steps, where steps may be skipped."""
        return {"skipped_steps": self.skipped} if self._skips else {}

    def _warn_of_a_spike(self, step: int, loss: float) -> None:
        before = self._losses
        if len(before) >= SPIKE_LEAST:
            mean, deviation = statistics.fmean(before), statistics.pstdev(before)
            if loss - mean > max(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * abs(mean)):
                logger.warning(
                    f"step {step}: the loss {loss:.3f} is a spike: the mean of the last {len(before)} steps is "
                    f"{mean:.3f}, their standard deviation {deviation:.3f}"
                )
        before.append(loss)

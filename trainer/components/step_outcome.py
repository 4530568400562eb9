"""The few numbers of a step that the host reads: loss, gradient norm, votes. One reduction, one reading.

From them the run decides to stop, to skip the update, or to warn of a spike.

The numbers are read during the next step, so that the host never waits before it launches the next forward:

    host    launch N | launch forward, backward N+1 | read N | launch norm, update N+1 | ...
    device           | norm, update N               | forward, backward N+1            | ...

The device skips an update that is not finite by itself (`mask_update`). The host reads step N before it launches the
update of step N + 1, so no update follows a step that ends the run. If something depends on a step, the step is read
at once: the outcome must be known before a checkpoint, a validation, or the end.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from longshard.sharding.exchange import all_reduce
from longshard.sharding.tensors import to_device
from trainer.config.schema import Training
from trainer.observer import Observer, Positions
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.console import logger

SPIKE_STEPS = 100
SPIKE_LEAST = 20
SPIKE_DEVIATIONS = 6.0
SPIKE_SHARE = 0.05
"""A loss is a spike if it is above the mean of the last SPIKE_STEPS steps by SPIKE_DEVIATIONS standard deviations and
by SPIKE_SHARE of the mean. At least SPIKE_LEAST steps are needed."""


class StepTotals:
    """Sums over all ranks. The copy to the host starts at once, while the device continues; `read` waits for it.

    Args:
        loss: This rank's part of the loss, a scalar on the device of the job. Ranks of one tensor-parallel group have
            the same part.
        squares: This rank's part of the squared gradient norm, a scalar on the device.
        votes: See `Stop.votes` and `Checkpointer.vote`.
        dims: The meshes of the run.
    """

    def __init__(
        self, loss: Tensor, squares: Tensor, votes: Sequence[float], dims: ParallelDims
    ) -> None:
        local_sums = torch.stack([loss.double() / dims.size("tp"), squares])
        device_votes = to_device(torch.tensor(votes, dtype=torch.float64), local_sums.device)
        self._sums = all_reduce(torch.cat([local_sums, device_votes]), dims["world"])
        self._host = self._sums
        self._arrived = None
        if self._sums.is_cuda:
            self._host = self._sums.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def norm(self) -> Tensor:
        """The gradient norm, a scalar, float64, on the device."""
        return self._sums[1].sqrt()

    @property
    def not_finite(self) -> Tensor:
        """One if the loss or the gradient norm is not finite, else zero: a scalar, float32, on the device."""
        return 1 - self._sums[:2].isfinite().all().float()

    def read(self) -> tuple[float, float, list[float]]:
        """Return loss, gradient norm and votes of the whole job, after the copy has arrived. Not a collective.

        The host waits for no other numbers in a step.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, squares, *votes = self._host.tolist()
        return loss, math.sqrt(squares), votes


class TrainingError(RuntimeError):
    """The run cannot continue. The message says why, so no traceback is needed."""


class StepGuard(Observer):
    """Judges each step by its loss and gradient norm. Both are sums over all ranks, so all ranks decide alike.

    Args:
        training: Table `[training]`.
    """

    def __init__(self, training: Training) -> None:
        self._skips = training.on_nonfinite == "skip"
        self._updates_early = training.early_update
        self._most = training.max_skipped_steps if self._skips else 0
        self.skipped = 0
        """Steps of this run whose update was left out."""
        self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=SPIKE_STEPS)

    def should_skip(self, step: int, loss: float, norm: float) -> bool:
        """Return whether to skip the update of this step, and warn if so. Warn also of a spike of the loss.

        Args:
            step: Number of the step.
            loss: Loss of the step.
            norm: Gradient norm of the step.

        Raises:
            TrainingError: The loss or the norm is not finite, and no more steps in a row may be skipped.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            self._warn_of_a_spike(step, loss)
            return False
        weights = f"the weights are from step {step - 1 - self._in_a_row}"
        weights = "parts of its update are done" if self._updates_early else weights
        seen = f"step {step}: the loss is {loss}, the gradient norm {norm}, and both must be finite; {weights}"
        if self._in_a_row == self._most:
            skipped = (
                f"training.max_skipped_steps = {self._most} steps before it were skipped; "
                if self._most
                else ""
            )
            raise TrainingError(
                f"{seen}; {skipped}a lower optimizer.lr or a longer lr_scheduler.warmup_steps often helps"
            )
        self._in_a_row += 1
        self.skipped += 1
        logger.warning(
            f"{seen}; this step is skipped, {self._in_a_row} in a row of at most {self._most}"
        )
        return True

    def record(self, positions: Positions) -> dict[str, int]:
        """Return the number of skipped steps, if steps may be skipped.

        Args:
            positions: Positions of the data streams; not used.
        """
        return {"skipped_steps": self.skipped} if self._skips else {}

    def _warn_of_a_spike(self, step: int, loss: float) -> None:
        before = self._losses
        if len(before) >= SPIKE_LEAST:
            mean = statistics.fmean(before)
            deviation = statistics.pstdev(before)
            if loss - mean > max(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * abs(mean)):
                logger.warning(
                    f"step {step}: the loss {loss:.3f} is a spike: the mean of the last {len(before)} steps is "
                    f"{mean:.3f}, their standard deviation {deviation:.3f}"
                )
        before.append(loss)

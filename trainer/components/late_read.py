"""The outcome of a step, read during the next step: the host never waits before it launches the next forward.

    host    launch N | launch forward, backward N+1 | read N | launch norm, update N+1 | ...
    device           | norm, update N               | forward, backward N+1            | ...

The device leaves out an update that is not finite by itself (`mask_update`). The host reads step N before it launches
the update of step N + 1, so no update follows a step that ends the run. A step that something depends on is read at
once: then the outcome is known before a checkpoint, a validation, or the end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepRecord:
    """What the metrics of a step need and the next step changes.

    sequence_losses: see `MetricsLogger.log`; positions: of the data streams; waited: seconds for data since the last
    logged step; ended: when the step ended, by `time.perf_counter`; None: when it is logged.
    """

    sequence_losses: torch.Tensor
    lr: float
    epoch: float
    positions: Mapping[int, Mapping[str, int]]
    waited: float
    ended: float | None


class LateRead:
    """Holds the rest of one step, which reads the outcome, until the next step has launched its backward."""

    def __init__(self) -> None:
        self._rest: Callable[[], None] | None = None

    def launched(self, rest: Callable[[], None], *, at_once: bool) -> None:
        """Take the rest of a step; do it now if `at_once`, else when `finish` is called."""
        self._rest = rest
        if at_once:
            self.finish()

    def finish(self) -> None:
        """Do the rest of the step before, if it is left."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()

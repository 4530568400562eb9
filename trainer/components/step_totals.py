"""The few numbers of a step that the host reads: loss, gradient norm, votes. One reduction, one reading.

They are read during the next step, so that the host never waits before it launches the next forward:

    host    launch N | launch forward, backward N+1 | read N | launch norm, update N+1 | ...
    device           | norm, update N               | forward, backward N+1            | ...

The device leaves out an update that is not finite by itself (`mask_update`). The host reads step N before it launches
the update of step N + 1, so no update follows a step that ends the run. A step that something depends on is read at
once: then the outcome is known before a checkpoint, a validation, or the end.
"""

import math
from collections.abc import Sequence

import torch

from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.exchange import all_reduce
from trainer.distributed.sharding.tensors import to_device


class StepTotals:
    """Sums over all ranks. They are sent to the host from the start, while the device continues; `read` waits for them.

    loss, squares: this rank's parts of the loss and of the squared gradient norm, () on the device of the job; ranks of
    one tensor-parallel group have the same part of the loss. votes: see `Stop.votes` and `Checkpointer.vote`.
    """

    def __init__(self, loss: torch.Tensor, squares: torch.Tensor, votes: Sequence[float], dims: ParallelDims) -> None:
        mine = torch.stack([loss.double() / dims.size("tp"), squares])
        device_votes = to_device(torch.tensor(votes, dtype=torch.float64), mine.device)
        self._sums = all_reduce(torch.cat([mine, device_votes]), dims["world"])
        self._host, self._arrived = self._sums, None
        if self._sums.is_cuda:
            self._host = self._sums.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def norm(self) -> torch.Tensor:
        """The gradient norm, () float64 on the device."""
        return self._sums[1].sqrt()

    @property
    def not_finite(self) -> torch.Tensor:
        """One if the loss or the gradient norm is not finite, else zero: () float32 on the device."""
        return 1 - self._sums[:2].isfinite().all().float()

    def read(self) -> tuple[float, float, list[float]]:
        """Return loss, gradient norm and votes: all that the host waits for in a step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, squares, *votes = self._host.tolist()
        return loss, math.sqrt(squares), votes

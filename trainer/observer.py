"""What takes part in the steps of a run beside the loop: `Observer`. It imports nothing, so any folder can use it."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Positions = Mapping[int, Mapping[str, Any]]
"""Where data streams are, by number: the entries of their states."""


class Observer:
    """Counts, reports, or keeps state without gradients. Every moment does nothing unless it is overridden.

    All ranks call each moment of all observers in the same order, so a moment may use collectives. In one step:

        start_step -> for each micro-batch: batch, forward and backward, losses -> end_step -> record, if it is logged

    The host does not wait for the device, and may run one step ahead: `record` of a step may follow `batch` and
    `losses` of the next one. So add up what a step counts apart, and take it over in `end_step`.
    """

    def start_step(self) -> None:
        """Before the forwards of a step."""

    def batch(self, batch: Mapping[str, Any]) -> None:
        """Before the forward of a micro-batch, which this data-parallel rank has whole, text in host memory."""

    def losses(self, batch: Mapping[str, Any], losses: "torch.Tensor") -> None:
        """After the backward of a micro-batch, on ranks that have its losses.

        losses: (B, positions) of this rank, without gradient; in `batch` the tensors that the task cuts are cut.
        """

    def end_step(self, left_out: "torch.Tensor") -> None:
        """After the update. left_out: () float32 on the device, one if the step is not finite and changes no weight.

        The host does not know it yet: use `torch.where`.
        """

    def record(self, positions: Positions) -> Mapping[str, Any]:
        """Return what a logged step says in `metrics.jsonl`, by name: numbers, or lists.

        positions: of the data streams of this rank, by number. It may wait for the device.
        """
        return {}


OBSERVERS: list[str] = []
"""Where the functions are that build the observers of packages, "package.module:name"; see `register_observer`."""


def registered_observers() -> list[Callable[..., Observer]]:
    """Return the functions that build the observers which packages have added."""
    return [resolve_name(place) for place in OBSERVERS]

"""The interface `Observer`: code that takes part in the steps of a run, next to the loop.

This module imports nothing at run time, so any folder can use it.

State of the process: The observers that packages of `job.imports` registered. They are found by name; for ever.
"""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Positions = Mapping[int, Mapping[str, Any]]
"""Positions of data streams, by number: the entries of their states."""


class Observer:
    """Counts, reports, or keeps state without gradients. A method that is not overridden does nothing.

    All ranks call each method of all observers in the same order, so a method may use collectives. In one step:

        start_step -> for each micro-batch: batch, forward and backward, losses -> end_step -> record, if it is logged

    The host does not wait for the device, and may run one step ahead: `record` of a step may follow `batch` and
    `losses` of the next step. So keep the counts of the running step apart, and add them to the totals in `end_step`.
    """

    def start_step(self) -> None:
        """Called before the forwards of a step."""

    def batch(self, batch: Mapping[str, Any]) -> None:
        """Called before the forward of a micro-batch.

        Args:
            batch: The whole micro-batch of this data-parallel rank; text is in host memory.
        """

    def losses(self, batch: Mapping[str, Any], losses: "torch.Tensor") -> None:
        """Called after the backward of a micro-batch, on ranks that have its losses.

        Args:
            batch: The micro-batch; tensors that the task cuts are cut to this rank's part.
            losses: (B, positions) of this rank, without gradient.
        """

    def end_step(self, left_out: "torch.Tensor") -> None:
        """Called after the update. The host does not know `left_out` yet: use `torch.where`.

        Args:
            left_out: A scalar, float32, on the device: one if the step is not finite and changes no weight.
        """

    def record(self, positions: Positions) -> Mapping[str, Any]:
        """Return the entries of a logged step for `metrics.jsonl`, by name: numbers, or lists.

        It may wait for the device.

        Args:
            positions: Positions of the data streams of this rank, by number.
        """
        return {}


OBSERVERS: list[str] = []
"""Functions that build the observers of packages, as "package.module:name"; see `register_observer`."""


def registered_observers() -> list[Callable[..., Observer]]:
    """Return the functions that build the observers which packages have added."""
    return [resolve_name(place) for place in OBSERVERS]

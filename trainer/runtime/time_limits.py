"""How long collectives of training may take: as configured, or three times a step if steps are longer.

NCCL counts the time of a collective from its launch, when attention kernels of minutes may still run before it. So a
fixed time-out would end healthy runs of long sequences. A limit follows from the steps, the same on all ranks:

    until the first step is done   comm.init_timeout_seconds,  or 3 x the predicted step
    until the second one is done   comm.train_timeout_seconds, or 3 x the longer of prediction and first step
    from then on                   comm.train_timeout_seconds, or 3 x the longer of prediction and longest step since

Torch-free.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.config.schema import Comm
from trainer.runtime.console import logger

STEPS_OF_A_LIMIT = 3
"""Steps that fit into the time-out of a collective."""
_COMPILING_STEPS = 2
"""The first step also compiles and makes communicators, so the second step sets the limit again."""


class TimeLimits:
    """The time-out of collectives in each phase of a run.

    Args:
        comm: The configured time-outs, which a limit never goes below.
        highest: Returns the highest of all ranks' values; a collective.
        apply: Sets the time-out in seconds of all process groups of training.
    """

    def __init__(
        self, comm: Comm, highest: Callable[[float], float], apply: Callable[[float], None]
    ) -> None:
        self._highest = highest
        self._apply = apply
        self.seconds: float = comm.init_timeout_seconds
        """The current time-out, in seconds."""
        self._first = self.seconds
        self._least: float = comm.train_timeout_seconds
        self._longest = 0.0
        self._steps_read = 0
        self._is_due = False
        self._started = time.monotonic()

    def start(self, predicted: float) -> None:
        """Set the limit of the first step. A collective.

        Args:
            predicted: Seconds of a step, 0.0 if nothing is known.
        """
        predicted_limit = STEPS_OF_A_LIMIT * self._highest(predicted)
        self._first = max(self._first, predicted_limit)
        self._least = max(self._least, predicted_limit)
        self._set(self._first, "the predicted step")
        self._started = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent inside, in a validation or a save, out of the steps.

        Yields:
            None.
        """
        before = time.monotonic()
        yield
        self._started += time.monotonic() - before

    def vote(self) -> float:
        """Return 1.0 if a step of this rank has taken more than half of the limit, which should be raised, else 0.0."""
        return float(2 * self._longest > self.seconds)

    def step_was_read(self, asked: bool) -> None:
        """Record that the totals of a step have arrived, and how long the step took.

        `settle` then sets the limit, if a rank asked for it, or if the step is one of the first two.

        Args:
            asked: Whether a rank has voted for a higher limit.
        """
        now = time.monotonic()
        seconds = now - self._started
        self._started = now
        self._steps_read += 1
        starting = self._steps_read <= _COMPILING_STEPS
        self._longest = seconds if starting else max(self._longest, seconds)
        self._is_due = starting or asked

    def settle(self) -> None:
        """Set the limit again, if that is due; then it is a collective. It is due on all ranks after the same step."""
        if self._is_due:
            self._is_due = False
            self._longest = self._highest(self._longest)
            self._set(max(self._least, STEPS_OF_A_LIMIT * self._longest), "the longest step")

    @contextmanager
    def while_compiling(self) -> Iterator[None]:
        """Allow the time of the first step inside. Enter it on all ranks: to set a time-out may be a collective.

        Yields:
            None.
        """
        before = self.seconds
        self._set(max(self._first, before), "the predicted step")
        yield
        self._set(before, "the longest step")

    def _set(self, seconds: float, basis: str) -> None:
        if seconds == self.seconds:
            return
        self._apply(seconds)
        if seconds > self.seconds:
            logger.info(
                f"collectives may take {seconds:,.0f} s, {STEPS_OF_A_LIMIT} times {basis}"
            )
        self.seconds = seconds


def limits_raised(comm: Comm, step_seconds: float) -> str:
    """Return a sentence if configured time-outs are too short for a predicted step, else an empty text.

    Args:
        comm: Table `[comm]`.
        step_seconds: Predicted seconds of a step.
    """
    needed = STEPS_OF_A_LIMIT * step_seconds
    short = " and ".join(
        f"comm.{name} = {getattr(comm, name):g}"
        for name in ("init_timeout_seconds", "train_timeout_seconds")
        if getattr(comm, name) < needed
    )
    if not short:
        return ""
    return (
        f"{short} {'are' if ' and ' in short else 'is'} too short for a step of {step_seconds:,.0f} s, as predicted: "
        f"the run allows collectives {STEPS_OF_A_LIMIT} times a step, {needed:,.0f} s"
    )

"""Batches that are made while the device works."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from trainer.config.errors import ConfigError


class Loader(Protocol):
    """Endless batches of one data-parallel rank, with a position that is saved; see loader.py and fields.py."""

    epoch: float

    def __iter__(self) -> Any: ...

    def state_dict(self) -> dict[int, dict[str, int]]: ...

    def load_state_dict(self, states: Mapping[int, Mapping[str, int]]) -> None: ...


class _Step(NamedTuple):
    """The batches of one step, or why there are none; the loader's state and epoch before they were made."""

    batches: list[dict[str, Any]] | Exception
    state: dict[int, dict[str, int]]
    epoch: float


class BatchesAhead:
    """The micro-batches of a step, which may be made before the step needs them.

    The position, its state and `epoch` are those of the batches that were taken. number: of micro-batches of a step;
    prepare: what is done to each batch when it is made, such as its way to the device.
    """

    def __init__(self, loader: Loader, number: int, prepare: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._loader, self._number, self._prepare = loader, number, prepare
        self._batches = iter(loader)
        self._made: deque[_Step] = deque()

    def make(self, steps: int = 1) -> None:
        """Make the batches of the next `steps` steps, unless they are there. `take` raises what goes wrong."""
        while len(self._made) < steps and not (self._made and isinstance(self._made[-1].batches, Exception)):
            before = self._loader.state_dict(), self._loader.epoch
            try:
                made = [self._prepare(next(self._batches)) for _ in range(self._number)]
            except Exception as error:
                made = error
            self._made.append(_Step(made, *before))

    @property
    def failed(self) -> bool:
        """Whether batches cannot be made, because of the data; `check` says why."""
        return any(isinstance(step.batches, ConfigError) for step in self._made)

    def check(self) -> None:
        """Raise the error of batches that are made and cannot be taken."""
        for step in self._made:
            if isinstance(step.batches, Exception):
                raise step.batches

    def take(self) -> list[dict[str, Any]]:
        """Return the batches of the next step; what went wrong when they were made is raised here."""
        self.make()
        made = self._made.popleft().batches
        if isinstance(made, Exception):
            raise made
        return made

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._made[0].epoch if self._made else self._loader.epoch

    def state_dict(self) -> dict[int, dict[str, int]]:
        """Return the position of each data stream of this rank."""
        return self._made[0].state if self._made else self._loader.state_dict()

    def load_state_dict(self, states: Mapping[int, Mapping[str, int]]) -> None:
        """Resume from the merged states of all ranks."""
        self._made.clear()
        self._loader.load_state_dict(states)

"""Batches that are made while the device works."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trainer.config.errors import ConfigError


class Loader(Protocol):
    """Endless batches of one data-parallel rank, with a position that is saved; see loader.py and fields.py."""

    epoch: float

    def __iter__(self) -> Any: ...

    def state_dict(self) -> dict[int, dict[str, int]]: ...

    def load_state_dict(self, states: Mapping[int, Mapping[str, int]]) -> None: ...


class BatchesAhead:
    """The micro-batches of a step, which may be made before the step needs them.

    The position, its state and `epoch` are those of the batches that were taken. number: of micro-batches of a step;
    prepare: what is done to each batch when it is made, such as its way to the device.
    """

    def __init__(self, loader: Loader, number: int, prepare: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._loader, self._number, self._prepare = loader, number, prepare
        self._batches = iter(loader)
        self._made: list[dict[str, Any]] | Exception | None = None
        self._taken: tuple[dict, float] | None = None
        """State and epoch before the batches that are made and not taken yet."""

    def make(self) -> None:
        """Make the batches of the next step, unless they are there. `take` raises what goes wrong."""
        if self._made is not None:
            return
        self._taken = self._loader.state_dict(), self._loader.epoch
        try:
            self._made = [self._prepare(next(self._batches)) for _ in range(self._number)]
        except Exception as error:
            self._made = error

    @property
    def failed(self) -> bool:
        """Whether the next batches cannot be made, because of the data; `take` says why."""
        return isinstance(self._made, ConfigError)

    def take(self) -> list[dict[str, Any]]:
        """Return the batches of the next step.

        Raises:
            Exception: of the data, when the batches were made.
        """
        self.make()
        made, self._made = self._made, None
        if isinstance(made, Exception):
            raise made
        return made

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._loader.epoch if self._made is None else self._taken[1]

    def state_dict(self) -> dict[int, dict[str, int]]:
        """Return the position of each data stream of this rank."""
        return self._loader.state_dict() if self._made is None else self._taken[0]

    def load_state_dict(self, states: Mapping[int, Mapping[str, int]]) -> None:
        """Resume from the merged states of all ranks."""
        self._made = None
        self._loader.load_state_dict(states)

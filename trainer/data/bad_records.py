"""Records that cannot be used, and what is done with them: the run stops, or goes on without them. Torch-free."""

from __future__ import annotations

import logging
from typing import Any

from trainer.config.errors import ConfigError

logger = logging.getLogger("trainer")


class BadRecord(ConfigError):
    """One document of a data set cannot be used; the others can."""


class Skipped:
    """Counts bad records that are left out. The log has the 1st, 10th, 100th ... with its reason."""

    def __init__(self) -> None:
        self._number = 0

    def add(self, error: BadRecord) -> None:
        """Count a bad record."""
        self._number = number = self._number + 1
        if number == 10 ** (len(str(number)) - 1):
            logger.warning(f"{number:,} bad record{'s' * (number > 1)} left out so far; this one: {error}")


class Skipping:
    """A source whose bad records are empty documents, which leave no trace in sequences.

    They keep their numbers, so that the order of the others stays, and is the same on every layout.
    """

    def __init__(self, source: Any) -> None:
        self.source, self._bad, self._skipped = source, set[int](), Skipped()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> Any:
        try:
            return self.source[i]
        except BadRecord as error:
            if i not in self._bad:  # every epoch meets it again
                self._bad.add(i)
                self._skipped.add(error)
            return ""

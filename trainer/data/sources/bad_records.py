"""Records that cannot be used, and what is done with them: the run stops, or leaves them out. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.config.errors import ConfigError

logger = logging.getLogger("trainer")


class BadRecord(ConfigError):
    """One document of a data set cannot be used; the others can."""


class Skipped:
    """Bad records that are left out. The log has the 1st, 10th, 100th ... with its reason."""

    def __init__(self) -> None:
        self.number = 0
        self.first = ""
        """Why the first one is bad."""

    @contextmanager
    def counted(self, skips: bool) -> Iterator[None]:
        """Count a bad record that is met inside; raise it if bad records are not skipped."""
        try:
            yield
        except BadRecord as error:
            if not skips:
                raise
            self.number = number = self.number + 1
            self.first = self.first or str(error)
            if number == 10 ** (len(str(number)) - 1):
                logger.warning(f"{number:,} bad record{'s' * (number > 1)} left out so far; this one: {error}")

"""Records that cannot be used: the run stops, or leaves them out. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.runtime.console import logger


class BadRecord(ConfigError):
    """One document of a data set cannot be used; the others can."""


class Tally:
    """Counts what is left out. The log has the 1st, 10th, 100th ... with its reason.

    number: so far; first: the reason of the first one.
    """

    def __init__(self, what: str = "bad records") -> None:
        self._what, self.number, self.first = what, 0, ""

    def count(self, reason: object) -> None:
        """Count one."""
        self.number += 1
        self.first = self.first or str(reason)
        if self.number == 10 ** (len(str(self.number)) - 1):
            logger.warning(f"{self._what} left out so far: {self.number:,}; this one: {reason}")

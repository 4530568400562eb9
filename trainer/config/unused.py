"""Keys that do nothing under the other settings are refused when they are set, not ignored."""

from collections.abc import Iterable
from operator import attrgetter

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig


def check_unused(config: JobConfig, keys: Iterable[str], reason: str) -> None:
    """Check that the keys have their defaults. reason: when they have no effect, and what would work.

    Raises:
        ConfigError: the first one that has not.
    """
    defaults = JobConfig()
    for key in keys:
        value = attrgetter(key)(config)
        if value != attrgetter(key)(defaults):
            value = list(value) if isinstance(value, tuple) else value
            raise ConfigError(f"{key} = {value!r} has no effect {reason}")

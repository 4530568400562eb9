"""The exception for wrong settings and inputs. `train.py` prints it and exits with code 2."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from trainer.config.spelling import nearest


class ConfigError(ValueError):
    """A wrong setting or input. The message is one sentence: the value, the rule, and what would work.

    Several wrong settings that are found together have a line each, below a first line with their number.
    """


class SharedConfigError(ConfigError):
    """An error that every rank raises at the same point, so that one rank prints it."""


class MissingFile(ConfigError):
    """An input that is not on this machine. A check for other machines tells it, and goes on."""


class Problems:
    """Errors that are told together, so that a user does not meet them one after the other."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep an error that is raised inside for `raise_all`."""
        try:
            yield
        except ConfigError as error:
            self._found.append(str(error))

    def raise_all(self) -> None:
        """Raise the errors that were collected, if any.

        Raises:
            ConfigError: the only error, or all of them.
        """
        if len(self._found) == 1:
            raise ConfigError(self._found[0])
        if self._found:
            raise ConfigError("\n  ".join([f"{len(self._found)} settings are wrong:", *self._found]))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest choice, or all choices if none is near."""
    choices = list(choices)
    near = nearest(word, choices)
    if near is not None:
        return f"; did you mean {near!r}?"
    return f"; choose one of {', '.join(choices)}" if choices else ""

"""The exception for wrong settings and inputs. `train.py` prints it and exits with code 2."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from trainer.config.spelling import nearest

P = ParamSpec("P")
T = TypeVar("T")


class ConfigError(ValueError):
    """A wrong setting or input. The message is one sentence: the value, the rule, and what would work.

    Several wrong settings that are found together have a line each, below a first line with their number.
    """


class SharedConfigError(ConfigError):
    """An error that every rank raises at the same point, so that one rank prints it."""


class MissingFile(ConfigError):
    """An input that is not on this machine. `lct check` for another machine reports it and continues."""


class Problems:
    """Errors that are reported together, so that a user does not meet them one after the other.

    missing: takes the messages of `MissingFile`, which are then no errors.
    """

    def __init__(self, missing: list[str] | None = None) -> None:
        self._found: list[ConfigError] = []
        self._missing = missing

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep an error that is raised inside for `raise_all`."""
        try:
            yield
        except ConfigError as error:
            if isinstance(error, MissingFile) and self._missing is not None:
                self._missing.append(str(error))
            elif str(error) not in map(str, self._found):
                self._found.append(error)

    def check(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what the function returns, or None if it raises an error, which is kept for `raise_all`."""
        with self.collected():
            return function(*args, **kwargs)
        return None

    def raise_all(self) -> None:
        """Raise the errors that were collected, if any: the only ConfigError, or one with all of them."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            lines = [f"{len(self._found)} settings are wrong:", *map(str, self._found)]
            raise ConfigError("\n  ".join(lines))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest choice, or all choices if none is near."""
    choices = list(choices)
    near = nearest(word, choices)
    if near is not None:
        return f"; did you mean {near!r}?"
    return f"; choose one of {', '.join(choices)}" if choices else ""

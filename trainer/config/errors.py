"""The exception for wrong settings and inputs. `train.py` prints it as one sentence and exits with code 2."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A wrong setting or input. The message is one sentence: the value, the rule, and what would work."""


class SharedConfigError(ConfigError):
    """An error that every rank raises at the same point, so that one rank prints it."""


class MissingFile(ConfigError):
    """An input that is not on this machine. A check for other machines tells it, and goes on."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest choice, or all choices if none is near."""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; choose one of {', '.join(choices)}" if choices else ""

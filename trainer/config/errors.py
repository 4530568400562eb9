"""The one exception for settings and inputs that cannot work; `train.py` prints it as one sentence and exits with 2."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A wrong setting or input. The message is one sentence: the value, the rule, and what would work."""


class SharedConfigError(ConfigError):
    """One that every rank raises at the same point, so that one of them is enough to say it."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest choice, or the choices themselves when none is near."""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; choose one of {', '.join(choices)}" if choices else ""

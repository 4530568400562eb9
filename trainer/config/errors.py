"""Errors for wrong settings and inputs, and the search for the name that a misspelled word means."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

_SIMILAR, _SIMILAR_SHORT = 0.79, 0.66
"""The least similarity, a `ratio` of difflib, of a near name: one wrong letter in five; for short words, in three."""


class ConfigError(ValueError):
    """A wrong setting or input. The message is one sentence: the value, the rule, and what would work.

    Several wrong settings that are found together have a line each, below a first line with their number.
    """

    parts: "tuple[ConfigError, ...]" = ()
    """The single errors that this error joins, if several settings are wrong."""


class SharedConfigError(ConfigError):
    """An error that every rank raises at the same point, so that one rank prints it."""


class MissingFile(ConfigError):
    """An input that is not on this machine. `lct check` for another machine reports it and continues."""


class Problems:
    """Errors that are reported together, so that a user sees all of them at once.

    Args:
        missing: Takes the messages of `MissingFile`, which are then no errors.
    """

    def __init__(self, missing: list[str] | None = None) -> None:
        self._errors: list[ConfigError] = []
        self._missing = missing

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Yield; keep a ConfigError that is raised inside, for `raise_all`. Other errors pass."""
        try:
            yield
        except ConfigError as error:
            for each in error.parts or (error,):
                self.add(each)

    def add(self, error: ConfigError) -> None:
        """Keep an error for `raise_all`, or only its message if it is a `MissingFile` and `missing` collects messages.

        Args:
            error: The error.
        """
        if isinstance(error, MissingFile) and self._missing is not None:
            self._missing.append(str(error))
        elif str(error) not in map(str, self._errors):
            self._errors.append(error)

    def raise_all(self) -> None:
        """Raise the collected errors.

        Raises:
            ConfigError: The only collected error, or one error that joins several.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            lines = [f"{len(self._errors)} settings are wrong:", *map(str, self._errors)]
            several = ConfigError("\n  ".join(lines))
            several.parts = tuple(self._errors)
            raise several


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type.

    Args:
        error: The error.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest choice, all choices if none is near, or '' without choices.

    Args:
        word: The word of the user.
        choices: The known words.
    """
    choices = list(choices)
    near = nearest(word, choices)
    if near is not None:
        return f"; did you mean {near!r}?"
    return f"; choose one of {', '.join(choices)}" if choices else ""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name with the nearest spelling, None if no name is near.

    A name is near if difflib finds it similar, as when a few letters are wrong, missing, added or swapped; if the word
    begins the name, with four letters or more; or if the word has two or more parts, and the name has them all. Case,
    hyphens, underscores, dots and spaces do not count. If only the value of a digit differs, as in llama4 and llama3,
    the name is not near.

    Args:
        word: The word of the user.
        names: The known names.
    """
    plain = _plain(word)
    originals = {_plain(name): name for name in names}
    others = [other for other in originals if not _another_number(plain, other)]
    similar = _SIMILAR_SHORT if len(plain) in (3, 4) else _SIMILAR
    for other in get_close_matches(plain, others, 1, similar):
        return originals[other]
    parts = set(re.split(r"[-_. ]", word.lower()))
    fitting = [
        name
        for other, name in originals.items()
        if (len(plain) >= 4 and other.startswith(plain))
        or (len(parts) > 1 and parts <= set(re.split(r"[-_. ]", name.lower())))
    ]
    return min(fitting, key=len, default=None)


def _another_number(a: str, b: str) -> bool:
    """Return whether two words differ only in the value of a digit: llama4 is another model than llama3."""
    letters = [re.sub(r"\d", "0", word) for word in (a, b)]
    return a != b and letters[0] == letters[1]


def _plain(word: str) -> str:
    return re.sub(r"[-_. ]", "", word.lower())

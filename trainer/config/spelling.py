"""Find the name that a misspelled word stands for. A guess is made only if the spelling is near."""

import re
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is spelled most like `word`, or None if no name is near.

    Near is: a few letters wrong, missing, added or swapped; the beginning of the name (four letters or more); or two
    or more of its words. Case, hyphens and underscores do not count.
    """
    names, plain = list(names), _plain(word)
    distances = [(_distance(plain, _plain(name)), name) for name in names]
    near = [(distance, name) for distance, name in distances if distance <= _allowed(plain, _plain(name))]
    if near:
        return min(near, key=lambda pair: pair[0])[1]
    parts = set(re.split(r"[-_. ]", word.lower()))
    begun = [name for name in names if len(plain) >= 4 and _plain(name).startswith(plain)]
    whole = [name for name in names if len(parts) > 1 and parts <= set(re.split(r"[-_. ]", name.lower()))]
    return min([*begun, *whole], key=len, default=None)


def _plain(word: str) -> str:
    return re.sub(r"[-_. ]", "", word.lower())


def _allowed(a: str, b: str) -> int:
    """Return how many letters of two words may differ: none of 2, one of 3 to 6, two of 7 to 11, three of more."""
    shorter = min(len(a), len(b))
    return (shorter > 2) + (shorter > 6) + (shorter > 11)


def _distance(a: str, b: str) -> int:
    """Return the number of letters to insert, delete, replace or swap with their neighbour to turn `a` into `b`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and a[i - 2 : i] == other + b[j - 2]:
                best = min(best, earlier[j - 2] + 1)
            row.append(best)
    return row[-1]

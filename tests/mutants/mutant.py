"""The record of a planted mistake."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """In `file`, `old` (which stands there once) becomes `new`; at least one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str

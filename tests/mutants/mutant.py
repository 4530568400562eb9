"""The record of a planted mistake."""

import re
from typing import NamedTuple


class Mutant(NamedTuple):
    """In `file`, `old` (which stands there once) becomes `new`; at least one of `tests` must fail.

    Line breaks, indents and trailing commas of `old` are free, so that the formatter may move them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    def planted_in(self, text: str) -> str:
        """Return the text of the file with the mistake.

        Raises:
            ValueError: `old` is not there, or more than once.
        """
        places = [match.span() for match in re.finditer(_pattern(self.old), text)]
        if text.count(self.old) == 1:
            places = [(text.index(self.old), text.index(self.old) + len(self.old))]
        if len(places) != 1:
            raise ValueError(f"{self.name!r}: {self.old!r} stands {len(places)} times in {self.file}")
        start, stop = places[0]
        return text[:start] + self.new + text[stop:]


def _pattern(old: str) -> str:
    """Return a regular expression of a text that allows any spaces at brackets, and any kind of space elsewhere."""
    pieces = []
    for piece in re.findall(r",?\s*[\])}]|[\[({]\s*|\s+|[^\s\[\](){},]+|,", old):
        if piece[-1] in "])}":
            pieces.append(r",?\s*" + re.escape(piece[-1]))
        elif piece[0] in "[({":
            pieces.append(re.escape(piece[0]) + r"\s*")
        else:
            pieces.append(r"\s+" if piece.isspace() else re.escape(piece))
    return "".join(pieces)

"""Lines of JSON by number, read where an index says that they begin. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.bad_records import BadRecord
from trainer.data.chat import as_text, conversation
from trainer.data.file_index import BLOCK, ByteRanges, Index, allow_open_files, indexed, line_starts, unreadable
from trainer.data.tokenizer import replace_surrogates


class Line(NamedTuple):
    """A line of a file. where: says which one, as "file, line 7"; called for messages only."""

    content: bytes
    where: Callable[[], str]

    def text(self, name: str) -> str:
        """Return the field `name`.

        Raises:
            BadRecord: the line is no JSON object, or has no such string.
        """
        try:
            text = json.loads(self.content)[name]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise BadRecord(f'{self.where()}, must be a JSON object with a string field "{name}", in UTF-8')
        return text if text.isascii() else replace_surrogates(text)

    def chat(self) -> str:
        """Return the conversation, checked.

        Raises:
            BadRecord: it is none.
        """
        try:
            return as_text(conversation(self.content, self.where()))
        except BadRecord:
            raise
        except ConfigError as error:
            raise BadRecord(str(error)) from None


@dataclass(frozen=True)
class JsonLines:
    """The documents in files of lines. document: what is taken from a line."""

    files: Sequence[str]
    document: Callable[[Line], str]
    indices: Sequence[Index]
    ends: np.ndarray = field(init=False)
    """(files,) number of documents up to the end of each file."""
    reads: ByteRanges = field(init=False)
    line_ends: dict[int, np.ndarray] = field(default_factory=dict)
    """File -> where its lines end, of files with blank lines of which a line was named."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", np.cumsum([len(index.places) for index in self.indices], dtype=np.int64))
        object.__setattr__(self, "reads", ByteRanges(self.files))

    @classmethod
    def open(cls, files: Sequence[str], document: Callable[[Line], str]) -> JsonLines:
        """Return the documents of files, whose lines are indexed the first time.

        Raises:
            ConfigError: a file cannot be read, or there is no line.
        """
        allow_open_files(len(files))
        found = cls(files, document, [indexed(file, "lines", line_starts) for file in files])
        if not len(found):
            raise ConfigError(f"{files[0]} holds no line; give files with a JSON object a line")
        return found

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, i: int) -> str:
        number = int(np.searchsorted(self.ends, i, side="right"))
        index = self.indices[number]
        i -= int(self.ends[number]) - len(index.places)
        start = int(index.places[i])
        stop = int(index.places[i + 1]) if i + 1 < len(index.places) else index.stamp.size
        content = self.reads.read(number, start, stop)

        return self.document(Line(content, lambda: f"{self.files[number]}, line {self._line_number(number, i)}"))

    def digests(self, documents: int) -> list[int] | None:
        """Return a hash of each file of the first documents; None: these end within a file."""
        files = int(np.searchsorted(self.ends, documents)) + 1
        return [index.content for index in self.indices[:files]] if self.ends[files - 1] == documents else None

    def _line_number(self, number: int, i: int) -> int:
        """Return the line of document i of file `number`; for a file with blank lines, the lines are counted once."""
        index = self.indices[number]
        if len(index.places) == index.lines:
            return i + 1
        if number not in self.line_ends:
            self.line_ends[number] = line_ends(self.files[number])
        return 1 + int(np.searchsorted(self.line_ends[number], index.places[i]))


def line_ends(file: str) -> np.ndarray:
    """Return where the lines of a file end, (lines,) int64."""
    found, start = [np.empty(0, dtype=np.int64)], 0
    with open(file, "rb") as stream:
        while len(block := np.frombuffer(stream.read(BLOCK), dtype=np.uint8)):
            found.append(start + np.flatnonzero(block == 10))
            start += len(block)
    return np.concatenate(found)


def lines_of(file: str, start: int = 0, stop: int | None = None) -> Iterator[Line]:
    """Yield the lines of a file that are not blank; start, stop: of the bytes in which they begin.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with open(file, "rb") as stream:
            if start:
                stream.seek(start - 1)
                start += len(stream.readline()) - 1  # the line that begins before
            for content in stream:
                if stop is not None and start >= stop:
                    return
                place = start
                start += len(content)
                if content.strip():
                    yield Line(content, lambda place=place: f"{file}, line {_line_number(file, place)}")
    except OSError as error:
        raise unreadable(file, error) from None


def _line_number(file: str, place: int) -> int:
    return 1 + int(np.searchsorted(line_ends(file), place))

"""Records of a file, one after another: lines of JSON, rows of tables, whole texts. Torch-free.

A record says where it stands, and returns its document or raises `BadRecord`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.errors import ConfigError
from trainer.data.sources.bad_records import BadRecord
from trainer.data.sources.conversations import conversation
from trainer.data.sources.files import BLOCK, unreadable
from trainer.data.tokenizers.tokenizer import replace_surrogates


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

    def chat(self) -> dict[str, Any]:
        """Return the conversation, checked.

        Raises:
            BadRecord: it is none.
        """
        try:
            return conversation(self.content, self.where())
        except ConfigError as error:
            raise BadRecord(str(error)) from None


class Row(NamedTuple):
    """A row of a table, of which one column is read. where: says which row."""

    value: Any
    where: str

    def text(self, name: str) -> str:
        """Return the text; a null is an empty one.

        Raises:
            BadRecord: the column `name` holds something else.
        """
        if self.value is None:
            return ""
        if not isinstance(self.value, str):
            kind = type(self.value).__name__
            raise BadRecord(f'{self.where}, must have a text in UTF-8 in the column "{name}", not {kind}')
        return self.value if self.value.isascii() else replace_surrogates(self.value)


class TextFile(NamedTuple):
    """A file that is one document, in UTF-8."""

    file: str

    def text(self, _: str) -> str:
        """Return the whole text.

        Raises:
            BadRecord: it is no UTF-8.
            ConfigError: the file cannot be read.
        """
        try:
            return Path(self.file).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadRecord(
                f"{self.file} is not UTF-8 text (byte {error.start}); convert it, or leave it out of the data set"
            ) from None
        except OSError as error:
            raise unreadable(self.file, error) from None


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
    """Return the number of the line that begins at a byte."""
    number = 1
    with open(file, "rb") as stream:
        while block := stream.read(min(BLOCK, place)):
            number, place = number + block.count(b"\n"), place - len(block)
    return number

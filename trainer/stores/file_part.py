"""A part of an open file, read as a file of its own."""

import io
from typing import IO


class FilePart(io.RawIOBase):
    """A part of an open file. It is not kept in memory, where it would be a third copy of a tensor."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        )
        return self._at

    def readinto(self, into: memoryview) -> int:
        self._stream.seek(self._start + self._at)
        read = self._stream.readinto(memoryview(into)[: max(self._length - self._at, 0)])
        self._at += read
        return read

"""A part of an open file, read as a separate file."""

import io
from typing import IO


class FilePart(io.RawIOBase):
    """A part of an open file. It is not kept in memory, because it would be a third copy of a tensor.

    Args:
        stream: The open file.
        start: First byte.
        length: Number of bytes.
    """

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self._stream = stream
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place in the part.

        Args:
            offset: Number of bytes.
            whence: The place that `offset` counts from.

        Returns:
            The new place.
        """
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        )
        return self._at

    def readinto(self, into: memoryview) -> int:
        """Read bytes into a buffer. The place of the open file moves, too.

        Args:
            into: The buffer.

        Returns:
            Number of bytes that were read; 0 at the end of the part.
        """
        self._stream.seek(self._start + self._at)
        read = self._stream.readinto(memoryview(into)[: max(self._length - self._at, 0)])
        self._at += read
        return read

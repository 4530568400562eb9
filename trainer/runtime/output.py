"""Standard output and standard error that outlast their readers: text that nobody can read is dropped.

`lct train | head`, a `tee` that dies or a full disk under a log must not end hours of training. Torch-free.

State of the process: Standard output and standard error outlast their readers, until the process of a command or rank
ends.
"""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_STDOUT, _STDERR = 1, 2


class LastingOutput(io.RawIOBase):
    """A file descriptor whose reader may go away: from then on the descriptor is the null device.

    Args:
        descriptor: The file descriptor.
        is_log: The text only reports on work, whose result is elsewhere. Then any text that cannot be written is
            dropped, also on a full disk, and standard error reports the first dropped text of standard output.
    """

    def __init__(self, descriptor: int, *, is_log: bool) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._is_log = is_log
        self._reported = False

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: "bytes | memoryview") -> int:
        """Write everything, or drop the remaining bytes.

        Args:
            data: The bytes.

        Returns:
            The length of the data.

        Raises:
            OSError: The text is no log, and cannot be written for another reason than a reader that went away.
        """
        left = memoryview(data).cast("B")
        length = len(left)
        try:
            while left:
                left = left[self._write_some(left) :]
        except OSError as error:
            if not self._is_log and not isinstance(error, BrokenPipeError):
                raise
            self._drop(error)
        return length

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another process has made the terminal or pipe non-blocking
            select.select([], [self._descriptor], [])
            return 0

    def _drop(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            _to_null_device(self._descriptor)  # for native code that writes there too
        if self._is_log and not self._reported and self._descriptor != _STDERR:
            line = f"note: standard output cannot be written ({error.strerror}): the work goes on without it\n"
            with suppress(OSError):
                os.write(_STDERR, line.encode())
        self._reported = True


def outlast_readers(*, buffered: bool, is_log: bool) -> None:
    """Replace the output streams of this process, see `LastingOutput`. A closed descriptor becomes the null device.

    Streams without a descriptor, for example of a test, stay.

    Args:
        buffered: Write whole lines; otherwise each piece of text at once, as `python -u` does.
        is_log: See `LastingOutput`.
    """
    sys.stdout = _lasting(sys.stdout, _STDOUT, buffered=buffered, is_log=is_log)
    sys.stderr = _lasting(sys.stderr, _STDERR, buffered=buffered, is_log=True)


@contextmanager
def outlasting_readers(*, is_log: bool) -> Iterator[None]:
    """Replace the output streams inside, see `outlast_readers`; they write whole lines.

    Args:
        is_log: See `LastingOutput`.

    Yields:
        None.
    """
    before = sys.stdout, sys.stderr
    outlast_readers(buffered=True, is_log=is_log)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


def _lasting(
    stream: io.TextIOBase | None, descriptor: int, *, buffered: bool, is_log: bool
) -> io.TextIOBase:
    encoding, errors = "utf-8", "backslashreplace"
    if stream is None:  # Python has started with this descriptor closed
        _to_null_device(descriptor)
    else:
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError, AttributeError):
            return stream
        stream.flush()
        encoding = stream.encoding
        errors = stream.errors
    raw = LastingOutput(descriptor, is_log=is_log)
    binary = io.BufferedWriter(raw) if buffered else raw
    return io.TextIOWrapper(
        binary,
        encoding=encoding,
        errors=errors,
        line_buffering=buffered,
        write_through=not buffered,
    )


def _to_null_device(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)

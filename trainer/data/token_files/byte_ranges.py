"""Reads ranges of bytes of many files, which stay open as far as the process may. Torch-free.

State of the process: The limit of open files is as high as the system allows, until the process ends.
"""

import os
import resource
from functools import lru_cache, partial

from trainer.config.errors import ConfigError
from trainer.data.sources.files import reading

_OTHER_FILES = 512  # open files of a training process: connections, libraries, devices
_MOST_FILES = 1 << 16


class ByteRanges:
    """Reads ranges of bytes of files. Up to the limit of the process, files stay open.

    Files are not mapped: a mapped file that shrinks ends the process without a message (SIGBUS).
    """

    def __init__(self) -> None:
        self._opened = lru_cache(maxsize=_open_files_allowed())(
            partial(open, mode="rb", buffering=0)
        )

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file. The file stays open for later reads.

        Args:
            file: The file.
            start: The first byte, from 0.
            stop: The end, not included.

        Raises:
            ConfigError: The file cannot be read, or is shorter.
        """
        parts = []
        here = start
        with reading(file):
            opened = self._opened(file)
            while here < stop and (
                part := os.pread(opened.fileno(), min(stop - here, 1 << 30), here)
            ):
                parts.append(part)
                here += len(part)
        if here < stop:
            raise ConfigError(
                f"{file} is shorter than when the run began to read it (byte {stop} is missing); restore it"
            )
        return b"".join(parts)


def _open_files_allowed() -> int:
    """Raise this process's limit of open files as far as the system allows; return how many data files may be open.

    At least 64 data files may be open, even if the limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - _OTHER_FILES, 64)

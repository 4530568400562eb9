"""Places in large files: an index that is built once and cached, and reads of ranges of bytes. Torch-free.

A cached index lies in `$XDG_CACHE_HOME/long-context-trainer`, by default below `~/.cache`: one file for each data file.
It belongs to the data file's size, time, head and tail. An index of an older content is replaced.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config.errors import ConfigError

logger = logging.getLogger("trainer")

Scan = Callable[[str], Iterator[tuple[np.ndarray, int]]]
"""file -> for each of its blocks the places in it, int64, and the number of lines."""

BLOCK = 1 << 24  # bytes that a scan reads at once
_FORMAT = 1
_ENDS = 1 << 16  # bytes of head and tail that tell a file's content
_SAY_SECONDS = 10.0
_OPEN_FILES = 64
_OTHER_FILES = 512  # of a process that trains: connections, libraries, devices, those above
_BLANK = np.frombuffer(b" \t\r\n\v\f", dtype=np.uint8)


class Stamp(NamedTuple):
    """What a file is known by: bytes, time of the last change (ns), and a 63-bit hash of its size, head and tail."""

    size: int
    time: int
    content: int


class Index(NamedTuple):
    """places: (n,) int64, ascending; lines: number of lines of the file, where the places are lines."""

    places: np.ndarray
    lines: int
    stamp: Stamp


def allow_open_files(mapped: int) -> None:
    """Raise this process's limit of open files, if it is lower than that many mapped ones need: each holds one.

    Raises:
        ConfigError: the system does not allow as many.
    """
    needed, (soft, hard) = mapped + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"the data set needs {needed:,} open files, and a process may have {hard:,} here (ulimit -Hn); raise that "
            "limit, or put the documents into fewer files"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def unreadable(file: str, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read."""
    return ConfigError(f"{file} cannot be read ({error.strerror}); restore it, or give files that you may read")


def stamp_of(file: str) -> Stamp:
    """Return the stamp of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open(file, "rb") as stream:
            status = os.fstat(stream.fileno())
            digest = hashlib.blake2b(str(status.st_size).encode(), digest_size=8)
            digest.update(stream.read(_ENDS))
            stream.seek(max(status.st_size - _ENDS, 0))
            digest.update(stream.read(_ENDS))
    except OSError as error:
        raise unreadable(file, error) from None
    return Stamp(status.st_size, status.st_mtime_ns, int.from_bytes(digest.digest(), "little") >> 1)


def cache_folder() -> Path:
    """Return the folder of cached indices."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "long-context-trainer")


def indexed(file: str, kind: str, scan: Scan) -> Index:
    """Return the index that `scan` makes of a file, from the cache if it is there. One process builds, others wait.

    kind: name of the scan and its settings. Without a cache that can be written, each process builds its own.

    Raises:
        ConfigError: the file cannot be read.
    """
    stamp = stamp_of(file)
    name = hashlib.sha256(f"{kind} {os.path.abspath(file)}".encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}.index"
    if (found := _cached(path, stamp)) is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _held(path.with_suffix(".lock"), file):
            if (found := _cached(path, stamp)) is None:
                _write(path, stamp, _told(file, stamp.size, scan))
                found = _cached(path, stamp)
    except OSError as error:
        logger.warning(f"the index of {file} is kept in memory: {path.parent} cannot be written ({error.strerror})")
        found = None
    if found is None:
        parts = list(_told(file, stamp.size, scan))
        places = np.concatenate([np.empty(0, dtype=np.int64), *(part for part, _ in parts)])
        found = Index(places, sum(lines for _, lines in parts), stamp)
    return found


def _cached(path: Path, stamp: Stamp) -> Index | None:
    """Return a cached index; None: there is none of this content."""
    try:
        content = np.memmap(path, dtype=np.int64, mode="r")
    except (OSError, ValueError):
        return None
    if len(content) < 6 or content[:4].tolist() != [_FORMAT, *stamp] or len(content) != 6 + content[4]:
        return None
    return Index(content[6:], int(content[5]), stamp)


def _write(path: Path, stamp: Stamp, parts: Iterator[tuple[np.ndarray, int]]) -> None:
    """Write an index under a temporary name, and give it its name when it is whole."""
    unfinished, n, lines = path.with_suffix(".tmp"), 0, 0
    try:
        with unfinished.open("wb") as stream:
            stream.write(bytes(6 * 8))
            for places, more in parts:
                stream.write(places.astype(np.int64))
                n, lines = n + len(places), lines + more
            stream.seek(0)
            stream.write(np.array([_FORMAT, *stamp, n, lines], dtype=np.int64))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # a part of it would fill a disk that is full


def _told(file: str, size: int, scan: Scan) -> Iterator[tuple[np.ndarray, int]]:
    """Yield what the scan yields, and log how far a long scan is."""
    said, done = time.monotonic(), 0
    try:
        for part in scan(file):
            done = min(done + BLOCK, size)
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                logger.info(f"indexing {file}: {done / 2**30:.1f} of {size / 2**30:.1f} GiB")
            yield part
    except OSError as error:
        raise unreadable(file, error) from None


@contextmanager
def _held(lock: Path, file: str) -> Iterator[None]:
    """Hold a lock inside; log every now and then that another process has it."""
    with lock.open("w") as stream:
        said = time.monotonic()
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    logger.info(f"waiting for another process, which indexes {file}")
                time.sleep(0.1)
        yield


def line_starts(file: str) -> Iterator[tuple[np.ndarray, int]]:
    """Yield where lines that are not blank begin, block by block, and how many lines the block has, blank ones too."""
    start = 0
    with open(file, "rb") as stream:
        while block := stream.read(BLOCK):
            block += stream.readline()  # whole lines
            content = np.frombuffer(block, dtype=np.uint8)
            starts = np.concatenate([[0], np.flatnonzero(content == 10) + 1])
            starts = starts[starts < len(block)]
            keep = np.ones(len(starts), dtype=bool)
            for i in np.flatnonzero(np.isin(content[starts], _BLANK)):
                end = int(starts[i + 1]) if i + 1 < len(starts) else len(block)
                keep[i] = bool(block[int(starts[i]) : end].strip())
            yield start + starts[keep], len(starts)
            start += len(block)


class ByteRanges:
    """Reads ranges of bytes of files, some of which stay open. A file that shrinks or goes away is told in a sentence.

    Files are not mapped: a mapped file that shrinks ends the process without a word (SIGBUS).
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files, self._open = files, OrderedDict[int, int]()

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of file `number`.

        Raises:
            ConfigError: the file cannot be read, or is shorter than that.
        """
        parts, here = [], start
        try:
            descriptor = self._descriptor(number)
            while here < stop and (part := os.pread(descriptor, min(stop - here, 1 << 30), here)):
                parts.append(part)
                here += len(part)
        except OSError as error:
            raise unreadable(self._files[number], error) from None
        if here < stop:
            raise ConfigError(
                f"{self._files[number]} is shorter than when the run began to read it (byte {stop} is missing); "
                "restore it"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[number] = os.open(self._files[number], os.O_RDONLY)
        self._open.move_to_end(number)
        return self._open[number]

    def __del__(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

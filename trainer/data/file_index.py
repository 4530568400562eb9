"""Places in large files: an index that is built once and cached, and reads of ranges of bytes. Torch-free.

A cached index lies in `$XDG_CACHE_HOME/long-context-trainer`, by default below `~/.cache`: one file for each data file.
It belongs to the data file's size, time, head and tail. An index of an older content is replaced. It also has a hash of
all bytes of the data file, made while they are indexed. Files that need no index have their hashes in one cached table
(`contents`).
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import numpy as np

from trainer.config.errors import ConfigError

logger = logging.getLogger("trainer")


class Input(Protocol):
    """A file that is read from its start to its end."""

    def read(self, size: int) -> bytes: ...

    def readline(self) -> bytes: ...


Scan = Callable[[Input], Iterator[tuple[np.ndarray, int]]]
"""Reads all of a file -> for each of its blocks the places in it, int64, and the number of lines."""

T = TypeVar("T")

BLOCK = 1 << 24  # bytes that a scan reads at once
_FORMAT = 2
_HEADER = 7  # int64 in front of the places
_HASHING_THREADS = 8
_ENDS = 1 << 16  # bytes of head and tail that tell a file's content
_SAY_SECONDS = 10.0
_OPEN_FILES = 64
_OTHER_FILES = 512  # of a process that trains: connections, libraries, devices, those above
_BLANK = np.frombuffer(b" \t\r\n\v\f", dtype=np.uint8)


class Stamp(NamedTuple):
    """Tells whether a file has changed: bytes, time (ns), and a 63-bit hash of its size, head and tail.

    The time is the later one of those of the last change of content and of attributes: nobody can set the latter back.
    """

    size: int
    time: int
    ends: int


class Index(NamedTuple):
    """places: (n,) int64, ascending; lines: number of lines of the file, where the places are lines.

    content: 63-bit hash of all bytes of the file.
    """

    places: np.ndarray
    lines: int
    stamp: Stamp
    content: int


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
    return Stamp(status.st_size, _time_of(status), number_of(digest))


def _time_of(status: os.stat_result) -> int:
    return max(status.st_mtime_ns, status.st_ctime_ns)


def number_of(digest: hashlib.blake2b) -> int:
    """Return a digest of 8 bytes as a number of 63 bits."""
    return int.from_bytes(digest.digest(), "little") >> 1


def cache_folder() -> Path:
    """Return the folder of cached indices."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "long-context-trainer")


def indexed(file: str, kind: str, scan: Scan) -> Index:
    """Return the index that `scan` makes of a file, from the cache if it is there.

    kind: name of the scan and its settings. Without a cache that can be written, each process builds its own.

    Raises:
        ConfigError: the file cannot be read.
    """
    stamp, digest = stamp_of(file), hashlib.blake2b(digest_size=8)
    path = _cache_file(f"{kind} {os.path.abspath(file)}", ".index")

    def write() -> None:
        _write(path, stamp, _logged(file, stamp.size, scan, digest), digest)

    found = _once(path, f"the index of {file}", lambda: _cached(path, stamp), write)
    if found is None:
        digest = hashlib.blake2b(digest_size=8)
        parts = list(_logged(file, stamp.size, scan, digest))
        places = np.concatenate([np.empty(0, dtype=np.int64), *(part for part, _ in parts)])
        found = Index(places, sum(lines for _, lines in parts), stamp, number_of(digest))
    return found


def contents(files: Sequence[str]) -> list[int]:
    """Return a 63-bit hash of all bytes of each file, from the cache where the file has not changed since.

    Raises:
        ConfigError: a file cannot be read.
    """
    if not files:
        return []
    names = [os.path.abspath(file) for file in files]
    path = _cache_file(f"contents {os.path.commonpath(names)}", ".contents")
    keys = [number_of(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8)) for name in names]
    rows = [(key, *_size_and_time(file)) for key, file in zip(keys, files, strict=True)]

    def missing() -> tuple[dict[tuple[int, ...], int], list[int]]:
        """Return what the cache knows, and the numbers of the files that it does not."""
        try:
            table = np.fromfile(path, dtype=np.int64)
        except OSError:
            table = np.empty(0, dtype=np.int64)
        known = {tuple(row[:3]): row[3] for row in table[: len(table) // 4 * 4].reshape(-1, 4).tolist()}
        return known, [i for i, row in enumerate(rows) if row not in known]

    def find() -> list[int] | None:
        known, unknown = missing()
        return None if unknown else [known[row] for row in rows]

    def write() -> None:
        known, unknown = missing()
        known |= dict(zip([rows[i] for i in unknown], _hashed([files[i] for i in unknown]), strict=True))
        latest = {row[0]: (*row, content) for row, content in known.items()}  # one row a file, the newest one
        unfinished = path.with_suffix(".tmp")
        try:
            np.array(list(latest.values()), dtype=np.int64).tofile(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    return _once(path, f"the hashes of {len(files):,} data files", find, write) or _hashed(files)


def _size_and_time(file: str) -> tuple[int, int]:
    try:
        status = os.stat(file)
    except OSError as error:
        raise unreadable(file, error) from None
    return status.st_size, _time_of(status)


def _hashed(files: Sequence[str]) -> list[int]:
    """Return a hash of all bytes of each file; log how far it is."""
    said, found = time.monotonic(), []
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        for content in threads.map(_hash_of, files):
            found.append(content)
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                logger.info(f"hashing data files: {len(found):,} of {len(files):,}")
    return found


def _hash_of(file: str) -> int:
    digest = hashlib.blake2b(digest_size=8)
    try:
        with open(file, "rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise unreadable(file, error) from None
    return number_of(digest)


def _cache_file(what: str, ending: str) -> Path:
    name = hashlib.sha256(what.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_folder() / f"{name}{ending}"


def _once(path: Path, what: str, find: Callable[[], T | None], write: Callable[[], None]) -> T | None:
    """Return what `find` finds in the cache. If it is not there, one process writes it, and others wait.

    None: the cache cannot be written.
    """
    if (found := find()) is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _held(path.with_suffix(".lock"), what):
            if (found := find()) is None:
                write()
                found = find()
    except OSError as error:
        logger.warning(f"{what} is kept in memory: {path.parent} cannot be written ({error.strerror})")
        return None
    return found


def _cached(path: Path, stamp: Stamp) -> Index | None:
    """Return a cached index; None: there is none of this content."""
    try:
        content = np.memmap(path, dtype=np.int64, mode="r")
    except (OSError, ValueError):
        return None
    if len(content) < _HEADER or content[:4].tolist() != [_FORMAT, *stamp] or len(content) != _HEADER + content[4]:
        return None
    return Index(content[_HEADER:], int(content[5]), stamp, int(content[6]))


def _write(path: Path, stamp: Stamp, parts: Iterator[tuple[np.ndarray, int]], digest: hashlib.blake2b) -> None:
    """Write an index under a temporary name, and give it its name when it is whole. digest: whole after the parts."""
    unfinished, n, lines = path.with_suffix(".tmp"), 0, 0
    try:
        with unfinished.open("wb") as stream:
            stream.write(bytes(_HEADER * 8))
            for places, more in parts:
                stream.write(places.astype(np.int64))
                n, lines = n + len(places), lines + more
            stream.seek(0)
            stream.write(np.array([_FORMAT, *stamp, n, lines, number_of(digest)], dtype=np.int64))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # a part of it would fill a disk that is full


class _Hashing:
    """A file, whose bytes a digest gets while they are read."""

    def __init__(self, stream: BinaryIO, digest: hashlib.blake2b) -> None:
        self._stream, self._digest = stream, digest

    def read(self, size: int) -> bytes:
        self._digest.update(block := self._stream.read(size))
        return block

    def readline(self) -> bytes:
        self._digest.update(line := self._stream.readline())
        return line


def _logged(file: str, size: int, scan: Scan, digest: hashlib.blake2b) -> Iterator[tuple[np.ndarray, int]]:
    """Yield what the scan yields, and log how far a long scan is. digest: gets all bytes of the file."""
    said, done = time.monotonic(), 0
    try:
        with open(file, "rb") as stream:
            for part in scan(_Hashing(stream, digest)):
                done = min(done + BLOCK, size)
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    logger.info(f"indexing {file}: {done / 2**30:.1f} of {size / 2**30:.1f} GiB")
                yield part
    except OSError as error:
        raise unreadable(file, error) from None


@contextmanager
def _held(lock: Path, what: str) -> Iterator[None]:
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
                    logger.info(f"waiting for another process, which makes {what}")
                time.sleep(0.1)
        yield


def line_starts(stream: Input) -> Iterator[tuple[np.ndarray, int]]:
    """Yield where lines that are not blank begin, block by block, and how many lines the block has, blank ones too."""
    start = 0
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

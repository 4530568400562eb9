"""The files of a data set: searched by a path, and hashed. Torch-free."""

import glob
import hashlib
import os
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import numpy as np

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.writable import sync
from trainer.runtime.console import logger

BLOCK = 1 << 24  # bytes of one read
_HASHING_THREADS = 8
_LOG_SECONDS = 10.0
_NOT_STDLIB = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Yield; turn errors of a file that cannot be read, or not to its end, into a ConfigError.

    Args:
        file: The file, for the message.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        yield
    except ConfigError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        zlib.error,
    ) as error:  # errors of Arrow are among these
        file = getattr(error, "filename", None) or file
        raise ConfigError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error}); copy it again, or "
            "give files that you may read"
        ) from None


def number_of(digest: hashlib.blake2b) -> int:
    """Return a digest of 8 bytes as a number of 63 bits.

    Args:
        digest: The digest.
    """
    return int.from_bytes(digest.digest(), "little") >> 1


def cache_folder() -> Path:
    """Return the folder of files that are made once from data. The folder may not exist.

    It lies in `XDG_CACHE_HOME`, or else in ~/.cache.
    """
    return Path(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
        "long-context-trainer",
    )


# the files do not change while a process runs, and a forked rank has the list of its launcher
@lru_cache(maxsize=1)
def stdlib_files() -> tuple[str, ...]:
    """Return the absolute paths of the .py files of the interpreter's standard library, without tests and packages.

    The order is by path below the library. All files are read once a process. Files that are blank, unreadable or not
    UTF-8 are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    texts = []
    for file in files:
        with suppress(UnicodeDecodeError, OSError):
            if file.read_bytes().decode("utf-8-sig").strip():
                texts.append(str(file))
    return tuple(texts)


@dataclass(frozen=True)
class DataKeys:
    """The keys of a data set and of its path, for messages."""

    dataset: str = "training.dataset"
    path: str = "training.dataset_path"


def find_files(
    path: str, endings: tuple[str, ...], *, dataset: str, others: dict[str, str], keys: DataKeys
) -> list[str]:
    """Return the sorted files of a path: itself, all files with an ending below a folder, or the matches of a glob.

    A file with several names has only its first name in the list, and the log says so.

    Args:
        path: The path. A `~` at its start is expanded.
        endings: Endings of the files of this kind of data. They do not limit a single file and a glob.
        dataset: The kind of data, for the message.
        others: Kinds of data by other endings, for the message.
        keys: The keys, for the message.

    Raises:
        MissingFile: There are none.
        ConfigError: A folder cannot be read.
    """
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return [expanded]
    is_folder = os.path.isdir(expanded)
    way = (expanded, *map(str, Path(expanded).absolute().parents))
    _check_can_be_read(path, next(part for part in way if os.path.isdir(part)), keys)
    names = [name for name in expanded.split(os.sep) if name not in ("", os.curdir)]
    base, pattern = (
        (expanded, ["**"]) if is_folder else (os.sep if os.path.isabs(expanded) else "", names)
    )
    matches = sorted(_Matches(path, keys).below(base, pattern))
    files = _each_once(
        [file for file in matches if not is_folder or file.endswith(endings)], keys
    )
    if files:
        return files
    if is_folder:
        problem = f"a folder without *{' and *'.join(endings)} files"
    elif glob.has_magic(path):
        problem = "a glob that matches no file"
    else:
        problem = "neither a file nor a folder"
    other = next(
        (other for end, other in others.items() if any(file.endswith(end) for file in matches)),
        None,
    )
    advice = f"for {keys.dataset} = {dataset!r} give a {' or '.join(endings)} file, a folder of them, or a glob"
    if other is not None:
        advice = f"use {keys.dataset} = {other!r} for the files that are there, or give another folder"
    raise MissingFile(f"{keys.path} = {path!r} is {problem}; {advice}")


class _Matches:
    """The files below a folder that match a pattern of names. `**` matches any folders, and at the end any file.

    Links are followed. A folder is searched once for the same remaining pattern, whatever its name: links may form
    circles, in which `glob` returns a file many times. `*` and `**` leave out hidden names.
    """

    def __init__(self, path: str, keys: DataKeys) -> None:
        self._path, self._keys = path, keys
        self._searched: set[tuple[str, int]] = set()

    def below(self, folder: str, pattern: Sequence[str]) -> Iterator[str]:
        """Yield the paths of the files below a folder that match the pattern. A repeated search yields nothing.

        Args:
            folder: The folder; "" for the current one.
            pattern: The names of the pattern below the folder, one for each level.

        Raises:
            ConfigError: A folder cannot be read.
        """
        search = os.path.realpath(folder), len(pattern)
        if search in self._searched or not pattern:
            return
        self._searched.add(search)
        name, *remaining = pattern
        if name == "**" and remaining:  # matches no folder, too
            yield from self.below(folder, remaining)
        for match in self._names(folder, name):
            inner = os.path.join(folder, match)
            if os.path.isdir(inner):
                yield from self.below(inner, pattern if name == "**" else remaining)
            elif not remaining and os.path.isfile(inner):
                yield inner

    def _names(self, folder: str, name: str) -> list[str]:
        """Return the sorted names in a folder that match one name of the pattern. Names of links come last.

        A name that begins with a dot matches only a pattern that begins with a dot.

        A name without `*`, `?` and `[` is returned as it is, whether it exists or not.
        """
        if name != "**" and not glob.has_magic(name):
            return [name]
        _check_can_be_read(self._path, folder or os.curdir, self._keys)
        with reading(folder), os.scandir(folder or os.curdir) as entries:
            links = {
                entry.name: entry.is_symlink()
                for entry in entries
                if fnmatchcase(entry.name, name)
            }
        shown = (link for link in links if name.startswith(".") or not link.startswith("."))
        return sorted(shown, key=lambda link: (links[link], link))


def _each_once(files: Sequence[str], keys: DataKeys) -> list[str]:
    """Return the first name of each file; log a line if a file has several names."""
    first = {}
    others = [
        (file, first[real])
        for file in files
        if first.setdefault(real := os.path.realpath(file), file) != file
    ]
    if others:
        logger.info(
            f"note: {keys.path} finds {len(others):,} files by a second name, such as {others[0][0]} for "
            f"{others[0][1]}; each file is read once (a weight in [mixture] reads data more often)"
        )
    return list(first.values())


def _check_can_be_read(path: str, folder: str, keys: DataKeys) -> None:
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(
            f"{keys.path} = {path!r}: the folder {folder} cannot be read (permission denied); "
            "change its permissions, or give data that you may read"
        )


def contents(files: Sequence[str]) -> list[int]:
    """Return a 63-bit hash of all bytes of each file, in the order of the files.

    A table in `cache_folder` keeps the hashes. A file is read again if its size or time has changed.

    Args:
        files: The files.

    Raises:
        ConfigError: A file cannot be read.
    """
    if not files:
        return []
    names = [os.path.abspath(file) for file in files]
    table = cache_folder() / f"{_number(f'contents {os.path.commonpath(names)}'):016x}.contents"
    keys = [
        (_number(name), *_size_and_time(file)) for name, file in zip(names, files, strict=True)
    ]
    known = {}
    with suppress(OSError):
        rows = np.fromfile(table, dtype=np.int64)
        known = {
            tuple(row[:3]): row[3] for row in rows[: len(rows) // 4 * 4].reshape(-1, 4).tolist()
        }
    unknown = {key: file for key, file in zip(keys, files, strict=True) if key not in known}
    if unknown:
        known |= zip(unknown, _hashed([*unknown.values()]), strict=True)
        # the newest row of each file
        latest = {key[0]: (*key, content) for key, content in known.items()}
        with suppress(OSError):  # without a cache the files are hashed again
            write_whole(table, np.array(list(latest.values()), dtype=np.int64).tobytes())
    return [known[key] for key in keys]


def write_whole(file: Path, *parts: bytes) -> None:
    """Write a file under a temporary name, and rename it when it is on the disk. Missing folders are made.

    If this fails, the temporary file is deleted, and an older file remains.

    Args:
        file: The file.
        *parts: Its content.

    Raises:
        OSError: It cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.uname().nodename}-{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as stream:
            stream.writelines(parts)
        sync(unfinished)
        unfinished.replace(file)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)  # a part of a file would fill a full disk


def _number(name: str) -> int:
    return number_of(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8))


def _size_and_time(file: str) -> tuple[int, int]:
    """Return bytes and time (ns): the later time of content and attributes, which nobody can set back."""
    with reading(file):
        status = os.stat(file)
    return status.st_size, max(status.st_mtime_ns, status.st_ctime_ns)


def _hashed(files: Sequence[str]) -> Iterator[int]:
    logged = time.monotonic()
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        for number, content in enumerate(threads.map(_hash_of, files), 1):
            yield content
            if time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                logger.info(f"hashing data files: {number:,} of {len(files):,}")


def _hash_of(file: str) -> int:
    digest = hashlib.blake2b(digest_size=8)
    with reading(file), open(file, "rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return number_of(digest)

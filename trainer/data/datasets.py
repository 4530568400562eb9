"""Sources of documents: the standard library, text, JSON lines, conversations. Random access, torch-free, no network.

`check_source` checks a source at once, before the job starts; `open_source` returns the documents.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.config.errors import ConfigError, MissingFile, did_you_mean
from trainer.data.chat import as_text, conversation
from trainer.data.tokenizer import replace_surrogates

if TYPE_CHECKING:
    from datasets import Dataset

_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_HEAD = 1 << 16  # bytes of a text file that `check_source` looks at


class DocumentSource(Protocol):
    """Documents by number, in an order that depends on the data only."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> str: ...


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    open: files -> documents; start: files -> one item per document, lazily, the first one checked; ending: of the
    files in a folder; None: the data set has no files.
    """

    open: Callable[[list[str]], DocumentSource]
    start: Callable[[list[str]], Iterable[object]]
    ending: str | None = None


DATASETS = {
    "python_stdlib": Source(lambda _: list(_python_stdlib()), lambda _: _python_stdlib()),
    "text": Source(lambda files: TextFiles(tuple(_not_empty(files))), lambda files: _checked_texts(files), ".txt"),
    "jsonl": Source(lambda files: _open_lines(files, _texts), lambda files: _checked(files, _Line.text), ".jsonl"),
    "chat": Source(lambda files: _open_lines(files, _chats), lambda files: _checked(files, _Line.chat), ".jsonl"),
}


def open_source(name: str, path: str | None = None) -> DocumentSource:
    """Return the documents of data set `name` at `path`.

    Raises:
        ConfigError: an unknown data set, a path that matches nothing, or a file or line that cannot be read.
    """
    source, files = _found(name, path)
    return source.open(files)


def first_document(name: str, path: str | None) -> str:
    """Return the first document of a data set in files, of which no more is read.

    Raises:
        ConfigError: see `check_source`.
    """
    source, files = _found(name, path)
    return str(next(iter(source.start(files))))


def check_source(name: str, path: str | None, data_streams: int, *, dp_degree: int = 1) -> None:
    """Check a data set without converting it; only the start of large data is read.

    Raises:
        ConfigError: an unknown data set; a path that is missing, superfluous, unreadable or matches nothing; no data; a
            first line that is no object with "text"; `data_streams` that do not fit, see `check_streams`.
    """
    source, files = _found(name, path)
    documents = sum(1 for _ in islice(source.start(files), _next_multiple(data_streams, dp_degree)))
    where = f"training.dataset_path = {path!r}" if path else f"training.dataset = {name!r}"
    check_streams(where, documents, data_streams, dp_degree)


def check_streams(where: str, documents: int, data_streams: int, dp_degree: int, *, item: str = "document") -> None:
    """Check that every data stream has a document, and every data-parallel rank the same number of streams.

    where: the data set, as the message names it; item: what it has in place of documents.

    Raises:
        ConfigError: there are fewer documents than ranks or streams, or the degree does not divide the streams.
    """
    streams = f"training.data_streams = {data_streams}"
    above = _next_multiple(data_streams, dp_degree)
    if not documents:
        also = "" if above == data_streams else f" and training.data_streams = {above}"
        raise ConfigError(f"{where} holds no text, and {streams} needs as many {item}s; give {above} {item}s{also}")
    if documents < dp_degree:
        held = f"{documents} {item}{'s' if documents > 1 else ''}"
        ranks = f"{documents} data-parallel rank{'s' if documents > 1 else ''}"
        raise ConfigError(
            f"{where} has {held}, and each of {dp_degree} data-parallel ranks needs one of its own; give {dp_degree} "
            f"{item}s and training.data_streams = {dp_degree}, or use {ranks} (more ranks can be context-parallel) "
            f"and training.data_streams = {documents}"
        )
    below = min(data_streams, documents) // dp_degree * dp_degree
    if data_streams > documents:
        multiple = f", a multiple of the data-parallel degree {dp_degree}" if dp_degree > 1 else ""
        raise ConfigError(
            f"{streams} needs as many {item}s and {where} has {documents}; the largest that works is {below}{multiple}"
        )
    if data_streams % dp_degree:
        works = " or ".join(str(number) for number in (below, above) if 0 < number <= documents)
        raise ConfigError(
            f"{streams} must be a multiple of the data-parallel degree {dp_degree} (replicas x shards); use {works}"
        )


def _next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


def _found(name: str, path: str | None) -> tuple[Source, list[str]]:
    if name not in DATASETS:
        if name.startswith("c4"):
            raise ConfigError(
                f"training.dataset = {name!r} would be downloaded, and nothing is downloaded here; save its"
                " documents as JSON lines and use training.dataset = 'jsonl' with training.dataset_path, or use"
                " 'python_stdlib'"
            )
        raise ConfigError(f"training.dataset = {name!r} is not a known data set{did_you_mean(name, DATASETS)}")
    ending = DATASETS[name].ending
    if ending is None and path:
        raise ConfigError(
            f"training.dataset_path = {path!r} would do nothing, {name} needs none; leave it out, or choose"
            f" training.dataset = {' or '.join(repr(other) for other, source in DATASETS.items() if source.ending)}"
        )
    if ending is not None and not path:
        raise ConfigError(
            f"training.dataset = {name!r} needs training.dataset_path; give a {ending} file, a folder, or a glob"
        )
    return DATASETS[name], [] if ending is None else _files(name, path, ending)


def _files(name: str, path: str, ending: str) -> list[str]:
    """Return the sorted files of `path`: itself, all files with the ending below a folder, or the matches of a glob."""
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return [expanded]
    is_folder = os.path.isdir(expanded)
    if is_folder:
        _check_folders_can_be_read(path, expanded)
    pattern = os.path.join(glob.escape(expanded), "**", f"*{ending}") if is_folder else expanded
    found = sorted({file for file in glob.glob(pattern, recursive=True) if os.path.isfile(file)})
    if found:
        return found
    _check_folders_can_be_read(path, expanded)
    what = f"a folder without *{ending} files" if is_folder else "neither a file nor a folder"
    what = "a glob that matches no file" if glob.has_magic(path) and not is_folder else what
    others = {source.ending: other for other, source in reversed(DATASETS.items()) if source.ending and is_folder}
    there = next((other for end, other in others.items() if any(Path(expanded).rglob(f"*{end}"))), None)
    advice = f"for training.dataset = {name!r} give a {ending} file, a folder of them, or a glob"
    if there is not None:
        advice = f"use training.dataset = {there!r} for the files that are there, or give another folder"
    raise MissingFile(f"training.dataset_path = {path!r} is {what}; {advice}")


def _check_folders_can_be_read(path: str, expanded: str) -> None:
    """Refuse folders that this user may not read, on the way to the data or below: `glob` would find nothing there."""
    parts = (expanded, *map(str, Path(expanded).absolute().parents))
    way = [next(part for part in parts if os.path.isdir(part))]
    below = (os.path.join(root, name) for root, names, _ in os.walk(expanded) for name in names)
    for folder in (*way, *below):
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(
                f"training.dataset_path = {path!r}: the folder {folder} cannot be read (permission denied); "
                "change its permissions, or give data that you may read"
            )


# --- python_stdlib


def _python_stdlib() -> Iterator[str]:
    """Yield the .py files of the interpreter's standard library by relative path, without tests and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    for file in sorted(found, key=lambda file: file.relative_to(root).as_posix()):
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield text


# --- text


@dataclass(frozen=True)
class TextFiles:
    """One document per file, which is read on access."""

    files: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> str:
        try:
            return Path(self.files[i]).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _not_utf8(self.files[i], error) from None
        except OSError as error:
            raise ConfigError(f"{self.files[i]} cannot be read ({error.strerror}); restore it or start anew") from None


def _not_empty(files: list[str]) -> list[str]:
    return [file for file in files if os.path.getsize(file)]


def _checked_texts(files: list[str]) -> list[str]:
    """Return the files that are not empty, and check the start of the first one."""
    files = _not_empty(files)
    for file in files[:1]:
        try:
            with open(file, "rb") as stream:
                codecs.getincrementaldecoder("utf-8")().decode(stream.read(_HEAD))
        except UnicodeDecodeError as error:
            raise _not_utf8(file, error) from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}); give files that you may read") from None
    return files


def _not_utf8(file: str, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"{file} is not UTF-8 text (byte {error.start}); convert it, or leave it out of the data set")


# --- jsonl


def _open_lines(files: list[str], records: Callable[..., Iterator[dict[str, str]]]) -> DocumentSource:
    """Return the lines' texts as a memory-mapped Arrow file in the cache of `datasets`; one rank of a node writes it.

    `load_dataset("json")` is not used: it infers a type for every column, and fails if the types of other columns
    differ. The cache's key has each file's size and time, so changed data are read again.
    """
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    stamps = tuple((os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files)
    try:
        with _no_progress_bars():
            table = Dataset.from_generator(
                records,
                features=Features({"text": Value("large_string")}),  # `string` ends at 2 GiB per written batch
                gen_kwargs={"stamps": stamps},
            )
    except DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__
        raise (cause if isinstance(cause, ConfigError) else error) from None
    return JsonLines(table)


@dataclass(frozen=True)
class JsonLines:
    """The field "text" of each line, in a memory-mapped `datasets.Dataset`."""

    table: Dataset

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> str:
        return self.table[i]["text"]


def _texts(stamps: tuple[tuple[str, int, int], ...]) -> Iterator[dict[str, str]]:
    """Yield records for `datasets`: every text that is not empty."""
    empty = True
    for line in _lines([file for file, _, _ in stamps]):
        if text := line.text():
            empty = False
            yield {"text": text}
    if empty:
        raise ConfigError(f'{stamps[0][0]} holds no text; at least one line needs a "text" that is not empty')


def _chats(stamps: tuple[tuple[str, int, int], ...]) -> Iterator[dict[str, str]]:
    """Yield records for `datasets`: every conversation, checked."""
    for line in _lines([file for file, _, _ in stamps]):
        yield {"text": line.chat()}


@dataclass(frozen=True)
class _Line:
    file: str
    number: int
    content: bytes

    def text(self) -> str:
        try:
            text = json.loads(self.content)["text"]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(
                f'{self.file}, line {self.number}, must be a JSON object with a string field "text", in UTF-8'
            )
        try:
            text.encode()
        except UnicodeEncodeError:  # an escaped lone surrogate is legal JSON, but Arrow refuses it
            text = replace_surrogates(text)
        return text

    def chat(self) -> str:
        return as_text(conversation(self.content, f"{self.file}, line {self.number}"))


def _lines(files: Iterable[str]) -> Iterator[_Line]:
    """Yield the lines of all files, without blank lines."""
    for file in files:
        try:
            with open(file, "rb") as stream:
                for number, content in enumerate(stream, 1):
                    if content.strip():
                        yield _Line(file, number, content)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}); give files that you may read") from None


def _checked(files: list[str], document: Callable[[_Line], str]) -> Iterator[str]:
    """Yield something for each line: the document of the first one, and nothing read of the others."""
    for i, line in enumerate(_lines(files)):
        yield document(line) if i == 0 else ""


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Switch off the progress bars of `datasets`, one per rank; the switch is global, so it is restored."""
    from datasets.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()

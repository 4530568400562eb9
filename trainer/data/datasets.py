"""Where documents come from: the standard library's sources, text files, JSON lines. Random access, torch-free.

`check_source` answers at once, before the job starts; `open_source` gives the documents. No source uses the network.
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

from trainer.config.errors import ConfigError, did_you_mean
from trainer.data.tokenizer import replace_surrogates

if TYPE_CHECKING:
    from datasets import Dataset

_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_HEAD = 1 << 16  # bytes of a text file that `check_source` looks at


class DocumentSource(Protocol):
    """Documents by number; the order is fixed by the data alone, the same on every rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> str: ...


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    open: files -> documents. start: files -> its documents, or what stands for them, one by one as far as they are
    counted; it checks the first. ending: of the files that a folder is searched for; None: there are no files.
    """

    open: Callable[[list[str]], DocumentSource]
    start: Callable[[list[str]], Iterable[object]]
    ending: str | None = None


DATASETS = {
    "python_stdlib": Source(lambda files: list(_python_stdlib()), lambda files: _python_stdlib()),
    "text": Source(lambda files: TextFiles(tuple(_not_empty(files))), lambda files: _checked_texts(files), ".txt"),
    "jsonl": Source(lambda files: _open_jsonl(files), lambda files: _checked_lines(files), ".jsonl"),
}


def open_source(name: str, path: str | None = None) -> DocumentSource:
    """The documents of data set `name` at `path`.

    Raises:
        ConfigError: unknown data set, a path that fits nothing, or data that cannot be read; for a bad line or file
            further on, the message names it.
    """
    source, files = _found(name, path)
    return source.open(files)


def check_source(name: str, path: str | None, data_streams: int) -> None:
    """Refuse a data set that cannot work, at once: nothing is converted, of large data only the start is read.

    Raises:
        ConfigError: unknown data set; a path missing, superfluous, or fitting nothing; no data; a first line that is
            no object with "text"; fewer documents than `data_streams`.
    """
    source, files = _found(name, path)
    check_count(name, path, sum(1 for _ in islice(source.start(files), data_streams)), data_streams)


def check_count(name: str, path: str | None, documents: int, data_streams: int) -> None:
    """Refuse streams without a document.

    Raises:
        ConfigError: no documents, or fewer than `data_streams`.
    """
    where = f"training.dataset_path = {path!r}" if path else f"training.dataset = {name!r}"
    if not documents:
        raise ConfigError(
            f"{where} holds no text; at least training.data_streams = {data_streams} documents are needed"
        )
    if documents < data_streams:
        raise ConfigError(
            f"training.data_streams = {data_streams} needs as many documents and {where} has {documents};"
            f" the largest that works is {documents}"
        )


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
    """Files that `path` means, sorted: itself, all of the ending below a folder, or a glob's matches."""
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return [expanded]
    pattern = os.path.join(glob.escape(expanded), "**", f"*{ending}") if os.path.isdir(expanded) else expanded
    found = sorted({file for file in glob.glob(pattern, recursive=True) if os.path.isfile(file)})
    if not found:
        what = f"a folder without *{ending} files" if os.path.isdir(expanded) else "neither a file nor a folder"
        what = "a glob that matches no file" if glob.has_magic(path) and not os.path.isdir(expanded) else what
        raise ConfigError(
            f"training.dataset_path = {path!r} is {what}; for training.dataset = {name!r} give a {ending} file,"
            " a folder of them, or a glob"
        )
    return found


# --- python_stdlib


def _python_stdlib() -> Iterator[str]:
    """The .py sources of the running interpreter's standard library, by relative path; no tests, no packages."""
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
    """A file is a document, read when it is asked for."""

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
    """The files that are not empty, the start of the first one read."""
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


def _open_jsonl(files: list[str]) -> DocumentSource:
    """The lines' texts as a memory-mapped Arrow file in the `datasets` cache, written once, by one rank of a node.

    `load_dataset("json")` is not used: it infers a type for every column, and fails on files whose other columns
    do not agree. The cache's key holds each file's size and time, so that changed data are read anew.
    """
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    stamps = tuple((os.path.abspath(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files)
    try:
        with _no_progress_bars():
            table = Dataset.from_generator(
                _texts,
                features=Features({"text": Value("large_string")}),  # `string` ends at 2 GiB per written batch
                gen_kwargs={"stamps": stamps},
            )
    except DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__
        raise (cause if isinstance(cause, ConfigError) else error) from None
    return JsonLines(table)


@dataclass(frozen=True)
class JsonLines:
    """The field "text" of each line, from a memory-mapped `datasets.Dataset`."""

    table: Dataset

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> str:
        return self.table[i]["text"]


def _texts(stamps: tuple[tuple[str, int, int], ...]) -> Iterator[dict[str, str]]:
    """Rows for `datasets`: every line's text, without the empty ones."""
    empty = True
    for line in _lines([file for file, _, _ in stamps]):
        text = line.text()
        if text:
            empty = False
            yield {"text": text}
    if empty:
        raise ConfigError(f'{stamps[0][0]} holds no text; at least one line needs a "text" that is not empty')


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


def _lines(files: Iterable[str]) -> Iterator[_Line]:
    """The lines of all files that are not blank."""
    for file in files:
        try:
            with open(file, "rb") as stream:
                for number, content in enumerate(stream, 1):
                    if content.strip():
                        yield _Line(file, number, content)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}); give files that you may read") from None


def _checked_lines(files: list[str]) -> Iterator[_Line]:
    for i, line in enumerate(_lines(files)):
        if i == 0:
            line.text()
        yield line


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """`datasets` draws one per rank; its switch is global, so that it is put back."""
    from datasets.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()

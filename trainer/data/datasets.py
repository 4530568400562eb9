"""Sources of documents: the standard library, text, JSON lines, conversations, tokens. Torch-free, no network.

`check_source` checks a source at once, before the job starts; `open_source` returns the documents.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from trainer.config.errors import ConfigError, MissingFile, did_you_mean
from trainer.config.registry import Registry
from trainer.config.schema import Training
from trainer.data.bad_records import BadRecord, Skipping
from trainer.data.file_index import contents, number_of, unreadable
from trainer.data.json_lines import JsonLines, Line, lines_of
from trainer.data.streamed import STREAMED
from trainer.data.token_files import open_token_files, token_documents
from trainer.data.tokenizer import Tokenizer

_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_HEAD = 1 << 16  # bytes of a text file that `check_source` looks at


class DocumentSource(Protocol):
    """Documents by number, in an order that depends on the data only."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> str | np.ndarray:
        """Return a text, or the token ids (n,) of one; "": there is none."""


@dataclass(frozen=True)
class Reading:
    """How documents are read.

    text_field: of a line of JSON; skips: bad records are left out; tokenizer_file: of token ids, None: the shipped one;
    token_dtype: of flat files of ids, "auto": by the vocabulary.
    """

    text_field: str = "text"
    skips: bool = False
    tokenizer_file: str | None = None
    token_dtype: str = "auto"

    @classmethod
    def of(cls, training: Training, tokenizer_file: str) -> Reading:
        """Return what the table [training] says."""
        return cls(training.dataset_text_field, training.on_bad_record == "skip", tokenizer_file, training.token_dtype)


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    open: files -> documents; start: files -> one item per document, lazily, the first one checked; endings: of the
    files in a folder; none: the data set has no files.
    """

    open: Callable[[list[str], Reading], DocumentSource]
    start: Callable[[list[str], Reading], Iterable[object]]
    endings: tuple[str, ...] = ()


DATASETS: Registry[Source] = Registry(
    "data set",
    {
        "python_stdlib": Source(lambda *_: list(_python_stdlib()), lambda *_: _python_stdlib()),
        "text": Source(
            lambda files, _: TextFiles(tuple(_not_empty(files))), lambda files, _: _checked_texts(files), (".txt",)
        ),
        "jsonl": Source(
            lambda files, how: JsonLines.open(files, lambda line: line.text(how.text_field)),
            lambda files, how: _checked(files, lambda line: line.text(how.text_field)),
            (".jsonl",),
        ),
        "chat": Source(
            lambda files, _: JsonLines.open(files, Line.chat), lambda files, _: _checked(files, Line.chat), (".jsonl",)
        ),
        "tokens": Source(
            lambda files, how: open_token_files(files, how.tokenizer_file, how.token_dtype),
            lambda files, how: token_documents(files, how.tokenizer_file, how.token_dtype),
            (".idx", ".npy"),
        ),
    },
)


def ids_of_document(document: str | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the token ids (n,) of a document, between begin and end of text; none if it has no text."""
    if isinstance(document, np.ndarray):
        return document
    return tokenizer.encode_to_numpy(document, bos=bool(document), eos=bool(document))


def open_source(name: str, path: str | None = None, how: Reading = Reading()) -> DocumentSource:
    """Return the documents of data set `name` at `path`.

    Raises:
        ConfigError: an unknown data set, a path that matches nothing, or a file that cannot be read.
    """
    source, files = _found(name, path)
    documents = source.open(files, how)
    return Skipping(documents) if how.skips else documents


def first_document(name: str, path: str | None) -> str:
    """Return the first document of a data set in files, of which no more is read.

    Raises:
        ConfigError: see `check_source`.
    """
    source, files = _found(name, path)
    return str(next(iter(source.start(files, Reading()))))


def check_source(name: str, path: str | None, data_streams: int | None = None, *, how: Reading = Reading()) -> None:
    """Check a data set without converting it; only the start of large data is read.

    Raises:
        ConfigError: an unknown data set; a path that is missing, superfluous, unreadable or matches nothing; no data; a
            first line that is no object with its text; `data_streams` that do not fit, see `check_streams`.
    """
    source, files = _found(name, path)
    documents = sum(1 for _ in islice(source.start(files, how), data_streams or 1))
    where = f"training.dataset_path = {path!r}" if path else f"training.dataset = {name!r}"
    check_streams(where, documents, data_streams)


def check_streams(where: str, items: int, data_streams: int | None, *, item: str = "document") -> None:
    """Check that every data stream has a document; None: the number is chosen to fit.

    where: the data set, as the message names it; item: what it has in place of documents.

    Raises:
        ConfigError: there is none, or there are fewer than streams.
    """
    if not items:
        raise ConfigError(f"{where} holds no text; give at least one {item}")
    if data_streams is not None and data_streams > items:
        raise ConfigError(
            f"training.data_streams = {data_streams} needs as many {item}s and {where} has {items}; leave it out, or "
            f"use at most {items}"
        )


def fingerprint(source: DocumentSource, documents: int) -> int:
    """Return a 63-bit hash of the content of the first documents: of all bytes of their files; 0: they end within one.

    Raises:
        ConfigError: a file cannot be read.
    """
    source = source.source if isinstance(source, Skipping) else source
    of_files = getattr(source, "digests", None)
    digests = of_files(documents) if of_files else (source[i] for i in range(documents))
    if digests is None:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for part in digests:
        digest.update(f"{part}\0".encode("utf-8", "surrogatepass"))
    return number_of(digest)


def _found(name: str, path: str | None) -> tuple[Source, list[str]]:
    if name not in DATASETS:
        if name == "c4_test":
            raise ConfigError(
                "training.dataset = 'c4_test' means the 2,000 documents in torchtitan's repository; use "
                "training.dataset = 'jsonl' and training.dataset_path = 'torchtitan/tests/assets/c4_test/data.json', "
                "where your clone of it lies"
            )
        if name.startswith("c4") or "/" in name:
            hub = "allenai/c4 --hub-config en" if name.startswith("c4") else name
            raise ConfigError(
                f"training.dataset = {name!r} lies on the Hugging Face hub, which is not read while training; make "
                f"token files of it with `lct tokenize --hub {hub} --output tokens`, and train with training.dataset = "
                "'tokens' and training.dataset_path = 'tokens'"
            )
        raise ConfigError(f"training.dataset = {name!r} is not a known data set{did_you_mean(name, DATASETS)}")
    endings = DATASETS[name].endings
    if not endings and path:
        raise ConfigError(
            f"training.dataset_path = {path!r} would do nothing, {name} needs none; leave it out, or choose"
            f" training.dataset = {' or '.join(repr(other) for other, source in DATASETS.items() if source.endings)}"
        )
    if endings and not path:
        raise ConfigError(
            f"training.dataset = {name!r} needs training.dataset_path; give a {' or '.join(endings)} file, a folder, "
            "or a glob"
        )
    return DATASETS[name], find_files(name, path, endings) if endings else []


def find_files(name: str, path: str, endings: tuple[str, ...]) -> list[str]:
    """Return the sorted files of `path`: itself, all files with an ending below a folder, or the matches of a glob.

    Raises:
        ConfigError: there are none, or some that have no random access where the endings ask for it.
    """
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return _with_random_access([expanded], path, endings)
    is_folder = os.path.isdir(expanded)
    if is_folder:
        _check_folders_can_be_read(path, expanded)
    there = _files_below(expanded) if is_folder else glob.glob(expanded, recursive=True)
    there = sorted({file for file in there if os.path.isfile(file)})
    found = [file for file in there if file.endswith(endings)] if is_folder else there
    if found:
        return _with_random_access(found, path, endings)
    _with_random_access(there, path, endings)
    _check_folders_can_be_read(path, expanded)
    ending = " or ".join(endings)
    what = f"a folder without *{' and *'.join(endings)} files" if is_folder else "neither a file nor a folder"
    what = "a glob that matches no file" if glob.has_magic(path) and not is_folder else what
    others = {end: other for other, source in reversed(DATASETS.items()) for end in source.endings}
    other = next((other for end, other in others.items() if any(file.endswith(end) for file in there)), None)
    advice = f"for training.dataset = {name!r} give a {ending} file, a folder of them, or a glob"
    if other is not None:
        advice = f"use training.dataset = {other!r} for the files that are there, or give another folder"
    raise MissingFile(f"training.dataset_path = {path!r} is {what}; {advice}")


def _files_below(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield what lies below a folder, also behind links, but for hidden names and links to a folder `above`.

    `glob` would follow such links in circles, and find each file many times.
    """
    above = (*above, os.path.realpath(folder))
    try:
        names = os.listdir(folder)
    except OSError as error:  # behind a link
        raise unreadable(folder, error) from None
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        if not os.path.isdir(path):
            yield path
        elif os.path.realpath(path) not in above:
            yield from _files_below(path, above)


def _with_random_access(files: list[str], path: str, endings: tuple[str, ...]) -> list[str]:
    """Return the files, unless some can only be read from their start to their end and nobody asked for these."""
    streamed = [file for file in files if file.endswith(STREAMED) and not file.endswith(endings)]
    if streamed:
        raise ConfigError(
            f"training.dataset_path = {path!r}: {streamed[0]} has no random access to documents; make token files of "
            f"it with `lct tokenize --path {path} --output tokens`, and train with training.dataset = 'tokens' and "
            "training.dataset_path = 'tokens'"
        )
    return files


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
            raise unreadable(self.files[i], error) from None

    def digests(self, documents: int) -> list[int]:
        """Return a hash of each of the first files."""
        return contents(self.files[:documents])


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
            raise unreadable(file, error) from None
    return files


def _not_utf8(file: str, error: UnicodeDecodeError) -> BadRecord:
    return BadRecord(f"{file} is not UTF-8 text (byte {error.start}); convert it, or leave it out of the data set")


# --- jsonl


def _checked(files: list[str], document: Callable[[Line], str]) -> Iterator[str]:
    """Yield something for each line: the document of the first one, and nothing read of the others."""
    lines = (line for file in files for line in lines_of(file))
    for i, line in enumerate(lines):
        yield document(line) if i == 0 else ""

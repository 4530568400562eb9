"""Text <-> token ids. The format of a tokenizer is known by its file, or by what lies in its folder.

    tokenizer.json             of Hugging Face's tokenizers: tokenizer_json.py
    original/tokenizer.model   Meta's rank file of Llama 3: tiktoken_format.py
    tokenizer.model            likewise

The first one that a folder has is taken. All other modules know tokenizers by `Tokenizer` alone.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import TOKENIZER_FILES, Model

HINT = (
    "; get Llama 3's with `python scripts/download_tokenizer.py`, train one with `python scripts/train_tokenizer.py`,"
    " or leave model.tokenizer_path out for the shipped one"
)


class Encoded(NamedTuple):
    """A document. ids: (n,) integers; answers: (n,) bool, whether a token is learned; None: all are.

    lengths: of its parts, which do not see each other but are packed together; empty: it is one part. notes: of a
    conversation, how many answers it has, and how many lack something; see `chat_notes`.
    """

    ids: np.ndarray
    answers: np.ndarray | None = None
    lengths: tuple[int, ...] = ()
    notes: Mapping[str, int] = MappingProxyType({})


NOTHING = Encoded(np.empty(0, dtype=np.int64))
"""A document without text."""


class Tokenizer(ABC):
    """A tokenizer.

    vocab_size: every id is below it. bos_id, eos_id: ids of the tokens that begin and end a text; None: it has none.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @abstractmethod
    def ids_of(self, text: str) -> Sequence[np.ndarray | Sequence[int]]:
        """Return the token ids of legal Unicode in parts, one after another, without `bos_id` and `eos_id`.

        Special-token strings inside `text` are ordinary text.

        Raises:
            UnicodeEncodeError: the text has a lone surrogate.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with special tokens by name, and bytes that are not UTF-8 as U+FFFD."""

    @abstractmethod
    def encode_with_places(self, text: str, *, special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (n,) of legal Unicode, and the characters [start, stop) of each token, (n, 2), int64.

        special: read the names of special tokens in `text` as these tokens.
        """

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the token ids of `text` as a list; see `encode_to_numpy`."""
        return self.encode_to_numpy(text, bos=bos, eos=eos).tolist()

    def encode_to_numpy(self, text: str, *, bos: bool = False, eos: bool = False) -> np.ndarray:
        """Return the token ids (n,) int64 of `text`, optionally between the tokens that begin and end a text.

        A token that this tokenizer does not have is left out. A lone surrogate becomes U+FFFD.
        """
        try:
            parts = self.ids_of(text)
        except UnicodeEncodeError:
            parts = self.ids_of(replace_surrogates(text))
        first = [self.bos_id] if bos and self.bos_id is not None else []
        last = [self.eos_id] if eos and self.eos_id is not None else []
        return np.concatenate(
            [np.asarray(part, dtype=np.int64) for part in (first, *parts, last)]
        )


def replace_surrogates(text: str) -> str:
    """Return `text` as legal Unicode: surrogate pairs joined, lone surrogates as U+FFFD (tiktoken's rule)."""
    return (
        text
        if text.isascii()
        else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def open_tokenizer(path: str | None = None) -> Tokenizer:
    """Return the tokenizer of a file or folder, by default the shipped one; ConfigError if it is missing or damaged."""
    module, *found = _found(path)
    return module.FORMAT(*found)


def vocab_size_of(path: str) -> int:
    """Return `open_tokenizer(path).vocab_size`, from the file alone, without the tokenizer's library."""
    module, *found = _found(path)
    return module.facts(*found)[0]


def special_names(path: str) -> Sequence[str]:
    """Return the texts of the special tokens of `open_tokenizer(path)`, likewise."""
    module, *found = _found(path)
    return module.facts(*found)[1]


def tokenizer_hash(path: str) -> str:
    """Return the SHA-256 of the tokenizer's file."""
    return hashlib.sha256(Path(_found(path)[1]).read_bytes()).hexdigest()


def tokenizer_found(path: str) -> Path:
    """Return the file of a tokenizer."""
    return Path(_found(path)[1])


def default_tokenizer_path() -> str:
    """Return the shipped tokenizer: 4,096 ranks, trained on the Python standard library."""
    return Model().tokenizer_file


def _found(path: str | None) -> tuple[Any, str, str]:
    """Return the module of a tokenizer's format, its file, and the path that the user gave."""
    file = path = path or default_tokenizer_path()
    try:
        if os.path.isdir(path):
            files = (os.path.join(path, name) for name in TOKENIZER_FILES)
            file = next((file for file in files if os.path.isfile(file)), "")
            if not file:
                raise ConfigError(
                    f"model.tokenizer_path = {path!r} is a folder without {', '.join(TOKENIZER_FILES[:-1])} and "
                    f"{TOKENIZER_FILES[-1]}{HINT}"
                )
        with open(file, "rb") as opened:
            start = opened.read(4096)
    except FileNotFoundError:
        raise MissingFile(f"model.tokenizer_path = {path!r} does not exist{HINT}") from None
    except OSError as error:
        raise ConfigError(
            f"model.tokenizer_path = {path!r} cannot be read ({error.strerror}){HINT}"
        ) from None
    # A message of protobuf, whose first field is a piece: a tag, a length, a tag.
    if start[:1] == b"\n" and start[2:3] == b"\n":
        raise ConfigError(
            f"model.tokenizer_path = {path!r} is a model of sentencepiece, which is not read; name the tokenizer.json "
            "of the same model, which its folder at the Hugging Face hub has"
        )
    name = "tokenizer_json" if start.lstrip()[:1] == b"{" else "tiktoken_format"
    return import_module(f"trainer.data.tokenizers.{name}"), file, path

"""Text to token ids and back. The format of a tokenizer follows from its file, or from the files of its folder.

    tokenizer.json             Hugging Face's tokenizers: tokenizer_json.py
    original/tokenizer.model   Meta's rank file of Llama 3: tiktoken_format.py
    tokenizer.model            likewise

The first file that a folder has is used. All other modules only know `Tokenizer`.
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
    "; get one with `lct get ORG/NAME --tokenizer-only`, train one with `lct tokenizer train`,"
    " or leave model.tokenizer_path out for the shipped one"
)


class Encoded(NamedTuple):
    """A document.

    Attributes:
        ids: Token ids, (n,) integers.
        answers: Whether each token is learned, (n,) bool; None if all are.
        lengths: Tokens of its parts, which do not see each other but are packed together; empty for one part.
        notes: For a conversation, how many answers it has, and how many lack something; see `chat_notes`.
    """

    ids: np.ndarray
    answers: np.ndarray | None = None
    lengths: tuple[int, ...] = ()
    notes: Mapping[str, int] = MappingProxyType({})

    def wrong_id(self, vocab_size: int) -> str:
        """Return a text that names the first id that the tokenizer does not have; "" if it has all ids.

        Args:
            vocab_size: The number of the tokenizer's ids.
        """
        ids = self.ids
        if not len(ids) or 0 <= ids.min() <= ids.max() < vocab_size:
            return ""
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        return f"has the token id {wrong}, and the tokenizer has {vocab_size:,} (0 and up)"


NOTHING = Encoded(np.empty(0, dtype=np.int64))
"""A document without text."""


class Tokenizer(ABC):
    """A tokenizer.

    Attributes:
        vocab_size: One more than the largest id.
        bos_id: The id of the token that begins a text; None if there is none.
        eos_id: The id of the token that ends a text; None if there is none.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @abstractmethod
    def ids_of(self, text: str) -> Sequence[np.ndarray | Sequence[int]]:
        """Return the token ids of a text in successive parts, without `bos_id` and `eos_id`.

        Names of special tokens inside the text are ordinary text.

        Args:
            text: Legal Unicode.

        Raises:
            UnicodeEncodeError: The text has a lone surrogate.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens by name, and bytes that are not UTF-8 as U+FFFD.

        Args:
            ids: Token ids.
        """

    @abstractmethod
    def encode_with_places(self, text: str, *, special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of a text and the characters of each token.

        Args:
            text: Legal Unicode.
            special: Whether to read names of special tokens as these tokens.

        Returns:
            Token ids, (n,) int64; and characters [start, stop), (n, 2) int64.
        """

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the token ids of a text as a list; see `encode_to_numpy`.

        Args:
            text: The text.
            bos: Whether to begin with `bos_id`.
            eos: Whether to end with `eos_id`.
        """
        return self.encode_to_numpy(text, bos=bos, eos=eos).tolist()

    def encode_to_numpy(self, text: str, *, bos: bool = False, eos: bool = False) -> np.ndarray:
        """Return the token ids of a text, (n,) int64. A lone surrogate becomes U+FFFD.

        Args:
            text: The text.
            bos: Whether to begin with `bos_id`, if the tokenizer has it.
            eos: Whether to end with `eos_id`, if the tokenizer has it.
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
    """Return a text as legal Unicode: surrogate pairs become one character, and lone surrogates become U+FFFD.

    tiktoken has the same rule.

    Args:
        text: The text.
    """
    return (
        text
        if text.isascii()
        else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def open_tokenizer(path: str | None = None) -> Tokenizer:
    """Return the tokenizer of a file or folder.

    Args:
        path: The file or folder; None for the shipped tokenizer.

    Raises:
        ConfigError: It is missing or damaged.
    """
    module, *names = _format_of(path)
    return module.FORMAT(*names)


def vocab_size_of(path: str) -> int:
    """Return the size of a tokenizer's vocabulary, without the tokenizer's library.

    Args:
        path: The file or folder.
    """
    module, *names = _format_of(path)
    return module.facts(*names)[0]


def special_names(path: str) -> Sequence[str]:
    """Return the texts of a tokenizer's special tokens, without the tokenizer's library.

    Args:
        path: The file or folder.
    """
    module, *names = _format_of(path)
    return module.facts(*names)[1]


def tokenizer_hash(path: str) -> str:
    """Return the SHA-256 of a tokenizer's file.

    Args:
        path: The file or folder.
    """
    return hashlib.sha256(tokenizer_file(path).read_bytes()).hexdigest()


def tokenizer_file(path: str) -> Path:
    """Return the file of a tokenizer.

    Args:
        path: The file or folder.
    """
    return Path(_format_of(path)[1])


def default_tokenizer_path() -> str:
    """Return the path of the shipped tokenizer: 4,096 ranks, trained on the Python standard library."""
    return Model().tokenizer_file


def _format_of(path: str | None) -> tuple[Any, str, str]:
    """Return the module of a tokenizer's format, its file, and the path of the user. None means the default path.

    If the path is missing or not readable, or its format is not read, a ConfigError is raised.
    """
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
    # A message of protobuf that begins with a piece: a tag, a length, a tag.
    if start[:1] == b"\n" and start[2:3] == b"\n":
        raise ConfigError(
            f"model.tokenizer_path = {path!r} is a model of sentencepiece, which is not read; name the tokenizer.json "
            "of the same model, which its folder at the Hugging Face hub has"
        )
    name = "tokenizer_json" if start.lstrip()[:1] == b"{" else "tiktoken_format"
    return import_module(f"trainer.data.tokenizers.{name}"), file, path

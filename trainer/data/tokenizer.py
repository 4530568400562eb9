"""Llama 3's tokenizer by tiktoken, for any rank file: byte-level BPE ranks, then 256 special tokens.

A rank file has one token a line, `base64-of-its-bytes rank`, as Meta publishes it (`original/tokenizer.model`). A path
may also name the folder of this file.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import Model

# How Llama 3 splits text before any merge: contractions, words, up to three digits, punctuation, white space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL_TOKENS = 256
_NAMES = (
    *("begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id"),
    *("reserved_special_token_2", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag"),
    *(f"reserved_special_token_{i}" for i in range(3, NUM_SPECIAL_TOKENS - 8)),
)
# Llama 3.1's names in the order of their ids: 128,000 ranks give <|begin_of_text|> = 128000, vocab_size = 128256.
SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in _NAMES)

# The longest run of white space, or of anything else, that is passed to tiktoken (characters, as Llama 3 has it). Its
# regex overflows its stack on a million blanks, and its merges are slow on very long words.
MAX_RUN = 25_000
_BLANKS = (*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
_IS_BLANK = np.zeros(0x3002, dtype=bool)  # by code point; the last entry stands for all that are higher
_IS_BLANK[list(_BLANKS)] = True

_IN_A_FOLDER = ("original/tokenizer.model", "tokenizer.model")


class Tokenizer:
    """Text <-> token ids with the ranks of one file.

    Attributes:
        vocab_size: ranks plus 256 special tokens; every id is below it.
        bos_id, eos_id: ids of <|begin_of_text|> and <|end_of_text|>.

    Raises:
        ConfigError: the file is missing or is no rank file.
    """

    def __init__(self, path: str | None = None) -> None:
        import tiktoken

        ranks = _read_ranks(path or default_tokenizer_path())
        special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size: int = len(ranks) + NUM_SPECIAL_TOKENS
        self.bos_id: int = special["<|begin_of_text|>"]
        self.eos_id: int = special["<|end_of_text|>"]

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the token ids of `text` as a list; see `encode_to_numpy`."""
        return self.encode_to_numpy(text, bos=bos, eos=eos).tolist()

    def encode_to_numpy(self, text: str, *, bos: bool = False, eos: bool = False) -> np.ndarray:
        """Return the token ids (n,) int64 of `text`, optionally between <|begin_of_text|> and <|end_of_text|>.

        Special-token strings inside `text` are ordinary text. A lone surrogate becomes U+FFFD.
        """
        try:
            parts = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in split_long_runs(text)]
        except UnicodeEncodeError:
            return self.encode_to_numpy(replace_surrogates(text), bos=bos, eos=eos)
        n = sum(len(part) for part in parts)
        ids = np.empty(n + bos + eos, dtype=np.int64)
        if n:
            np.concatenate(parts, out=ids[bos : bos + n], casting="same_kind")
        if bos:
            ids[0] = self.bos_id
        if eos:
            ids[-1] = self.eos_id
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with special tokens by name, and bytes that are not UTF-8 as U+FFFD."""
        return self._encoding.decode(list(ids))


def replace_surrogates(text: str) -> str:
    """Return `text` as legal Unicode: surrogate pairs joined, lone surrogates as U+FFFD (tiktoken's rule)."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def split_long_runs(text: str) -> Iterator[str]:
    """Yield pieces of `text`, cut only inside runs of more than MAX_RUN characters.

    A run is a maximal stretch of white space, or of anything else. Ordinary text is one piece.
    """
    if len(text) <= MAX_RUN:
        yield text
        return
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    blank = _IS_BLANK[np.minimum(codes, len(_IS_BLANK) - 1)]
    edges = np.concatenate(([0], np.flatnonzero(blank[1:] != blank[:-1]) + 1, [len(text)]))
    start = 0
    for run in np.flatnonzero(np.diff(edges) > MAX_RUN):
        for cut in range(int(edges[run]) + MAX_RUN, int(edges[run + 1]), MAX_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def default_tokenizer_path() -> str:
    """Return the shipped tokenizer: 4,096 ranks, trained on the Python standard library."""
    return Model().tokenizer_file


def vocab_size_of(path: str | None = None) -> int:
    """Return `Tokenizer(path).vocab_size`, without tiktoken.

    Raises:
        ConfigError: the file is missing or is no rank file.
    """
    return len(_read_ranks(path or default_tokenizer_path())) + NUM_SPECIAL_TOKENS


@lru_cache(maxsize=1)  # a job reads the size first, and builds the tokenizer later
def _read_ranks(path: str) -> dict[bytes, int]:
    """Return the bytes of each token -> rank; the ranks are 0, 1, 2, ... in any order."""
    hint = (
        "; get Llama 3's with `lct download-tokenizer`, train one with `lct train-tokenizer`,"
        " or leave model.tokenizer_path out for the shipped one"
    )
    try:
        with open(_rank_file(path), "rb") as file:
            lines = file.read().splitlines()
    except IsADirectoryError:
        other = Path(path, "tokenizer.json").exists()
        raise ConfigError(
            f"model.tokenizer_path = {path!r} is a folder without {' and '.join(_IN_A_FOLDER)}"
            + (" (its tokenizer.json has another format, which is not supported)" if other else "")
            + hint
        ) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise MissingFile(f"model.tokenizer_path = {path!r} does not exist{hint}") from None
        raise ConfigError(f"model.tokenizer_path = {path!r} cannot be read ({error.strerror}){hint}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(
                f"model.tokenizer_path = {path!r} is no tokenizer of tiktoken's format (line {number} must be"
                f" `base64 rank`){hint}"
            ) from None
    if len(set(ranks.values())) != len(ranks) or set(ranks.values()) != set(range(len(ranks))):
        raise ConfigError(f"model.tokenizer_path = {path!r} must number its tokens 0, 1, 2, ... without a gap{hint}")
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:
        raise ConfigError(f"model.tokenizer_path = {path!r} lacks {missing} of the 256 single-byte tokens{hint}")
    return ranks


def _rank_file(path: str) -> str:
    """Return the file itself, or the first of `_IN_A_FOLDER` that a folder has."""
    files = (os.path.join(path, name) for name in _IN_A_FOLDER)
    return next((file for file in files if os.path.isfile(file)), path) if os.path.isdir(path) else path

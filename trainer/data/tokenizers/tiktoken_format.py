"""Llama 3's tokenizer by tiktoken, for any rank file: byte-level BPE ranks, then 256 special tokens.

A rank file has one token a line, `base64-of-its-bytes rank`, as Meta publishes it (`original/tokenizer.model`).
"""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.tokenizers.tokenizer import HINT, Tokenizer

# How Llama 3 splits text before any merge: contractions, words, up to three digits, punctuation, white space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL_TOKENS = 256
_NAMES = (
    "begin_of_text",
    "end_of_text",
    "reserved_special_token_0",
    "reserved_special_token_1",
    "finetune_right_pad_id",
    "reserved_special_token_2",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
    *(f"reserved_special_token_{i}" for i in range(3, NUM_SPECIAL_TOKENS - 8)),
)
# Llama 3.1's names in the order of their ids: 128,000 ranks give <|begin_of_text|> = 128000, vocab_size = 128256.
SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in _NAMES)
_SPECIAL = re.compile(f"({'|'.join(map(re.escape, SPECIAL_TOKENS))})")

# Most characters of a run of white space, or of other characters, that tiktoken gets (the limit of Llama 3). Its regex
# overflows its stack on a million blanks, and its merges are slow on very long words.
MAX_RUN = 25_000
# by code point; the last entry is for all higher code points
_IS_BLANK = np.array([chr(code).isspace() for code in range(0x3002)])
_IS_BLANK[0x1C:0x20] = False  # white space of Python, and not of Unicode


class TiktokenTokenizer(Tokenizer):
    """A tokenizer with the ranks of one file. 256 special tokens follow; the first two begin and end a text.

    Args:
        file: The rank file.
        shown: The path of the user, for messages.

    Raises:
        ConfigError: The file is no rank file.
    """

    def __init__(self, file: str, shown: str) -> None:
        import tiktoken

        ranks = read_ranks(file, shown)
        special = self._special = {name: i for i, name in enumerate(SPECIAL_TOKENS, len(ranks))}
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = len(ranks) + NUM_SPECIAL_TOKENS
        self.bos_id = special["<|begin_of_text|>"]
        self.eos_id = special["<|end_of_text|>"]

    def ids_of(self, text: str) -> Sequence[np.ndarray]:
        """Return the token ids of a text in consecutive parts, without begin and end; see `Tokenizer.ids_of`.

        Args:
            text: Legal Unicode.
        """
        return [
            self._encoding.encode_to_numpy(piece, disallowed_special=())
            for piece in split_long_runs(text)
        ]

    def encode_with_places(self, text: str, *, special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, (n,), and the characters [start, stop) of each, (n, 2); see `Tokenizer.encode_with_places`.

        A character that two tokens share is in the characters of both.

        Args:
            text: Legal Unicode.
            special: Whether to read names of special tokens as these tokens.
        """
        parts = _SPECIAL.split(text) if special else [text]
        ids = []
        for number, part in enumerate(parts):
            ids += [self._special[part]] if number % 2 else self.encode(part)
        tokens = self._encoding.decode_tokens_bytes(ids)
        lengths = np.array([len(token) for token in tokens], dtype=np.int64)
        stops = np.cumsum(lengths)
        # The character of each byte; a character that is cut belongs to both tokens.
        starts_one = np.frombuffer(text.encode(), dtype=np.uint8) & 0xC0 != 0x80
        character = np.cumsum(starts_one) - 1
        places = np.stack([character[stops - lengths], character[stops - 1] + 1], axis=1)
        return np.array(ids, dtype=np.int64), places

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; see `Tokenizer.decode`.

        Args:
            ids: Token ids.
        """
        return self._encoding.decode(list(ids))


def split_long_runs(text: str) -> Iterator[str]:
    """Yield the pieces of a text in order. A text is cut only inside runs of more than MAX_RUN characters.

    A run is a maximal stretch of white space, or of other characters. Ordinary text is one piece.

    Args:
        text: The text.
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


@lru_cache(maxsize=1)  # a job reads the size first, and builds the tokenizer later
def read_ranks(file: str, shown: str) -> dict[bytes, int]:
    """Return the rank of each token, by its bytes; the ranks are 0, 1, 2, ... in any order.

    The result is kept, so callers must not change it.

    Args:
        file: The rank file.
        shown: The path of the user, for messages.

    Raises:
        ConfigError: The file is no rank file, has a gap in the ranks, or lacks a single byte.
    """
    lines = Path(file).read_bytes().splitlines()
    ranks = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(
                f"model.tokenizer_path = {shown!r} is no tokenizer of tiktoken's format (line {number} must be"
                f" `base64 rank`){HINT}"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(
            f"model.tokenizer_path = {shown!r} must number its tokens 0, 1, 2, ... without a gap{HINT}"
        )
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:
        raise ConfigError(
            f"model.tokenizer_path = {shown!r} lacks {missing} of the 256 single-byte tokens{HINT}"
        )
    return ranks


def facts(file: str, shown: str) -> tuple[int, tuple[str, ...]]:
    """Return the size of the vocabulary, and the texts of the special tokens, without tiktoken.

    Args:
        file: The rank file.
        shown: The path of the user, for messages.
    """
    return len(read_ranks(file, shown)) + NUM_SPECIAL_TOKENS, SPECIAL_TOKENS


FORMAT = TiktokenTokenizer

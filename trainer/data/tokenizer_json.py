"""Tokenizers of Hugging Face: `tokenizer.json`, and the files beside it that say what begins and ends a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.tokenizer import Tokenizer


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`. given: the path as the user gave it, for messages.

    The tokens that begin and end a text are those of `tokenizer_config.json`, else those of `generation_config.json` or
    `config.json`. With `add_bos_token = false` nothing begins a text.

    Raises:
        ConfigError: the file is damaged, or the files beside it name no token that ends a text, or an id that is none.
    """

    def __init__(self, file: str, given: str) -> None:
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import processors

        self.vocab_size = vocab_size(file, given)
        try:
            self._tokenizer = FastTokenizer.from_file(file)
        except Exception as error:  # the library raises nothing more special
            raise _damaged(given, str(error)) from None
        self._tokenizer.encode_special_tokens = True  # their names in a text are ordinary text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # One that adds tokens is not wanted, and one for bytes takes blanks out of the places of tokens.
        self._tokenizer.post_processor = processors.Sequence([])
        self.bos_id, self.eos_id = self._ends(Path(file).parent, given)

    def ids_of(self, text: str) -> Sequence[Sequence[int]]:
        text.encode()  # a lone surrogate raises here as in other formats
        return [self._tokenizer.encode(text, add_special_tokens=False).ids]

    def encode_with_places(self, text: str, *, special: bool) -> tuple[np.ndarray, np.ndarray]:
        self._tokenizer.encode_special_tokens = not special
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        self._tokenizer.encode_special_tokens = True
        return np.array(encoding.ids, dtype=np.int64), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _ends(self, folder: Path, given: str) -> tuple[int | None, int]:
        settings = read_settings(folder / "tokenizer_config.json")
        ends = [self._named(settings.get(f"{which}_token")) for which in ("bos", "eos")]
        for name in ("generation_config.json", "config.json"):
            others = read_settings(folder / name)
            for i, which in enumerate(("bos", "eos")):
                if ends[i] is None and f"{which}_token" not in settings:
                    ends[i] = _first(others.get(f"{which}_token_id"))
        for which, end in zip(("bos", "eos"), ends, strict=True):
            if end is not None and (type(end) is not int or not 0 <= end < self.vocab_size):
                raise ConfigError(
                    f"model.tokenizer_path = {given!r}: {which}_token_id = {end!r} beside tokenizer.json is no id of "
                    f"its {self.vocab_size}; copy all files from one model"
                )
        bos, eos = ends
        if eos is None:
            raise ConfigError(
                f"model.tokenizer_path = {given!r}: no file beside tokenizer.json names a token that ends a text; copy "
                "tokenizer_config.json there too, with its eos_token"
            )
        return (None if settings.get("add_bos_token") is False else bos), eos

    def _named(self, token: str | Mapping[str, Any] | None) -> int | None:
        """Return the id of a token, which older files write as an object."""
        name = token.get("content") if isinstance(token, Mapping) else token
        return self._tokenizer.token_to_id(name) if isinstance(name, str) else None


def _first(ids: int | list[int] | None) -> int | None:
    return ids if not isinstance(ids, list) else ids[0] if ids else None


def read_settings(file: Path) -> Mapping[str, Any]:
    """Return the content of a JSON object; empty if there is no such file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON ({error}); copy it again") from None
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=1)  # a job reads the size first, and builds the tokenizer later
def vocab_size(file: str, given: str) -> int:
    """Return one more than the largest id, without the library.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return 1 + max([*ids, *(token["id"] for token in content.get("added_tokens", []))])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(given, f"{type(error).__name__}: {error}") from None


def _damaged(given: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model.tokenizer_path = {given!r} is no tokenizer.json of Hugging Face's tokenizers "
        f"({reason.strip().splitlines()[0][:200]}); copy it again, or name another tokenizer"
    )

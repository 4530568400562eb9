"""Tokenizers of Hugging Face: `tokenizer.json`, and the files next to it that name the tokens of a text's ends."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from trainer.config.errors import ConfigError, first_line
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.hugging_face.config_json import read_settings


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`.

    A text begins with the token that the file's own post-processor adds, as in transformers: `bos_token` alone adds
    none. It ends with the `eos_token` of `tokenizer_config.json`, else of `generation_config.json` or `config.json`.

    Args:
        file: The file.
        shown: The path of the user, for messages.

    Raises:
        ConfigError: The file is damaged, or begins a text with several tokens; or no other file names a token that ends
            a text, or names an id that does not exist.
    """

    def __init__(self, file: str, shown: str) -> None:
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import processors

        self.vocab_size, _ = facts(file, shown)
        try:
            self._tokenizer = FastTokenizer.from_file(file)
        except Exception as error:  # the library raises no other type
            raise _damaged(shown, first_line(error)) from None
        self._tokenizer.encode_special_tokens = True  # their names in a text are ordinary text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.bos_id = self._added_before_text(shown)
        # A post-processor that adds tokens is not wanted, and one for bytes removes blanks from the places of tokens.
        self._tokenizer.post_processor = processors.Sequence([])
        self.eos_id = self._end(Path(file).parent, shown)

    def ids_of(self, text: str) -> Sequence[Sequence[int]]:
        """Return the token ids of a text in parts; see `Tokenizer.ids_of`.

        Args:
            text: Legal Unicode.
        """
        text.encode()  # a lone surrogate raises here as in other formats
        return [self._tokenizer.encode(text, add_special_tokens=False).ids]

    def encode_with_places(self, text: str, *, special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and the characters [start, stop) of each token; see `Tokenizer.encode_with_places`.

        Args:
            text: Legal Unicode.
            special: Whether to read names of special tokens as these tokens.
        """
        self._tokenizer.encode_special_tokens = not special
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        self._tokenizer.encode_special_tokens = True
        return np.array(encoding.ids, dtype=np.int64), np.array(
            encoding.offsets, dtype=np.int64
        ).reshape(-1, 2)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; see `Tokenizer.decode`.

        Args:
            ids: Token ids.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _added_before_text(self, shown: str) -> int | None:
        text, whole = (
            self._tokenizer.encode("a", add_special_tokens=special).ids
            for special in (False, True)
        )
        begin = whole[: next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)]
        if len(begin) > 1:
            raise ConfigError(
                f"model.tokenizer_path = {shown!r} begins a text with {len(begin)} tokens, and only one is supported; "
                "take its post_processor out of a copy of tokenizer.json for texts without them"
            )
        return begin[0] if begin else None

    def _end(self, folder: Path, shown: str) -> int:
        settings = read_settings(folder / "tokenizer_config.json")
        name = settings.get("eos_token")
        # older files have an object
        name = name.get("content") if isinstance(name, Mapping) else name
        end = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
        for name in ("generation_config.json", "config.json"):
            if end is None and "eos_token" not in settings:
                ids = read_settings(folder / name).get("eos_token_id")
                end = next(iter(ids), None) if isinstance(ids, list) else ids
        if end is None:
            raise ConfigError(
                f"model.tokenizer_path = {shown!r}: no file next to tokenizer.json names a token that ends a text; "
                "copy tokenizer_config.json there too, with its eos_token"
            )
        if type(end) is not int or not 0 <= end < self.vocab_size:
            raise ConfigError(
                f"model.tokenizer_path = {shown!r}: eos_token_id = {end!r} next to tokenizer.json is no id of its "
                f"{self.vocab_size}; copy all files from one model"
            )
        return end


@lru_cache(maxsize=1)  # a job reads the size first, and builds the tokenizer later
def facts(file: str, shown: str) -> tuple[int, tuple[str, ...]]:
    """Return one more than the largest id, and the texts of the special tokens.

    The package `tokenizers` is not needed. The result of the last file is kept.

    Args:
        file: The file.
        shown: The path of the user, for messages.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        content = json.loads(Path(file).read_text("utf-8"))
        vocab = content["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        added = content.get("added_tokens", [])
        special = tuple(token["content"] for token in added if token.get("special"))
        return 1 + max([*ids, *(token["id"] for token in added)]), special
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(shown, f"{type(error).__name__}: {error}") from None


def _damaged(shown: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model.tokenizer_path = {shown!r} is no tokenizer.json of Hugging Face's tokenizers "
        f"({reason[:200]}); copy it again, or name another tokenizer"
    )


FORMAT = JsonTokenizer

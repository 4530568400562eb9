"""Models of sentencepiece, such as Llama 2's `tokenizer.model`. The package is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from trainer.config.errors import ConfigError, MissingFile
from trainer.data.tokenizer import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A model of sentencepiece. given: the path as the user gave it, for messages.

    Raises:
        MissingFile: the package is not installed.
        ConfigError: the file is damaged.
    """

    def __init__(self, file: str, given: str) -> None:
        self._model = _opened(file, given)
        self.vocab_size = self._model.get_piece_size()
        self.bos_id, self.eos_id = (None if i < 0 else i for i in (self._model.bos_id(), self._model.eos_id()))

    def ids_of(self, text: str) -> Sequence[Sequence[int]]:
        text.encode()  # a lone surrogate raises here as in other formats
        return [self._model.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        parts = []
        for is_special, group in groupby(map(int, ids), self._model.is_control):
            some = list(group)
            parts += map(self._model.id_to_piece, some) if is_special else [self._model.decode(some)]
        return "".join(parts)


def vocab_size(file: str, given: str) -> int:
    """Return `SentencePieceTokenizer(file, given).vocab_size`."""
    return _opened(file, given).get_piece_size()


def _opened(file: str, given: str) -> Any:
    if find_spec("sentencepiece") is None:
        raise MissingFile(
            f"model.tokenizer_path = {given!r} is a model of sentencepiece, which needs a package: "
            "pip install sentencepiece"
        )
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=file)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1:] or ["damaged"]
        raise ConfigError(
            f"model.tokenizer_path = {given!r} is no model of sentencepiece ({reason[0][:200]}); copy it again"
        ) from None

"""Documents of known tokens, which worker processes can open: torch-free, and importable by name."""

import logging
import os
import sys

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.mixture import Mixture
from trainer.data.packing.whole import DocumentEncoder, WholeStream
from trainer.data.sources.bad_records import BadRecord
from trainer.data.text_data import DocumentStream, TextData


class Numbers:
    """A source whose document i has tokens 1000 i + 1, 2, ...; the tokenizer is not asked. bad: cannot be read."""

    def __init__(self, lengths: list[int], bad: int = -1) -> None:
        self.lengths, self.bad = lengths, bad

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        if i == self.bad:
            raise BadRecord(f"document {i} is damaged")
        return np.arange(1, self.lengths[i] + 1) + 1000 * i

    def digests(self, documents: int) -> list[int]:
        """Return what tells changed data apart."""
        return self.lengths[:documents]


class Telling(Numbers):
    """It logs each document that is read, and the processes that read."""

    def __getitem__(self, i: int) -> np.ndarray:
        logging.getLogger("trainer").warning(f"document {i} read by {os.getpid()}")
        return super().__getitem__(i)


def opened(lengths: list[int], packing: str = "concatenate", bad: int = -1) -> TextData:
    """Return documents of these lengths, as `open_text` would."""
    if packing == "concatenate":
        return TextData(Numbers(lengths, bad), None, DocumentStream)
    return TextData(Numbers(lengths, bad), DocumentEncoder(None), WholeStream)


def telling(lengths: list[int]) -> TextData:
    """Return documents that say when they are read."""
    return TextData(Telling(lengths), None, DocumentStream)


def imported() -> TextData:
    """Refuse the data with the names of large packages that this process has imported."""
    raise ConfigError(f"imported: {sorted({'torch', 'jinja2', 'tests.numbered'} & set(sys.modules))}")


class Unsendable(Exception):
    """An error that cannot be made of its arguments again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def failing() -> TextData:
    """Fail in a way that no message can carry."""
    raise Unsendable("the disk is gone", "more")


def mixed(names: str, weights: tuple[float, ...]) -> Mixture:
    """Return a mixture of up to three sources, of 32, 24 and 16 documents; tokens are above 1, 2, 3 millions."""
    parts = {
        name: TextData(_Shifted([7 + 13 * i % 50 for i in range(40 - 8 * k)], 10**6 * k), None)
        for k, name in enumerate(names, 1)
    }
    return Mixture(parts, weights)


class _Shifted(Numbers):
    """Documents whose tokens begin above a number."""

    def __init__(self, lengths: list[int], above: int) -> None:
        super().__init__(lengths)
        self._above = above

    def __getitem__(self, i: int) -> np.ndarray:
        return super().__getitem__(i) + self._above

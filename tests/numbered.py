"""Documents of known tokens, by number."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from trainer.data.mixture import Mixture
from trainer.data.sources.records import BadRecord
from trainer.data.text_data import TextData
from trainer.data.token_files.format import index_bytes
from trainer.data.tokenizers.tokenizer import Encoded


class Numbers:
    """A source whose document i has tokens 1000 i + 1, 2, ...; bad: one that cannot be read."""

    made_by = MappingProxyType({})

    def __init__(self, lengths: list[int], bad: int = -1, above: int = 0) -> None:
        self.sizes, self.bad, self.above = lengths, bad, above

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> Encoded:
        if i == self.bad:
            raise BadRecord(f"document {i} is damaged")
        return Encoded(np.arange(1, self.sizes[i] + 1) + 1000 * i + self.above)

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document."""
        return np.array(self.sizes)

    def fingerprint(self, documents: int) -> int:
        """Return a hash that changes with the data."""
        return hash(tuple(self.sizes[:documents])) >> 1


class Ids(Numbers):
    """A source of given token ids."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        super().__init__([len(ids) for ids in documents])
        self.documents = [np.array(ids, dtype=np.int64) for ids in documents]

    def __getitem__(self, i: int) -> Encoded:
        return Encoded(self.documents[i])

    def fingerprint(self, documents: int) -> int:
        return hash(tuple(ids.tobytes() for ids in self.documents[:documents])) >> 1


def mixed(names: str, weights: tuple[float, ...]) -> Mixture:
    """Return a mixture of up to three sources, of 32, 24 and 16 documents; tokens are above 1, 2, 3 millions."""
    parts = {
        name: TextData(Numbers([7 + 13 * i % 50 for i in range(40 - 8 * k)], above=10**6 * k))
        for k, name in enumerate(names, 1)
    }
    return Mixture(parts, weights)


def write_pair(stem: str | Path, ids: Sequence[int]) -> None:
    """Write a document as token files of another program."""
    Path(f"{stem}.bin").write_bytes(np.array(ids, dtype="<u2").tobytes())
    Path(f"{stem}.idx").write_bytes(b"".join(index_bytes(8, [len(ids)])))

"""Two documents that are packed together, the sides of a pair of answers. Torch-free."""

import numpy as np

from trainer.data.token_files.reader import TokenFiles
from trainer.data.tokenizers.encoders import NOTHING, Encoded


class Pairs:
    """Token files whose documents 2 i and 2 i + 1 are the sides of pair i; it is used as `TokenFiles` is."""

    def __init__(self, documents: TokenFiles) -> None:
        self._documents, self.made_by = documents, documents.made_by

    def __len__(self) -> int:
        return len(self._documents) // 2

    def __getitem__(self, i: int) -> Encoded:
        """Return the sides one after the other; nothing if one of them is a bad record. It raises as `TokenFiles`."""
        sides = [self._documents[2 * i + side] for side in range(2)]
        if not all(len(side.ids) for side in sides):
            return NOTHING
        ids, answers = (np.concatenate(column) for column in list(zip(*sides, strict=True))[:2])
        return Encoded(ids, answers, tuple(len(side.ids) for side in sides))

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each pair, (n,) int64."""
        lengths = self._documents.lengths()
        return lengths[::2] + lengths[1::2]

    def answers(self) -> int | None:
        """Return the number of tokens that are learned in both sides."""
        return self._documents.answers()

    def fingerprint(self, pairs: int) -> int:
        """Return a 63-bit hash of the content of the first pairs; 0: they end within a file."""
        return self._documents.fingerprint(2 * pairs)

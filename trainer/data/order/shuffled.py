"""The shuffled order of the items of a data set: by a sort, or for many items by a cipher. Torch-free.

Up to SORTED items are shuffled by sorting random bits. Sorting the 365 million documents of C4 would take a minute and
7 GiB on each rank. So a cipher orders more items: a Feistel network with keys from the seed. It writes a place as a row
and a column of a grid, and shifts row and column in turn by a hash of the other. Every round can be undone, so that
each place has its own item. A place after the last item goes through the cipher again (cycle walking); there are fewer
such places than a row has.
"""

from collections.abc import Sequence
from math import isqrt

import numpy as np

SORTED = 1 << 16
"""Most items that are ordered by a sort: a cipher has too few keys to shuffle few items well."""


ORDER = 2
"""Version of the order of more than SORTED items; older checkpoints have none."""


# Each round has two hashes. Three rounds are a pseudorandom permutation (Luby and Rackoff, 1988).
_ROUNDS = 4


_MASK = 2**64 - 1


class Permutation(Sequence[int]):
    """A permutation of range(n), n > SORTED, at some of its places; at first at all places.

    A slice has the places of the same slice of a list.

    Args:
        n: Number of items.
        keys: Two 64-bit numbers for each round.
        places: The places; None for all.
    """

    def __init__(self, n: int, keys: Sequence[int], places: range | None = None) -> None:
        self._n = n
        self._columns = isqrt(n - 1) + 1
        self._keys = keys
        self._rows = -(-n // self._columns)
        self._places = range(n) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int | slice) -> "int | Permutation":
        if isinstance(place, slice):
            return Permutation(self._n, self._keys, self._places[place])
        place = self._places[place]
        while True:
            row, column = divmod(place, self._columns)
            for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
                row = (row + _hash(column ^ first)) % self._rows
                column = (column + _hash(row ^ second)) % self._columns
            place = row * self._columns + column
            if place < self._n:
                return place


def shuffled(n: int, seed: int, *purpose: int) -> np.ndarray | Permutation:
    """Return a permutation of range(n) that depends only on the arguments, on every machine.

    It is an array, (n,), uint32; for more than SORTED items it is a Permutation.

    It is made of raw bits: numpy keeps a bit generator's stream from version to version, but not `permutation`.

    Args:
        n: Number of items.
        seed: The seed.
        *purpose: Numbers that distinguish permutations of one seed.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed % 2**64, spawn_key=purpose))
    if n <= SORTED:
        return np.argsort(bits.random_raw(n), kind="stable").astype(np.uint32)
    return Permutation(n, bits.random_raw(2 * _ROUNDS).tolist())


def _hash(x: int) -> int:
    """Return 64 bits that depend on all bits of x: the finalizer of MurmurHash3."""
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & _MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33

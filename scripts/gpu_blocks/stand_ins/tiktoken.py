"""A stand-in for tiktoken on machines without it: it encodes text byte by byte, with the same vocabulary.

A check of GPUs needs ids of real text, but not the best ones. If tiktoken is installed, it is used.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np


class Encoding:
    """Encodes each byte as the token of this byte, which every file of ranks has.

    Args:
        name: The name of the encoding; not used.
        pat_str: The pattern that splits text; not used.
        mergeable_ranks: Token -> its number.
        special_tokens: Special token -> its number; not used.
    """

    def __init__(
        self, name: str, *, pat_str: str, mergeable_ranks: Mapping[bytes, int], special_tokens: Mapping[str, int]
    ) -> None:
        self._ids = np.array([mergeable_ranks[bytes([value])] for value in range(256)], dtype=np.uint32)
        self._bytes = {rank: token for token, rank in mergeable_ranks.items()}

    def encode_to_numpy(self, text: str, *, disallowed_special: Collection[str]) -> np.ndarray:
        """Return the tokens of a text, uint32.

        Args:
            text: The text.
            disallowed_special: Not used.
        """
        return self._ids[np.frombuffer(text.encode(), dtype=np.uint8)]

    def decode_tokens_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token.

        Args:
            ids: The tokens.
        """
        return [self._bytes[i] for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens. Bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: The tokens.
        """
        return b"".join(self.decode_tokens_bytes(ids)).decode("utf-8", "replace")

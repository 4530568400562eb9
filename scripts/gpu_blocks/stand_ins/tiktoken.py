"""What stands for tiktoken where it is not installed: text is encoded byte by byte, with the same vocabulary.

A check of GPUs needs some ids of real text, not good ones. The package itself is used wherever it is installed.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np


class Encoding:
    """Encode each byte as the token of that byte, which all files of ranks have."""

    def __init__(
        self, name: str, *, pat_str: str, mergeable_ranks: Mapping[bytes, int], special_tokens: Mapping[str, int]
    ) -> None:
        self._ids = np.array([mergeable_ranks[bytes([value])] for value in range(256)], dtype=np.uint32)
        self._bytes = {rank: token for token, rank in mergeable_ranks.items()}

    def encode_to_numpy(self, text: str, *, disallowed_special: Collection[str]) -> np.ndarray:
        return self._ids[np.frombuffer(text.encode(), dtype=np.uint8)]

    def decode_tokens_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [self._bytes[i] for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.decode_tokens_bytes(ids)).decode("utf-8", "replace")

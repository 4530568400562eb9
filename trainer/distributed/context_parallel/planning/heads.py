"""Which heads a rank works on, and which of them travel together."""

import math
from dataclasses import dataclass

from trainer.distributed.sharding.ranges import Range


@dataclass(frozen=True)
class HeadShare:
    """Heads that each rank works on in one pass of all-to-all: of its `per_rank` key/value heads, start to stop.

    copies: how often each key/value head is replicated; group: query heads for each of the replicated ones.
    """

    per_rank: int
    copies: int
    group: int
    start: int
    stop: int

    @classmethod
    def passes(cls, heads: int, kv_heads: int, degree: int, heads_per_pass: int = 0) -> list["HeadShare"]:
        """The passes, with `heads_per_pass` key/value heads a rank in each, or (0) all of them in one.

        Raises:
            ValueError: the degree does not divide the query heads; the sentence lists those that do.
        """
        check_heads(heads, degree)
        replicated = math.lcm(kv_heads, degree)
        per_rank = replicated // degree
        copies, group = replicated // kv_heads, heads // replicated
        return [cls(per_rank, copies, group, *part) for part in passes_of(per_rank, heads_per_pass)]

    def keys(self, rank: int) -> list[int]:
        """Key/value heads of `rank`, a replicated one as often as it has copies there."""
        first = rank * self.per_rank
        return [head // self.copies for head in range(first + self.start, first + self.stop)]

    def queries(self, rank: int) -> slice:
        """Query heads of `rank`."""
        first = rank * self.per_rank
        return slice((first + self.start) * self.group, (first + self.stop) * self.group)


def passes_of(kv_heads: int, heads_per_pass: int) -> list[Range]:
    """Key/value heads of each pass: so many at a time, the last ones fewer; 0: all at once."""
    size = heads_per_pass or max(kv_heads, 1)
    return [(start, min(start + size, kv_heads)) for start in range(0, kv_heads, size)]


def check_heads(heads: int, degree: int, method: str = "all_to_all") -> None:
    """Check that so many ranks can divide the query heads.

    Raises:
        ValueError: it cannot; the sentence lists the degrees that work.
    """
    if heads % degree:
        works = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise ValueError(
            f"context_parallel_method = {method!r} over {degree} ranks cannot divide {heads} query heads among them; "
            f"degrees that work: {works}"
        )


def aligned(size: int) -> int:
    """Bytes that a piece takes in an all-to-all, where tensors of several types lie side by side."""
    return -(-size // 16) * 16

"""The heads that each rank has, and the passes in which they are sent."""

import math
from dataclasses import dataclass

from longshard.sharding.errors import OptionError
from longshard.sharding.ranges import Range


@dataclass(frozen=True)
class HeadShare:
    """The heads of each rank in one pass of all-to-all: of its `per_rank` key/value heads, start to stop.

    copies: how often each key/value head is replicated; group: query heads for each replicated key/value head.
    part: the query heads of a group; not all in passes of a part of one key/value head. The first of these passes has
    the keys and values, and the last one their gradients.
    """

    per_rank: int
    copies: int
    group: int
    start: int
    stop: int
    part: Range

    @classmethod
    def passes(
        cls,
        heads: int,
        kv_heads: int,
        degree: int,
        heads_per_pass: int = 0,
        query_heads: int = 0,
    ) -> list["HeadShare"]:
        """Return the passes, each with `heads_per_pass` key/value heads of a rank; 0: all in one.

        query_heads: of one key/value head that a pass has; 0: all.

        Raises:
            OptionError: the degree does not divide the query heads; the message lists degrees that do.
        """
        check_heads(heads, degree)
        replicated = math.lcm(kv_heads, degree)
        per_rank = replicated // degree
        copies = replicated // kv_heads
        group = heads // replicated
        of_rank = passes_of(per_rank, 1 if query_heads else heads_per_pass)
        parts = passes_of(group, query_heads)
        return [
            cls(per_rank, copies, group, *heads, part) for heads in of_rank for part in parts
        ]

    @property
    def has_keys(self) -> bool:
        """Whether keys and values are sent in this pass; else they are those of the pass before."""
        return self.part[0] == 0

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients of keys and values are complete with this pass."""
        return self.part[1] == self.group

    def keys(self, rank: int) -> list[int]:
        """Return the key/value heads of `rank`, a replicated one as often as it has copies there."""
        first = rank * self.per_rank
        return [head // self.copies for head in range(first + self.start, first + self.stop)]

    def queries(self, rank: int) -> slice:
        """Return the query heads of `rank`; of rank 0 they are those of this pass among the heads of any rank."""
        first = rank * self.per_rank
        return slice(
            (first + self.start) * self.group + self.part[0],
            (first + self.stop - 1) * self.group + self.part[1],
        )


def passes_of(kv_heads: int, heads_per_pass: int) -> list[Range]:
    """Return the key/value heads of each pass, `heads_per_pass` or (the last one) fewer; 0: all in one."""
    size = heads_per_pass or max(kv_heads, 1)
    return [(start, min(start + size, kv_heads)) for start in range(0, kv_heads, size)]


def check_heads(heads: int, degree: int, method: str = "all_to_all") -> None:
    """Check that `degree` divides the query heads.

    Raises:
        OptionError: it does not; the message lists degrees that do.
    """
    if heads % degree:
        works = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise OptionError(
            f"method = {method!r} over {degree} ranks cannot divide {heads} query heads among them; "
            f"degrees that work: {works}"
        )

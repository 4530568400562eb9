"""The heads that each rank computes, and the passes in which they are sent."""

import math
from dataclasses import dataclass

from longshard.sharding.errors import OptionError
from longshard.sharding.ranges import Range


@dataclass(frozen=True)
class HeadShare:
    """The heads of each rank in one pass of all-to-all. The pass has the key/value heads [start, stop) of a rank.

    If passes have only a part of the query heads of one key/value head, the first of these passes has the keys and
    values. The last one has their gradients.

    Attributes:
        per_rank: Number of key/value heads of a rank, in all passes.
        copies: Number of copies of each key/value head.
        group: Number of query heads for each copy.
        start: The first key/value head of the pass, counted from the rank's first one.
        stop: The end of these heads.
        part: The query heads of a group that the pass has.
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
        """Return the passes of a rank.

        Args:
            heads: Number of query heads.
            kv_heads: Number of key/value heads.
            degree: Number of ranks that divide the heads.
            heads_per_pass: Key/value heads of a rank in a pass; 0 means all. If `query_heads` is not 0, it counts as 1.
            query_heads: Query heads of one key/value head in a pass; 0 means all.

        Raises:
            OptionError: The degree does not divide the query heads; the message lists degrees that do.
        """
        check_heads(heads, degree)
        replicated = math.lcm(kv_heads, degree)
        per_rank = replicated // degree
        copies = replicated // kv_heads
        group = heads // replicated
        ranges = passes_of(per_rank, 1 if query_heads else heads_per_pass)
        parts = passes_of(group, query_heads)
        return [
            cls(per_rank, copies, group, *heads, part) for heads in ranges for part in parts
        ]

    @property
    def has_keys(self) -> bool:
        """Whether keys and values are sent in this pass; otherwise the pass uses the ones of the pass before."""
        return self.part[0] == 0

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients of keys and values are complete with this pass."""
        return self.part[1] == self.group

    def queries(self, rank: int) -> slice:
        """Return the query heads of a rank in this pass, counted over all ranks.

        For rank 0 they are also the heads of this pass counted from the first head of any rank.

        Args:
            rank: The rank.
        """
        first = rank * self.per_rank
        return slice(
            (first + self.start) * self.group + self.part[0],
            (first + self.stop - 1) * self.group + self.part[1],
        )


def passes_of(kv_heads: int, heads_per_pass: int) -> list[Range]:
    """Return the ranges of heads of the passes; the last pass may have fewer heads.

    Args:
        kv_heads: Number of heads.
        heads_per_pass: Heads of a pass; 0 means all.
    """
    size = heads_per_pass or max(kv_heads, 1)
    return [(start, min(start + size, kv_heads)) for start in range(0, kv_heads, size)]


def check_heads(heads: int, degree: int, method: str = "all_to_all") -> None:
    """Check that a degree divides the query heads.

    Args:
        heads: Number of query heads.
        degree: Number of ranks.
        method: The method, for the message.

    Raises:
        OptionError: It does not; the message lists degrees that do.
    """
    if heads % degree:
        works = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise OptionError(
            f"method = {method!r} over {degree} ranks cannot divide {heads} query heads among them; "
            f"degrees that work: {works}"
        )

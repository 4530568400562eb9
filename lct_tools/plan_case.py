"""The case that `lct plan` shows: layout, mask and method, with the plans and costs of its ranks. Torch-free."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longshard.context.planning.cost import AttentionShape, Cost, attention_cost
from longshard.context.planning.mask import Mask
from longshard.context.planning.methods import make_plan
from longshard.context.planning.options import ContextParallelOptions
from longshard.context.planning.plan import RankPlan, Stage
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Ranges, union

DIRECTIONS = ("forward", "backward")
MOST_RANKS = 64
"""Largest number of ranks that are all planned and drawn. Of more ranks, a sample is planned."""
_SAMPLES = 16


@dataclass(frozen=True, eq=False)
class Case:
    """One attention call on one sequence, with the plan and the cost of each rank, which are made at first use.

    Attributes:
        layout: Which rank owns which tokens.
        mask: The mask of attention.
        mask_name: The name of the mask.
        options: The options of context parallelism.
        direction: The direction of the stages and of the picture, "forward" or "backward".
        shape: The shape of attention.
        reason: Why `auto` chose the method; empty if the command line names it.
    """

    layout: AxisLayout
    mask: Mask
    mask_name: str
    options: ContextParallelOptions
    direction: str
    shape: AttentionShape
    reason: str = ""

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.layout.degree

    @property
    def head_degree(self) -> int:
        """Number of ranks in a head group."""
        return self.options.head_degree(self.degree)

    @property
    def ranks_named(self) -> str:
        """The number of ranks in words, such as `8 ranks`."""
        return f"{self.degree:,} rank{'s' * (self.degree > 1)}"

    @cached_property
    def middles(self) -> list[int]:
        """The ranks to average over: all ranks, or the middles of 16 equal parts if there are more than 64."""
        if self.degree <= MOST_RANKS:
            return [*range(self.degree)]
        return [(2 * part + 1) * self.degree // (2 * _SAMPLES) for part in range(_SAMPLES)]

    @cached_property
    def planned(self) -> list[int]:
        """The ranks that have plans: the ranks to average over, the first two and the last two."""
        return sorted({*self.middles, *range(self.degree)[:2], *range(self.degree)[-2:]})

    @cached_property
    def plans(self) -> dict[int, RankPlan]:
        """The plans of the planned ranks, by rank."""
        settings = self.layout, self.mask, self.options.method
        return {
            rank: make_plan(*settings, rank, head_degree=self.head_degree)
            for rank in self.planned
        }

    @cached_property
    def costs(self) -> dict[str, dict[int, Cost]]:
        """Direction -> rank -> cost of the rank."""
        plans = self.plans.items()
        return {
            d: {rank: attention_cost(plan, self.shape, d) for rank, plan in plans}
            for d in DIRECTIONS
        }

    @cached_property
    def pairs(self) -> np.ndarray:
        """The number of visible pairs of each rank, counted for one head, (degree,) int64. It needs no plan.

        All ranks of a head group have the same number.
        """
        total = np.concatenate([[0], np.cumsum(self.mask.work())])
        pairs = [
            sum(int(total[stop] - total[start]) for start, stop in ranges)
            for ranges in self._queries
        ]
        return np.repeat(np.array(pairs, dtype=np.int64), self.head_degree)

    def stages(self, rank: int, direction: str | None = None) -> tuple[Stage, ...]:
        """Return the stages of a rank.

        Args:
            rank: The rank.
            direction: "forward" or "backward"; None for the direction of the case.
        """
        plan = self.plans[rank]
        return plan.forward if (direction or self.direction) == "forward" else plan.backward

    def queries(self, rank: int) -> Ranges:
        """Return the ranges of queries of a rank's head group, in ascending order.

        Args:
            rank: The rank.
        """
        return self._queries[rank // self.head_degree]

    @cached_property
    def _queries(self) -> list[Ranges]:
        firsts = range(0, self.degree, self.head_degree)
        return [
            union(sum(self.layout.ranges[first : first + self.head_degree], ()))
            for first in firsts
        ]

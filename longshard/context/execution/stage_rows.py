"""Records of the execution of a plan: a step, the K and V that it holds, and gradients on the way to their owners."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from longshard.context.planning.lowering import Launches
from longshard.context.planning.plan import Message, RankPlan, Stage
from longshard.sharding.exchange import Pending
from longshard.sharding.ranges import Offsets
from longshard.sharding.row_exchange import put_rows


class Item(NamedTuple):
    """One step of the execution: a stage, for some of the key/value heads.

    Attributes:
        stage: The stage.
        launches: The launches of the stage.
        kv_heads: The key/value heads.
    """

    stage: Stage
    launches: Launches
    kv_heads: slice


class Held(NamedTuple):
    """The K and V of a stage.

    Attributes:
        k: The keys, (B, heads, T, D), or latents, (B, 1, T, W).
        v: The values, (B, heads, T, D); with latents they have no width.
        rows: The buffer that k and v are views of; None for this rank's own K and V.
        places: The places of rows in the buffer; None for own K and V.
    """

    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor | None = None
    places: Offsets | None = None


@dataclass
class Returning:
    """Gradients of keys and values that are sent to their owners, or to the next rank, which adds to them.

    Attributes:
        pending: The handle of the transfers.
        arriving: The messages to this rank, and their buffers.
        reduced: The sum of all ranks' gradients of own rows, if they are reduced by a collective. Else None.
        heads: The key/value heads; None if nothing returns.
    """

    pending: Pending = field(default_factory=Pending)
    arriving: list[tuple[Message, torch.Tensor]] = field(default_factory=list)
    reduced: torch.Tensor | None = None
    heads: slice | None = None

    def has_sums_of(self, item: Item, plan: RankPlan) -> bool:
        """Return whether exactly the rows of an item's stage arrive, so that its gradients can be added to them.

        Args:
            item: The item.
            plan: The plan of this rank.
        """
        if len(self.arriving) != 1 or self.reduced is not None or self.heads != item.kv_heads:
            return False
        ranges = self.arriving[0][0].ranges
        stage = item.stage
        return not plan.owns(ranges[0]) and stage.places.places(ranges) == ((0, stage.rows),)

    def add(
        self,
        stage: Stage | None,
        gradient: torch.Tensor,
        own_gradient: torch.Tensor,
        plan: RankPlan,
    ) -> None:
        """Wait, and add the received gradients to the gradients of own rows, or of the rows of a stage.

        Args:
            stage: The stage that is computed meanwhile; None after the last one.
            gradient: The gradients of the stage's rows, (T, *row_shape).
            own_gradient: The gradients of own rows, (T, *row_shape).
            plan: The plan of this rank.
        """
        self.pending.wait()
        if self.reduced is not None:
            own_gradient[:, :, :, self.heads].add_(self.reduced[: own_gradient.shape[0]])
        for message, buffer in self.arriving:
            places = plan.own
            target = own_gradient[:, :, :, self.heads]
            if not plan.owns(message.ranges[0]):
                places = stage.places
                target = gradient
            put_rows(target, places.places(message.ranges), buffer, add=True)

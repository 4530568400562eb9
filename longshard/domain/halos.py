"""Halos that come with a norm: rows of other ranks, in the message of its statistics.

    norm -> functions by element -> convolution

The norm sends statistics, and the convolution rows at the ends of its shard. `parallelize` finds such chains in its
forward without data. From then on the norm sends rows of its input together with the statistics: who gets them
normalises them too, the functions by element are applied to them, and the convolution finds them. In the backward
their gradients travel with those of the statistics.

It concerns the first sharded dimension of the convolution. Who changes a shard in place loses its halo, and the
convolution fetches the rows as without it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longshard.domain.domain import Domain
from longshard.sharding.exchange import send_rows
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import Range, Ranges, difference, intersection, size
from longshard.sharding.rows import Axis, Wanted, plan_rows
from longshard.sharding.tensors import planned, version_of


class Reach(NamedTuple):
    """The rows of a dimension that a convolution reads, as `rows.fetch` takes them."""

    dim: int
    wanted: Wanted
    periodic: bool


Places = tuple[tuple[Range, ...], ...]
"""Ranges of rows, for each rank."""
Reaches = dict[tuple[int, AxisLayout], Reach]
"""What the convolution behind a norm reads, by dimension and layout of the norm's input."""


@dataclass
class Use:
    """Whether a convolution took a halo, and whether none may; of all halos that come from one norm."""

    is_taken: bool = False
    is_given_up: bool = False


class Halo(NamedTuple):
    """Rows of other ranks for a reach, and the version of the shard that they belong to."""

    rows: torch.Tensor
    reach: Reach
    version: int
    use: Use

    def after(self, rows: torch.Tensor, shard: torch.Tensor) -> "Halo":
        """Return the halo of a shard to which, as to the rows, a function by element was applied."""
        return Halo(rows, self.reach, version_of(shard), self.use)

    def give_up(self) -> None:
        """Let convolutions fetch the rows, so that the gradients of these come back through the shard.

        Raises:
            RuntimeError: one has taken the halo.
        """
        if self.use.is_taken:
            raise RuntimeError(
                "the gradient of this tensor is not whole: a convolution has read rows of it that came with a norm, "
                "whose gradients return there; register a hook on the tensor before the convolution is called"
            )
        self.use.is_given_up = True


def current(halo: Halo | None, shard: torch.Tensor) -> Halo | None:
    """Return the halo if the shard has not changed since, and nobody asked for its gradient."""
    if halo is None or halo.use.is_given_up or halo.version != version_of(shard):
        return None
    return halo


def reach_of(asked: Reaches | None, domain: Domain) -> Reach | None:
    """Return what is known to be asked of a tensor of a domain; nothing in inference mode, which counts no changes."""
    if not asked or torch.is_inference_mode_enabled():
        return None
    found = (asked.get((dim, axis.layout)) for dim, axis in domain.axes.items())
    return next((reach for reach in found if reach is not None), None)


@planned
def foreign_rows(
    owned: tuple[Ranges, ...], length: int, wanted: Wanted, periodic: bool
) -> Wanted:
    """Return the rows that each rank wants of others, its halo; the arguments are those of `rows.plan_rows`."""
    wanted, _ = plan_rows(owned, length, wanted, periodic)
    return tuple(
        tuple(
            part
            for parts in ranges
            for part in difference(intersection((parts,), ((0, length),)), own)
        )
        for ranges, own in zip(wanted, owned, strict=True)
    )


def send_with(
    statistics: torch.Tensor,
    x: torch.Tensor,
    sent: Places,
    received: Places,
    axis: Axis,
    dim: int,
) -> tuple[torch.Tensor, list[tuple[Range, torch.Tensor]]]:
    """Return the statistics of all ranks of an axis, (ranks, *shape), and rows that came with them; one all-to-all.

    statistics: of one shape on every rank. x: of the same type. sent, received: as of `Movement`, places in dimension
    `dim` of x, and where what comes belongs. The rows come with their places. Not differentiable.
    """
    number = statistics.numel()
    width = math.prod((*x.shape[:dim], *x.shape[dim + 1 :]))
    rows = [
        [x.narrow(dim, start, stop - start).reshape(-1) for start, stop in places]
        for places in sent
    ]
    message = torch.cat([part for mine in rows for part in (statistics.reshape(-1), *mine)])
    sizes = [[number + size(places) * width for places in each] for each in (sent, received)]
    arrived = send_rows(message, *sizes, axis.group, kind="statistics").split(sizes[1])
    shape = [*x.shape]
    parts = []
    for piece, places in zip(arrived, received, strict=True):
        first = number
        for start, stop in places:
            shape[dim] = stop - start
            last = first + (stop - start) * width
            parts.append(((start, stop), piece[first:last].view(shape)))
            first = last
    return torch.stack([piece[:number] for piece in arrived]).view(
        axis.degree, *statistics.shape
    ), parts
